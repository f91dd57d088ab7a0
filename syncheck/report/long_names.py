"""Shorten long names in the texts for people: both ends of a name distinguish it, and JSON documents have all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.sentences import Part
from syncheck.text import shorten

if TYPE_CHECKING:
    from collections.abc import Iterable

# Characters of a name. The columns of a table are as wide as the longest name.
_MOST = 240


def shorten_name(name: str) -> str:
    """Return a name on one line, without the middle of a long name."""
    return shorten(name, _MOST)


def shorten_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names on one line each, without the middle of long names."""
    return tuple(shorten_name(name) for name in names)


def write_names(text: str, part: Part) -> str:
    """Write the names in a sentence without the middle of a long name. Paths may be longer: readers copy them."""
    if part is not Part.NAME:
        return text

    return shorten(text) if "/" in text else shorten_name(text)
