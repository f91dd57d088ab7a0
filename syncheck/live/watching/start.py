"""Watch from within a script: `syncheck.live.watch()`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.errors import UsageError
from syncheck.live.checks import list_allowed
from syncheck.live.watching.full_checks import FullChecks
from syncheck.live.watching.session import start_session
from syncheck.live.watching.settings import ACTIONS, WITNESSES, WatchSettings, check_patience, check_witnesses
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.live.watching.session import Session


def watch(
    *,
    every: int = 100,
    witnesses: Sequence[str] = WITNESSES,
    on_desync: str = "warn",
    allow: Sequence[str] = (),
    only: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    events: str | None = None,
    patience: float = 5.0,
) -> Session:
    """Watch this process from now on, as `syncheck watch` does.

    Call it once on every rank, before wrappers and optimizers are created. It ends with the program, or with `stop()`.

    every: reductions between two comparisons of all replicas; 0 for none.
    witnesses: what is observed at each step: "gradients", "parameters", "batches", "rng", "settings".
    on_desync: "warn", "raise", "resync" or "save".
    allow: codes of findings that do not count.
    only, include, exclude: as in `syncheck.Options`.
    events: path of a JSONL file to append to.
    patience: seconds that "raise" waits before a step for the records of the other ranks.

    Raises UsageError for invalid arguments. In a process that is watched already, it returns the running session.
    """
    if on_desync not in ACTIONS:
        raise UsageError(f"on_desync={brief(on_desync)}: must be {', '.join(ACTIONS)}")
    check_patience(patience)
    settings = WatchSettings(
        every=every,
        witnesses=check_witnesses(witnesses),
        on_desync=on_desync,
        allow=list_allowed(allow),
        only=tuple(only),
        include=tuple(include),
        exclude=tuple(exclude),
        events=events,
        patience=patience,
    )
    return start_session(settings, FullChecks)
