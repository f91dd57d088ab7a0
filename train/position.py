"""What lies ahead of a run, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.metrics import Meter

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Plan:
    """What lies ahead: name of the run, epochs, optimizer steps in all and per epoch."""

    run: str
    epochs: int
    steps: int
    steps_per_epoch: int


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
