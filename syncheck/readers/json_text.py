"""JSON in a file that nobody trusts: how much it may hold, and that no name in it stands twice."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from syncheck.readers import bounds


class NotTheObject(ValueError):
    """A text is not the JSON object that it ought to be. found: what it is; needed: what would be right."""

    def __init__(self, found: str, needed: str) -> None:
        super().__init__(found)
        self.found, self.needed = found, needed


def json_object(raw: bytes, *, entry: bytes = b"", finite: bool = False) -> dict[str, Any]:
    """Parse a JSON object, of which the number of parts is bounded before anything is built.

    raw: UTF-8. entry: a key, in quotes, that each tensor of the file has; there is a bound on how often it stands.
    finite: whether to refuse NaN and Infinity, which Python writes and JSON has not. Raises NotTheObject.
    """
    if entry and raw.count(entry) > bounds.MOST_TENSORS:
        raise NotTheObject(f"more than {bounds.MOST_TENSORS} tensors", "fewer")
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > bounds.MOST_OBJECTS:
        raise NotTheObject(f"more than {bounds.MOST_OBJECTS} parts", "fewer")
    try:
        # Decoded here: of bytes, json would take UTF-16 and halves of characters too.
        found = json.loads(raw.decode(), object_pairs_hook=_each_once, parse_constant=_no_json if finite else None)
    except (ValueError, RecursionError) as error:
        raise NotTheObject(f"no JSON: {error!s:.100}", "a JSON object") from None
    if not isinstance(found, dict):
        raise NotTheObject(type(found).__name__, "a JSON object")
    return found


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice")
    return result


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
