"""Drift over the steps of runs, and the effect of SyncBatchNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.listings import list_codes, list_fields

import syncheck

if TYPE_CHECKING:
    from pathlib import Path


def save(
    folder: Path,
    run: str,
    rank: int,
    mean: torch.Tensor,
    *,
    epoch: int | None = None,
    step: float = 5.0,
    batches: int | None = None,
) -> None:
    """Write a rank file with one BatchNorm, one parameter, AdamW's counter, and optionally an epoch and batches."""
    state = {
        "bn.weight": torch.ones(2),
        "bn.running_mean": mean,
        "bn.running_var": torch.ones(2),
        "fc.weight": torch.full((3,), step),
        "optimizer.fc.weight.step": torch.tensor(step),
    }
    if batches is not None:
        state["bn.num_batches_tracked"] = torch.tensor(batches)
    torch.save(state | ({} if epoch is None else {"epoch": epoch}), folder / f"{run}_rank{rank}.pth")


@pytest.mark.parametrize("bad", [torch.full((2,), float("nan")), torch.zeros(3)], ids=["nan", "shape"])
def test_drift_without_a_number_is_ignored(tmp_path: Path, bad: torch.Tensor) -> None:
    """A statistic with NaN or another shape on one rank of the synchronized run is not a drift of 0.0."""
    for rank in range(2):
        save(tmp_path, "ddp", rank, torch.full((2,), float(rank)))
        save(tmp_path, "ddp-syncbn", rank, bad if rank else torch.zeros(2))
    report = syncheck.compare(tmp_path)
    assert report.verdict == "out_of_sync"
    assert list_fields(report.drift, "run") == ["ddp"]
    assert report.closures == ()


def test_runs_are_paired_by_name(tmp_path: Path) -> None:
    """Without the fault, the two runs are paired by name, and the gap is closed."""
    for rank in range(2):
        save(tmp_path, "ddp", rank, torch.full((2,), float(rank)))
        save(tmp_path, "ddp-syncbn", rank, torch.zeros(2))
    (closure,) = syncheck.compare(tmp_path).closures
    assert (closure.plain.max_abs, closure.synced.max_abs) == (1.0, 0.0)


def save_step(folder: Path, run: str, step: int, gap: float, *, sync_bn: bool, **config: object) -> None:
    """Write the files of two ranks at one step, with metadata and running means that differ by `gap`."""
    (folder / f"step_{step}").mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        block = syncheck.metadata(
            run=run, run_id=run, rank=rank, world_size=2, step=step, config={"sync_bn": sync_bn, **config}
        )
        state = {"bn.weight": torch.ones(2), "bn.running_mean": torch.full((2,), gap * rank)}
        state["bn.running_var"] = torch.ones(2)
        torch.save({"model": state, "syncheck": block}, folder / f"step_{step}" / f"{run}_rank{rank}.pth")


def test_runs_of_different_lengths_are_compared_at_the_last_common_step(tmp_path: Path) -> None:
    """Runs with different numbers of steps are compared at the last common step, and the sentence mentions the step."""
    for step, gap in ((2, 0.25), (4, 0.5), (6, 4.0)):
        save_step(tmp_path, "plain", step, gap, sync_bn=False, max_steps=6)
    for step in (2, 4):
        save_step(tmp_path, "synced", step, 0.0, sync_bn=True, max_steps=4)
    (closure,) = syncheck.compare(tmp_path).closures
    assert (closure.plain.step, closure.plain.max_abs, closure.synced.step, closure.synced.max_abs) == (4, 0.5, 4, 0.0)
    assert closure.sentence == (
        "SyncBatchNorm closed the gap: the largest drift of any running statistic was 0.5 in plain (bn.running_mean) "
        "and is 0.0 in synced. Both were measured at step 4, the last common step; plain ends at step 6, synced at "
        "step 4."
    )


def test_runs_without_a_common_step_are_reported(tmp_path: Path) -> None:
    """Without a common step, the sentence explains why no gap is closed."""
    save_step(tmp_path, "plain", 6, 4.0, sync_bn=False, max_steps=6)
    save_step(tmp_path, "synced", 4, 0.0, sync_bn=True, max_steps=4)
    (closure,) = syncheck.compare(tmp_path).closures
    assert closure.sentence == (
        "plain ends at step 6, synced at step 4, without a common step: save both runs at the same step to see the "
        "effect of SyncBatchNorm."
    )


def test_runs_are_paired_by_config(tmp_path: Path) -> None:
    """For each seed, the runs with and without SyncBatchNorm are a pair; runs with different seeds are not paired."""
    for seed in (0, 1):
        for sync_bn in (False, True):
            gap = 0.0 if sync_bn else 1.0 + seed
            save_step(tmp_path, f"seed{seed}{'-sync' * sync_bn}", 3, gap, sync_bn=sync_bn, seed=seed)
    pairs = {(closure.plain.run, closure.synced.run) for closure in syncheck.compare(tmp_path).closures}
    assert pairs == {("seed0", "seed0-sync"), ("seed1", "seed1-sync")}


@pytest.mark.parametrize(
    ("epoch", "batches", "code"), [(3, None, "SYN214"), (3, 5, "SYN214"), (None, None, "SYN214"), (None, 5, "SYN106")]
)
def test_lagging_optimizer_counters(tmp_path: Path, epoch: int | None, batches: int | None, code: str) -> None:
    """A lagging optimizer counter is a skipped step, except if BatchNorm's counter lags too and there is no epoch."""
    for rank in range(2):
        counted = None if batches is None else batches + rank
        save(tmp_path, "ddp", rank, torch.zeros(2), epoch=epoch, step=5.0 + rank, batches=counted)
    (group,) = syncheck.compare(tmp_path).groups
    assert list_codes(group.findings) == [code]
