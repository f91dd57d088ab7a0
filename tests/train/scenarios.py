"""What several test files train, and how they read what it left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from train.engine import Result, train, train_epoch
from train.job import Job, prepare
from train.methods.fsdp import ON_CPU
from train.recorders.base import Recorder
from train.recorders.logbook import Logbook
from train.schedule import Position
from train.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from train.launch import RankContext

# Small enough for a second, and all kinds of tensors are in it.
SMALL = Settings(method="ddp", width=4, max_steps=6, save_per_rank=True)

# What makes the largest networks as small as they can be.
SMALLEST: dict[str, dict[str, int]] = {
    "pyramidnet": {"depth": 8, "alpha": 6},
    "pyramidnet_bottleneck": {"depth": 11, "alpha": 6},
}

NEEDS_FSDP = pytest.mark.skipif(not ON_CPU, reason="this torch shards on GPUs only")


def fsdp(*values: Any) -> Any:
    """Mark the parameters of a test that needs FSDP2, which torch 2.6 cannot run on CPUs."""
    return pytest.param(*values, marks=NEEDS_FSDP)


def slow_fsdp(*values: Any) -> Any:
    """Mark the parameters of such a test that takes long too."""
    return pytest.param(*values, marks=[NEEDS_FSDP, pytest.mark.slow])


def run(ctx: RankContext, settings: Settings) -> Result:
    """Train. It ends with a collective, so all ranks' files are there when it returns on any of them."""
    return train(settings, ctx, Recorder())


def trained(ctx: RankContext, settings: Settings) -> Job:
    """Train, and return what the process then holds in memory."""
    job, position = prepare(settings, ctx), Position(ctx.device)
    logbook = Logbook(job, Recorder(), position)
    train_epoch(job, position, logbook)
    while position.step < job.plan.steps:
        position.next_epoch()
        train_epoch(job, position, logbook)
    return job


def whole_state(job: Job) -> dict[str, Tensor]:
    """All tensors of the model; those that are divided over the ranks are put together, so it is a collective."""
    state = job.method.module.state_dict()
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in state.items()}


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint as a careful user does."""
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, those of the optimizer too."""
    content = load(path)
    flat = dict(content["model"])
    for index, states in content["optimizer"]["state"].items():
        flat |= {f"optimizer.{index}.{k}": v for k, v in states.items() if isinstance(v, torch.Tensor)}
    return flat


def differing(a: Path, b: Path) -> set[str]:
    """Names of the tensors whose bytes differ between two checkpoints."""
    left, right = tensors(a), tensors(b)
    assert list(left) == list(right)
    return {n for n in left if left[n].numpy().tobytes() != right[n].numpy().tobytes()}


def widest_gap(a: Path, b: Path) -> float:
    """Largest absolute difference between two checkpoints' model tensors."""
    left, right = load(a)["model"], load(b)["model"]
    return max((left[n].double() - right[n].double()).abs().max().item() for n in left)
