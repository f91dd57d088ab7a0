"""Expected ends of a run: errors that the user can fix, printed as one line by run.py, and signals."""

from __future__ import annotations

from contextlib import contextmanager
from signal import Signals
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class UserError(Exception):
    """An unusable option, file or environment. Raised on all ranks, printed by rank 0."""


@contextmanager
def explain_os_error(problem: str) -> Iterator[None]:
    """Raise UserError with a problem and the system's reason if the block raises OSError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{problem}: {error.strerror}") from error


class RankError(UserError):
    """An error on a single rank, which prints it."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def join_lines(error: BaseException) -> str:
    """Return an error's message in one line, or the name of its type."""
    return " ".join(str(error).split()) or type(error).__name__


def refuse(*cases: tuple[object, str], error: type[Exception] = UserError) -> None:
    """Raise the error with the message of the first case that applies. cases: whether each applies, and its message."""
    for applies, message in cases:
        if applies:
            raise error(message)


class Stopped(Exception):
    """A signal stopped the run after the same step on all ranks.

    number: of the signal. step: optimizer steps done. outcome: whether the state was saved, the end of the message.
    """

    def __init__(self, number: int, step: int, outcome: str) -> None:
        super().__init__(f"stopped by {Signals(number).name} after step {step}; {outcome}")
        self.number, self.step = number, step
