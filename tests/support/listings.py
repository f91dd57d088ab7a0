"""Fields of the records that tests compare: findings, diffs, replicas, rows of JSON, lines and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def list_codes(items: Iterable[Any]) -> list[Any]:
    """Return the codes of findings, facts or notes, or the exit codes of commands."""
    return list_fields(items, "code")


def list_names(items: Iterable[Any]) -> list[str]:
    """Return the names of diffs, values or paths."""
    return list_fields(items, "name")


def list_fields(items: Iterable[Any], *fields: str | int) -> list[Any]:
    """Return one field of each item, or a tuple of several fields.

    A field is an attribute, the key of a mapping, or the position in a tuple or list.
    """
    items = list(items)
    if len(fields) == 1:
        return [_get_field(item, fields[0]) for item in items]
    columns = [list_fields(items, field) for field in fields]
    return list(zip(*columns, strict=True))


def join_fields(items: Iterable[Any], field: str) -> list[Any]:
    """Return the elements of a field of all items."""
    return list(chain.from_iterable(list_fields(items, field)))


def list_pairs(groups: Mapping[Any, Iterable[Any]]) -> list[tuple[Any, Any]]:
    """Return the key of a group with each of its elements."""
    return [(key, element) for key, elements in groups.items() for element in elements]


def find_all(items: Iterable[Any], **fields: Any) -> list[Any]:
    """Return the items whose fields have these values."""
    for field, value in fields.items():
        items = [item for item in items if _get_field(item, field) == value]
    return list(items)


def find_first(items: Iterable[Any], **fields: Any) -> Any:
    """Return the first item whose fields have these values. Raises IndexError without one."""
    return find_all(items, **fields)[0]


def list_failing(report: Any) -> list[Any]:
    """Return the findings of a report or group that fail."""
    return find_all(report.findings, fails=True)


def get_failing(report: Any) -> Any:
    """Return the only finding of a report or group that fails. Raises ValueError for none or several."""
    (finding,) = list_failing(report)
    return finding


def index_by(items: Iterable[Any], field: str) -> dict[Any, Any]:
    """Return the items by a field."""
    return {_get_field(item, field): item for item in items}


def map_fields(items: Mapping[Any, Any], *fields: str) -> dict[Any, Any]:
    """Return the key of each item with one of its fields, or with a tuple of several."""
    return dict(zip(items, list_fields(items.values(), *fields), strict=True))


def find_texts(texts: Iterable[str], part: str = "", *, start: str | tuple[str, ...] = "", end: str = "") -> list[str]:
    """Return the lines or names that contain a part, and have this start and end."""
    return [text for text in texts if part in text and text.startswith(start) and text.endswith(end)]


def list_starts(lines: Iterable[str], separator: str | None = None) -> list[str]:
    """Return the part of each line before a separator; without a separator, the first word."""
    return [line.split(separator)[0] for line in lines]


def list_absent(text: Any, parts: Iterable[str]) -> list[str]:
    """Return the parts that a text, or a list of names, does not contain."""
    return [part for part in parts if part not in text]


def is_printable(text: str) -> bool:
    """Return whether a text has only printable characters and line ends."""
    return all(character.isprintable() or character == "\n" for character in text)


def list_files(folder: Path) -> list[str]:
    """Return the sorted names of a folder's files and folders."""
    return sorted(path.name for path in folder.iterdir())


def list_rank_files(folder: Path, pattern: str, ranks: int) -> list[Path]:
    """Return the path of each rank's file. pattern: a file name with {} for the rank."""
    return [folder / pattern.format(rank) for rank in range(ranks)]


def read_files(paths: Iterable[Path]) -> dict[Path, bytes]:
    """Return the bytes of files by path."""
    return {path: path.read_bytes() for path in paths}


def read_json_lines(path: Path) -> list[Any]:
    """Return the documents of a file with one JSON document per line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def measure_width(lines: Iterable[str]) -> int:
    """Return the length of the longest line."""
    return max(len(line) for line in lines)


def _get_field(item: Any, field: str | int) -> Any:
    if isinstance(item, Mapping) or isinstance(field, int):
        return item[field]
    return getattr(item, field)
