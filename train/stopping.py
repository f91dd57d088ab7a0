"""A run that is asked to stop by a signal stops on all ranks after the same step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from train.launch import RankContext

EVERY = 0.5  # seconds between two agreements, about


class StopSignals(Protocol):
    """What tells this rank of signals. number: the one that asks it to stop, or 0; see train/launch/signals.py."""

    number: int

    def defer(self) -> None:
        """Hold signals back from now on: somebody asks for them."""


class Stopping:
    """Tells all ranks alike whether one of them has been asked to stop.

    A signal reaches the ranks at different steps, or only one of them, and a rank that went alone would leave the
    others waiting in their next collective. So at steps that all ranks know they agree: an all-reduce of two
    numbers, the largest signal and the longest time since the last agreement. From that time every rank computes the
    same number of steps until the next agreement: as many as fill half a second, and one at least.

    signals: the signals of this process; None where nobody listens, as in a test or a notebook, and then there is no
    agreement. between: whether ranks may agree between the steps of an epoch; not where they take different
    numbers of them.
    """

    def __init__(self, ctx: RankContext, signals: StopSignals | None = None, *, between: bool = True) -> None:
        self.ctx, self.signals, self.between = ctx, signals, between
        self.due = 0  # step
        self.last = (0, 0.0)  # step and time of the last agreement; step 0: the pace is not known

    def begin(self) -> None:
        """Answer for signals from now on."""
        if self.signals is not None:
            self.signals.defer()

    def agree_on_signal(self, step: int, *, now: bool = False) -> int:
        """Give the number of the signal by which any rank was asked to stop, or 0; a collective when it is due.

        To be called on every rank after each optimizer step, counted from 1, with `now` after anything else that
        takes long: an evaluation is no part of the pace.
        """
        if self.signals is None:
            return 0
        if self.ctx.backend is None:
            return self.signals.number
        if not now and (step < self.due or not self.between):
            return 0
        before, since = self.last
        # In float64, for its 53 bits hold both exactly enough; on the device, for NCCL sends nothing else.
        mine = [float(self.signals.number), time.monotonic() - since]
        number, seconds = self.ctx.max_over_ranks(
            torch.tensor(mine, dtype=torch.float64, device=self.ctx.device)
        ).tolist()
        self.last = (step, time.monotonic())
        if not now:
            self.due = step + (count_steps_within(step - before, seconds) if before else 1)
        return int(number)


def count_steps_within(steps: int, seconds: float, every: float = EVERY) -> int:
    """Compute how many steps take `every` seconds, from the time that some took; 1 at least."""
    return max(1, int(every * steps / max(seconds, 1e-6)))
