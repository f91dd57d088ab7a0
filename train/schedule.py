"""How the learning rate goes over a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer

WARM_UP = 0.1  # share of all steps over which the learning rate rises


def schedule(step: int, steps: int) -> float:
    """Scale the learning rate: a linear rise to 1, then half a cosine towards 0. step: 0 to steps - 1."""
    rise = max(1, int(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / (steps - rise)))


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set it for all parameters, on every rank to the same number."""
    for group in optimizer.param_groups:
        group["lr"] = lr
