"""Stop all ranks after the same step when any rank receives a signal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from train.launch import RankContext

EVERY = 0.5  # approximate seconds between agreements


class StopSignals(Protocol):
    """The signals received by this process; see train/launch/signals.py. number: the signal to stop, or 0."""

    number: int

    def defer(self) -> None:
        """From now on, only record signals; `Stopping` reads them."""


class Stopping:
    """Lets all ranks agree on a signal received by any rank.

    A signal may reach ranks at different steps, or only one rank, and a rank that stopped alone would leave the other
    ranks waiting in their next collective. Therefore ranks agree at common steps, with one all-reduce of two numbers:
    the largest signal number, and the longest time since the last agreement. From this time every rank computes the
    same number of steps until the next agreement: as many as take half a second, and at least 1.

    signals: of this process; None disables agreements, for example in a notebook. between: whether ranks may agree
    within an epoch; not if they make different numbers of steps.
    """

    def __init__(self, ctx: RankContext, signals: StopSignals | None = None, *, between: bool = True) -> None:
        self.ctx, self.signals, self.between = ctx, signals, between
        self.due = 0  # step
        self.last = (0, 0.0)  # step and time of the last agreement; at step 0 the speed is unknown

    def begin(self) -> None:
        """Start to handle signals."""
        if self.signals is not None:
            self.signals.defer()

    def agree_on_signal(self, step: int, *, now: bool = False) -> int:
        """Return the number of the signal received by any rank, or 0; a collective when an agreement is due.

        Call it on every rank after each optimizer step, counted from 1. Pass `now` after an evaluation, whose time is
        not part of the speed.
        """
        if self.signals is None:
            return 0
        if self.ctx.backend is None:
            return self.signals.number
        if not now and (step < self.due or not self.between):
            return 0
        before, since = self.last
        # float64 represents both numbers exactly enough; NCCL needs a tensor on the device.
        mine = [float(self.signals.number), time.monotonic() - since]
        number, seconds = self.ctx.max_over_ranks(
            torch.tensor(mine, dtype=torch.float64, device=self.ctx.device)
        ).tolist()
        self.last = (step, time.monotonic())
        if not now:
            self.due = step + (count_steps_within(step - before, seconds) if before else 1)
        return int(number)


def count_steps_within(steps: int, seconds: float, every: float = EVERY) -> int:
    """Return the number of steps that take `every` seconds, at least 1. seconds: the time of `steps` steps."""
    return max(1, int(every * steps / max(seconds, 1e-6)))
