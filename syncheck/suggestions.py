"""Find the names and paths that a user probably meant by unknown ones. Imports nothing of syncheck."""

from __future__ import annotations

import os
import re
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# Entries of a folder to search, which may hold millions of files.
_MOST_ENTRIES = 10_000
# Names that may be equally similar.
_MOST_SIMILAR = 20
_NUMBERS = re.compile(r"\d+")


def suggest(word: str, names: Iterable[str]) -> str:
    """Return '; did you mean compare?' with the names that begin with a word, else the most similar; empty if none."""
    matches = find_similar(word, names)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def find_similar(word: str, names: Iterable[str]) -> list[str]:
    """Return the names that begin with a word, else the most similar name; empty if none is similar."""
    # Only a message about an error needs it.
    from difflib import SequenceMatcher, get_close_matches

    all_names = list(names)
    # Two dashes alone, and an empty word, begin all names.
    if word.strip("-."):
        matches = [name for name in all_names if name.startswith(word)]
        if matches:
            return matches

    # The dashes before options would make all of them similar.
    bare_word = word.lstrip("-")
    name_of_bare = {name.lstrip("-"): name for name in all_names}

    def rate(bare: str) -> tuple[float, int]:
        # Of equally similar codes, the one with the same beginning is meant: SYN2011 is SYN201 and not SYN211.
        return SequenceMatcher(None, bare, bare_word).ratio(), _count_common(bare, bare_word)

    similar = get_close_matches(bare_word, name_of_bare, _MOST_SIMILAR)
    return [name_of_bare[max(similar, key=rate)]] if similar else []


def _count_common(first: str, second: str) -> int:
    """Return the number of characters with which both words begin."""
    count = 0
    for letter_of_first, letter_of_second in zip(first, second, strict=False):
        if letter_of_first != letter_of_second:
            break
        count += 1
    return count


def find_similar_path(path: str) -> str:
    """Return the path of the most similar name in the folder of a missing path; empty if none is similar.

    A name with other numbers is the file of another rank or step, which is never meant. The name itself is a link whose
    target is missing.
    """
    folder, name = os.path.split(os.path.normpath(path))
    try:
        with os.scandir(folder or ".") as entries:
            names = [entry.name for entry in islice(entries, _MOST_ENTRIES)]
    except (OSError, ValueError):
        # The folder is missing too, or may not be read.
        return ""
    numbers = _NUMBERS.findall(name)
    # An equal extension makes short names similar that have nothing else in common.
    stem = os.path.splitext(name)[0]
    candidates = []
    for entry in sorted(names):
        is_same_number = _NUMBERS.findall(entry) == numbers
        if is_same_number and entry != name and find_similar(stem, [os.path.splitext(entry)[0]]):
            candidates.append(entry)
    matches = find_similar(name, candidates)
    return os.path.join(folder, matches[0]) if matches else ""


def suggest_path(path: str) -> str:
    """Return '; did you mean ckpts/a.pth?' for a missing path; empty if no name in its folder is similar."""
    similar = find_similar_path(path)
    return f"; did you mean {similar}?" if similar else ""
