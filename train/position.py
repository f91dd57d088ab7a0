"""How far a run has come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.metrics import Meter

if TYPE_CHECKING:
    import torch


class Position:
    """How far a run has come.

    step: optimizer steps done. epoch: the one it is in, counted from 1. in_epoch: steps done in that epoch. meter: this
    rank's sums over them.
    """

    def __init__(self, device: torch.device) -> None:
        self.step = 0
        self.epoch = 1
        self.in_epoch = 0
        self.meter = Meter(device)

    def next_epoch(self) -> None:
        """Begin another epoch."""
        self.epoch += 1
        self.in_epoch = 0
        self.meter = Meter(self.meter.sums.device)
