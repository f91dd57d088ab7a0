"""Settings, runs and comparisons for several test files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from train.engine import Job, train, train_epoch
from train.methods import assign_mesh
from train.methods.fsdp import ON_CPU
from train.recorders.base import Recorder
from train.schedule import Position
from train.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from train.launch import RankContext
    from train.result import Result

# Trains for about a second; the checkpoints have all kinds of tensors.
SMALL = Settings(method="ddp", width=4, max_steps=6, save_per_rank=True)

# Options for the smallest variants of the largest networks.
SMALLEST: dict[str, dict[str, int]] = {
    "pyramidnet": {"depth": 8, "alpha": 6},
    "pyramidnet_bottleneck": {"depth": 11, "alpha": 6},
}

NEEDS_FSDP = pytest.mark.skipif(not ON_CPU, reason="this torch shards on GPUs only")


def fsdp(*values: Any) -> Any:
    """Mark the parameters of a test that needs FSDP2, which torch 2.6 cannot run on CPUs."""
    return pytest.param(*values, marks=NEEDS_FSDP)


def slow_fsdp(*values: Any) -> Any:
    """Mark the parameters of a slow test that needs FSDP2."""
    return pytest.param(*values, marks=[NEEDS_FSDP, pytest.mark.slow])


def run(ctx: RankContext, settings: Settings) -> Result:
    """Train. The last operation is a collective, so the files of all ranks exist when this function returns."""
    return train(settings, assign_mesh(settings, ctx), Recorder())


def make_job(ctx: RankContext, settings: Settings) -> Job:
    """Build the objects of a run."""
    return Job(settings, assign_mesh(settings, ctx))


def trained(ctx: RankContext, settings: Settings) -> Job:
    """Train, and return the job with its model and optimizer."""
    job, position = make_job(ctx, settings), Position(ctx.device)
    train_epoch(job, position)
    while position.step < job.plan.steps:
        position.next_epoch()
        train_epoch(job, position)
    return job


def whole_state(job: Job) -> dict[str, Tensor]:
    """Return the model's full tensors by name; a collective, because ranks exchange shards."""
    state = job.method.module.state_dict()
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in state.items()}


def load(path: Path) -> dict[str, Any]:
    """Load a checkpoint with weights_only=True, as careful users do."""
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by name, including the optimizer's."""
    content = load(path)
    flat = dict(content["model"])
    for index, states in content["optimizer"]["state"].items():
        flat |= {f"optimizer.{index}.{k}": v for k, v in states.items() if isinstance(v, torch.Tensor)}
    return flat


def differing(a: Path, b: Path) -> set[str]:
    """Return the names of the tensors whose bytes differ between two checkpoints."""
    remaining, right = tensors(a), tensors(b)
    assert list(remaining) == list(right)
    return {n for n in remaining if remaining[n].numpy().tobytes() != right[n].numpy().tobytes()}


def widest_gap(a: Path, b: Path) -> float:
    """Return the largest absolute difference between the model tensors of two checkpoints."""
    remaining, right = load(a)["model"], load(b)["model"]
    return max((remaining[n].double() - right[n].double()).abs().max().item() for n in remaining)
