"""The options of watching."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from syncheck.errors import OptionError
from syncheck.frozen import record
from syncheck.suggestions import suggest

if TYPE_CHECKING:
    from collections.abc import Sequence

WITNESSES = ("gradients", "parameters", "batches", "rng", "settings")
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
    prefix: str = ""
    """What options begin with in texts: see `text.options_as_typed`. Empty in a script that calls `watch()`."""


def check_patience(seconds: float) -> None:
    """Raise UsageError for a time to wait that is negative, infinite or no number."""
    if not 0 <= seconds < math.inf:
        raise OptionError("must be a number of seconds of at least 0", patience=seconds)


def check_witnesses(witnesses: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of witnesses; a text stands for one of them. Raises UsageError."""
    names = (witnesses,) if isinstance(witnesses, str) else tuple(witnesses)
    for name in names:
        if name not in WITNESSES:
            choices = ", ".join((*WITNESSES, "none"))
            raise OptionError(f"must be one of {choices}{suggest(name, WITNESSES)}", witnesses=name)
    return names


def name_file_of_judge(path: str, rank: int) -> str:
    """Return the path of an output of the judge on a rank.

    Several sets of replicas have several judges, and none replaces the file of another one. The first rank writes the
    file with the path of the user.
    """
    root, extension = os.path.splitext(path)
    # A stream has room for all of them.
    return path if rank == 0 or not extension else f"{root}.rank{rank}{extension}"
