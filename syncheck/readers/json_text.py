"""Parse JSON from untrusted files, with limits and without duplicate names."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from syncheck.readers import limits


class InvalidJson(ValueError):
    """A text is not the expected JSON object. found, needed: for a MalformedFile."""

    def __init__(self, found: str, needed: str) -> None:
        super().__init__(found)
        self.found, self.needed = found, needed


def parse_json_object(raw: bytes, *, entry: bytes = b"", finite: bool = False) -> dict[str, Any]:
    """Parse a JSON object, limiting the number of its parts before parsing.

    raw: UTF-8. entry: a quoted key of every tensor, to count the tensors. finite: refuse NaN and Infinity, which are
    not JSON but which Python accepts. Raises InvalidJson.
    """
    if entry and raw.count(entry) > limits.MOST_TENSORS:
        raise InvalidJson(f"more than {limits.MOST_TENSORS} tensors", "fewer")
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > limits.MOST_OBJECTS:
        raise InvalidJson(f"more than {limits.MOST_OBJECTS} parts", "fewer")
    try:
        # Decoded as UTF-8, because json.loads would also accept UTF-16 and lone surrogates in bytes.
        found = json.loads(
            raw.decode(), object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant if finite else None
        )
    except (ValueError, RecursionError) as error:
        raise InvalidJson(f"invalid JSON: {error!s:.100}", "a JSON object") from None
    if not isinstance(found, dict):
        raise InvalidJson(type(found).__name__, "a JSON object")
    return found


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a duplicate name")
    return result


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"the constant {constant}")
