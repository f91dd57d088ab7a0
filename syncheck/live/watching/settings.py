"""The options of watching."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.errors import UsageError
from syncheck.frozen import record
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Sequence

WITNESSES = ("gradients", "batches", "rng", "settings")
ACTIONS = ("warn", "raise", "resync", "save")
SAVE_FOLDER = "syncheck-desync"


@record
class WatchSettings:
    """The options of `syncheck watch`, which the processes that a script starts get too."""

    every: int = 100
    """Reductions between two comparisons of all replicas; 0 for none."""
    witnesses: tuple[str, ...] = WITNESSES
    """What is observed at each step."""
    on_desync: str = "warn"
    """What happens on all ranks if they are out of sync."""
    allow: tuple[str, ...] = ()
    """The codes of findings that do not count."""
    only: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    events: str | None = None
    """Path of a JSONL file of events."""
    outputs: tuple[str, ...] = ()
    """Paths of reports, written at the end."""
    strict: bool = False
    """Exit with 1 if the script exits with 0 and the ranks were out of sync."""
    patience: float = 5.0
    """Seconds that `raise` waits for the records of the other ranks before a step."""


def check_witnesses(witnesses: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of witnesses; a text stands for one of them. Raises UsageError."""
    names = (witnesses,) if isinstance(witnesses, str) else tuple(witnesses)
    for name in names:
        if name not in WITNESSES:
            raise UsageError(f"witnesses={brief(witnesses)}: {name!r} is none of {', '.join(WITNESSES)}")
    return names
