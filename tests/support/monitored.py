"""A short training under a monitor, with an injected fault."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console

from support.agreement import flip, trained
from syncheck.live import SyncMonitor

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.records import Report


@dataclass
class Watched:
    """A training under a monitor. returned: the result of `step`, by step."""

    norm: bool = False
    plant: Callable[[int, Any], None] = lambda step, model: None
    returned: dict[int, Report | None] = field(default_factory=dict)

    def start(self, **options: Any) -> SyncMonitor:
        """Build model, optimizer and monitor."""
        self.model, self.optimizer = trained(self.norm)
        self.monitor = SyncMonitor(self.model, self.optimizer, **{"every": 2, "console": False} | options)
        return self.monitor

    def step(self, step: int) -> None:
        """Train one step, inject the fault if due, and call the monitor."""
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4)).square().sum().backward()
        self.optimizer.step()
        self.plant(step, self.model.module)
        self.returned[step] = self.monitor.step()

    def run(self, steps: int, **options: Any) -> Report | None:
        """Train with the monitor as a context manager; return its last report."""
        with self.start(**options):
            for step in range(1, steps + 1):
                self.step(step)
        return self.monitor.last


def flip_at(step: int, rank: int) -> Callable[[int, Any], None]:
    """Flip a bit of one weight on one rank after a step."""

    def plant(now: int, model: Any) -> None:
        if now == step and dist.get_rank() == rank:
            flip(model.fc.weight, bit=20)

    return plant


def printer(**options: Any) -> tuple[Console, io.StringIO]:
    """Return a console and its output; by default not a terminal."""
    out = io.StringIO()
    return Console(file=out, **options), out
