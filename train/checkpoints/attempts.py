"""Saves on the way of a run, which may fail without ending it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from train.errors import UserError
from train.launch.exits import print_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from train.launch import RankContext

T = TypeVar("T")


class Attempts:
    """Counts saves that a run does on its way, and those that fail.

    A disk that is full for an hour must not end a training of days: the failure is said at once, by rank 0, the next
    save tries again, and the run ends with exit code 2 all the same, so that nobody takes its files for complete.
    """

    def __init__(self, ctx: RankContext) -> None:
        self.ctx = ctx
        self.made = 0
        self.errors: list[str] = []

    def save(self, what: str, write: Callable[[], T]) -> T | None:
        """Call `write`, which raises UserError on all ranks alike or on none; returns None where it did.

        what: is saved, for the message.
        """
        self.made += 1
        try:
            return write()
        except UserError as error:
            self.errors.append(f"{what} is not saved: {error}")
            print_once(self.ctx, f"warning: {self.errors[-1]}; the run goes on, and tries again at the next")
            return None

    @property
    def failed(self) -> str:
        """How many have failed, and how the last one did, as a sentence; empty if none has."""
        if not self.errors:
            return ""
        return f"{len(self.errors)} of {self.made} saves on the way failed, the last: {self.errors[-1]}"
