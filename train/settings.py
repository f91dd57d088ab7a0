"""What one run is asked to do: a frozen record, and the checks that need neither data nor model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.errors import UserError

# Used where --lr is not given. Found on digits with resnet8 at a global batch of 32.
LEARNING_RATES = {"sgd": 0.1, "adamw": 0.005}


@dataclass(frozen=True)
class Settings:
    """All that decides a run; the defaults are those of the command line.

    batch_size: samples per optimizer step, over all ranks together. width: channels of the model's first
    layer, or None for the model's own. lr: peak of the schedule. limit_train: keep this many training samples
    only. save_every: optimizer steps between two saved steps.
    """

    method: str = "single"
    sync_bn: bool = False
    buffer_sync: bool = True
    model: str = "resnet8"
    width: int | None = None
    data: str = "digits"
    data_dir: Path | None = None
    limit_train: int | None = None
    shuffle: bool = True
    epochs: int = 10
    max_steps: int | None = None
    batch_size: int = 32
    optimizer: str = "sgd"
    lr: float = LEARNING_RATES["sgd"]
    momentum: float = 0.9
    weight_decay: float = 5e-4
    seed: int = 0
    out: Path = Path("ckpts")
    save_per_rank: bool = False
    save_every: int | None = None
    save_format: str = "pth"

    @property
    def run(self) -> str:
        """The method with its modifiers: names files, and the run in the metadata block."""
        parts = [self.method]
        if self.sync_bn:
            parts.append("syncbn")
        if not self.buffer_sync:
            parts.append("nobufsync")
        return "-".join(parts)

    def config(self, world_size: int) -> dict[str, Any]:
        """Collect what distinguishes this run from others, as JSON values.

        Nothing derived from `sync_bn` is in it, so that two runs that differ only there are seen to be a
        pair.
        """
        return {
            "method": self.method,
            "sync_bn": self.sync_bn,
            "buffer_sync": self.buffer_sync,
            "model": self.model,
            "width": self.width,
            "data": self.data,
            "limit_train": self.limit_train,
            "shuffle": self.shuffle,
            "epochs": self.epochs,
            "max_steps": self.max_steps,
            "batch_size": self.batch_size,
            "optimizer": self.optimizer,
            "lr": self.lr,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "seed": self.seed,
            "world_size": world_size,
        }


def check(settings: Settings, world_size: int) -> None:
    """Refuse what cannot work, with the reason. Equal on all ranks, for all have the same arguments.

    Raises UserError.
    """
    s = settings
    for option, number in (
        ("--epochs", s.epochs),
        ("--batch-size", s.batch_size),
        ("--width", s.width),
        ("--limit-train", s.limit_train),
        ("--max-steps", s.max_steps),
        ("--save-every", s.save_every),
    ):
        if number is not None and number < 1:
            raise UserError(f"{option} {number}: needs 1 or more")
    if not (math.isfinite(s.lr) and s.lr > 0):
        raise UserError(f"--lr {s.lr}: needs a positive number")
    if not 0 <= s.momentum < 1:
        raise UserError(f"--momentum {s.momentum}: needs a number from 0 to below 1")
    if not (math.isfinite(s.weight_decay) and s.weight_decay >= 0):
        raise UserError(f"--weight-decay {s.weight_decay}: needs 0 or a positive number")
    if not 0 <= s.seed < 2**63:
        raise UserError(f"--seed {s.seed}: needs a number from 0 to 2**63 - 1")
    if s.batch_size < world_size:
        raise UserError(
            f"--batch-size {s.batch_size} (global) leaves some of {world_size} ranks empty; use {world_size} or more"
        )
