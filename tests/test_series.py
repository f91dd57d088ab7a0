"""Drift over runs, and what it may not claim."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import syncheck

if TYPE_CHECKING:
    from pathlib import Path


def save(folder: Path, run: str, rank: int, mean: torch.Tensor, *, epoch: int | None = None, step: float = 5.0) -> None:
    """Write a rank file with one BatchNorm, one parameter, AdamW's counter, and an epoch where one is given."""
    state = {
        "bn.weight": torch.ones(2),
        "bn.running_mean": mean,
        "bn.running_var": torch.ones(2),
        "fc.weight": torch.full((3,), step),
        "optimizer.fc.weight.step": torch.tensor(step),
    }
    torch.save(state | ({} if epoch is None else {"epoch": epoch}), folder / f"{run}_rank{rank}.pth")


@pytest.mark.parametrize("bad", [torch.full((2,), float("nan")), torch.zeros(3)], ids=["nan", "shape"])
def test_drift_without_a_number_closes_nothing(tmp_path: Path, bad: torch.Tensor) -> None:
    """A statistic that is NaN, or of another shape, on one rank of the synchronized run is never a drift of 0.0."""
    for rank in range(2):
        save(tmp_path, "ddp", rank, torch.full((2,), float(rank)))
        save(tmp_path, "ddp-syncbn", rank, bad if rank else torch.zeros(2))
    report = syncheck.compare(tmp_path)
    assert report.verdict == "out_of_sync"
    assert [point.run for point in report.drift] == ["ddp"]
    assert report.closures == ()


def test_the_same_runs_without_the_fault_are_a_pair(tmp_path: Path) -> None:
    """Without the fault those two runs are paired by name, and the gap is closed."""
    for rank in range(2):
        save(tmp_path, "ddp", rank, torch.full((2,), float(rank)))
        save(tmp_path, "ddp-syncbn", rank, torch.zeros(2))
    (closure,) = syncheck.compare(tmp_path).closures
    assert (closure.plain.max_abs, closure.synced.max_abs) == (1.0, 0.0)


@pytest.mark.parametrize(("epoch", "code"), [(3, "SYN299"), (None, "SYN106")])
def test_optimizer_counters_say_progress_only_where_nothing_else_does(
    tmp_path: Path, epoch: int | None, code: str
) -> None:
    """An equal epoch in the files shows that they are of one moment, whatever the optimizer counted."""
    for rank in range(2):
        save(tmp_path, "ddp", rank, torch.zeros(2), epoch=epoch, step=5.0 + rank)
    (group,) = syncheck.compare(tmp_path).groups
    assert [finding.code for finding in group.findings] == [code]
