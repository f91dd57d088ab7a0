"""Trainers' bookkeeping in checkpoints of Lightning and of hand-written loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import network, save_pth

import syncheck

if TYPE_CHECKING:
    from pathlib import Path

KEY = "ModelCheckpoint{'monitor': 'loss'}"


def lightning(folder: Path, rank: int, callback: dict[str, Any]) -> Path:
    """Write a rank's file with the state of one callback."""
    optimizer = {"state": {0: {"exp_avg": np.zeros(2, np.float32)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    tree = {"global_step": 3, "state_dict": {"w": np.ones(2, np.float32)}, "loops": {}, "callbacks": {KEY: callback}}
    return save_pth(folder / f"last_rank{rank}.ckpt", {**tree, "optimizer_states": [optimizer]})


@pytest.mark.parametrize(("dtype", "value"), [(np.float32, 0.5), (np.float64, 0.25), (np.int64, -3)])
def test_scalars_of_callbacks_are_values(tmp_path: Path, dtype: Any, value: float) -> None:
    """A callback's best score in a 0-d tensor is listed if it differs, and the files stay in sync."""
    files = [lightning(tmp_path, rank, {"best_model_score": np.array(value + rank, dtype)}) for rank in range(2)]
    snapshot = syncheck.read(str(files[0]))
    assert snapshot.values[f"callbacks.{KEY}.best_model_score"] == value
    report = syncheck.compare(*files)
    assert (report.verdict, report.groups[0].counts.tensors) == ("in_sync", 2)
    (diff,) = report.groups[0].values
    assert (dict(diff.by_rank), diff.counts) == ({0: value, 1: value + 1}, False)


def test_weights_of_callbacks_are_tensors(tmp_path: Path) -> None:
    """Averaged weights in a callback are compared like other tensors."""
    files = [lightning(tmp_path, rank, {"weights": np.full(2, rank, np.float32)}) for rank in range(2)]
    (group,) = syncheck.compare(*files).groups
    assert [diff.name for diff in group.tensors if diff.out_of_sync] == [f"callbacks.{KEY}.weights"]


def test_tensors_of_callbacks_are_not_parameters(tmp_path: Path) -> None:
    """Optimizer states get their parameters' names although a callback has tensors too."""
    file = lightning(tmp_path, 0, {"best": np.array(1.0, np.float32), "weights": np.ones(3, np.float32)})
    assert "optimizer.w.exp_avg" in syncheck.read(str(file)).tensors


def test_words_of_rng_states_are_not_listed(tmp_path: Path) -> None:
    """Python's RNG state of 625 numbers differs by design and is not listed."""
    for rank in range(2):
        random = {"python": (3, tuple(range(rank, 625 + rank)), None), "seed": 7 + rank}
        save_pth(tmp_path / f"rank{rank}.pth", {"model": network(), "rng_state": random, "milestones": [rank, 5]})
    (group,) = syncheck.compare(tmp_path).groups
    assert {diff.name for diff in group.values} == {"rng_state.seed", "milestones.0"}
