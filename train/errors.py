"""What ends a run in order: errors that a user can mend, which run.py prints as one line, and a signal."""

from __future__ import annotations

from signal import Signals


class UserError(Exception):
    """An option, file or environment that cannot be used; raised on all ranks alike, printed by rank 0."""


class RankError(UserError):
    """Concerns the rank that raises it and maybe no other, so that rank prints it itself."""


class Stopped(Exception):
    """A signal asked the run to stop, and all ranks have after the same step.

    number: of the signal. step: optimizer steps done. what: what became of the state, the rest of a sentence.
    """

    def __init__(self, number: int, step: int, what: str) -> None:
        super().__init__(f"stopped by {Signals(number).name} after step {step}; {what}")
        self.number, self.step = number, step
