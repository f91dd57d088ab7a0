"""Find files whose path states another step or epoch than their content: a file was renamed, or saved with an old name.

Files are grouped by their paths, and steps in their content are compared as values.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.frozen import record
from syncheck.layout.path_numbers import split_path
from syncheck.messages import Message, Note

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.snapshots import Snapshot

# Every step of a run may have the same fault.
_MOST_NOTES = 3
_STEPS = ("step", "global_step", "iteration", "iter_num", "iter", "num_updates")
_EPOCHS = ("epoch", "current_epoch")
# The names of stored numbers by the word before the number of a path. Checkpoints are numbered by either.
_NAMES = {
    "step": _STEPS,
    "iter": _STEPS,
    "iteration": _STEPS,
    "epoch": _EPOCHS,
    "checkpoint": _STEPS + _EPOCHS,
    "ckpt": _STEPS + _EPOCHS,
}
_WORD = re.compile(r"(?i)(step|iter|iteration|epoch|checkpoint|ckpt)s?[-_=]?$")


@record
class _Contradiction:
    """The step in a path, and another step in the content."""

    word: str
    """The word before the number in the path."""
    named: int
    """The number in the path."""
    name: str
    """The name of the stored number."""
    stored: int
    """The stored number."""


def note_contradicting_steps(snapshots: Iterable[Snapshot]) -> list[Message]:
    """Return a note for each of the first pairs of a step in paths and another step in the content of these files."""
    files: dict[_Contradiction, list[str]] = defaultdict(list)
    for snapshot in snapshots:
        contradiction = _find_contradiction(snapshot)
        if contradiction is not None:
            files[contradiction].append(snapshot.path)

    notes: list[Message] = []
    for contradiction, paths in [*files.items()][:_MOST_NOTES]:
        note = Note.CONTRADICTING_STEPS(
            files=tuple(map(os.path.basename, paths)),
            word=contradiction.word,
            named=contradiction.named,
            name=contradiction.name,
            stored=contradiction.stored,
        )
        notes.append(note)

    if len(files) > _MOST_NOTES:
        notes.append(Note.MORE_CONTRADICTING_STEPS(count=len(files) - _MOST_NOTES))

    return notes


def _find_contradiction(snapshot: Snapshot) -> _Contradiction | None:
    """Return the step in the path of a file that its content contradicts."""
    numbers = split_path(snapshot.path)
    position = numbers.find("step")
    if position is None:
        return None

    match = _WORD.search(numbers.texts[position])
    if match is None:
        return None

    word = match[1].lower()
    named = numbers.numbers[position]
    stored_numbers = _list_numbers(snapshot, _NAMES[word])
    for stored in stored_numbers.values():
        # Trainers count the first epoch as 0 or 1, and save before or after they count a step.
        if abs(stored - named) <= 1:
            return None

    for name, stored in stored_numbers.items():
        return _Contradiction(
            word,
            named,
            name,
            stored,
        )

    return None


def _list_numbers(snapshot: Snapshot, names: Iterable[str]) -> dict[str, int]:
    """Return the numbers in a file under some names, in its metadata or at the top level."""
    numbers: dict[str, int] = {}
    for name in names:
        recorded = getattr(snapshot.metadata, name, None)
        stored = snapshot.values.get(name, recorded)
        # True is an integer, and no step.
        if type(stored) is int:
            numbers[name] = stored

    return numbers
