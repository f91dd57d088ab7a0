"""Faults of files, and of one rank's layer, average or learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from planted import all_tensors, check_report, differing_tensors, optimizer_names, parameters, train_with_fault
from support.listings import list_fields
from support.scenarios import load, tensors

import syncheck

if TYPE_CHECKING:
    from syncheck.testing import Rank
    from train.launch import RankContext

pytestmark = pytest.mark.syncheck(ranks=2, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet8", "convnet"])
def test_adapter_on_one_rank(ctx: RankContext, syncheck_rank: Rank, model: str) -> None:
    """Only the last rank has a trained adapter with optimizer state; all other tensors are equal."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "adapter-on-one-rank", model=model)
    assert pair.clean_differences == set()
    adapter = load(pair.bad)["syncheck"]["optimizer_parameters"].index("fc.adapter.weight")
    states = {f"optimizer.{adapter}.{state}" for state in ("exp_avg", "exp_avg_sq", "step")}
    assert pair.differing == {"fc.adapter.weight"} | states
    assert tensors(pair.bad)["fc.adapter.weight"].abs().max() > 0


@pytest.mark.slow
def test_other_dtype_on_one_rank(ctx: RankContext, syncheck_rank: Rank) -> None:
    """The last rank's model is rank 0's model rounded to bfloat16; batch counts and optimizer state are equal."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "other-dtype-on-one-rank")
    assert pair.clean_differences == set()
    assert pair.differing == {name for name in load(pair.good)["model"] if not name.endswith("num_batches_tracked")}
    for name in pair.differing:
        right, wrong = pair.values(name)
        assert torch.equal(right.bfloat16(), wrong)


@pytest.mark.slow
def test_last_save_failed(ctx: RankContext, syncheck_rank: Rank) -> None:
    """The last rank's final file has the tensors and the step from the middle of the run; its history is complete."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "last-save-failed", save_every=1, explained=False)
    assert pair.clean_differences == differing_tensors(*pair.at(6)) == set()
    assert differing_tensors(pair.at(3)[1], pair.bad) == set()
    assert [load(path)["step"] for path in (pair.good, pair.bad)] == [6, 3]
    assert differing_tensors(pair.clean_file, pair.good) == set()
    # Compare without the history, because rank 0's earlier file there equals the last rank's final file.
    check_report(syncheck.compare(pair.good, pair.bad), "SYN106")


def test_damaged_on_disk(ctx: RankContext, syncheck_rank: Rank) -> None:
    """One weight element in the last rank's file differs and fails its checksum; the value in memory was correct."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "damaged-on-disk", save_every=6)
    assert pair.clean_differences == differing_tensors(*pair.at(6)) == set()
    (name,) = pair.differing
    right, wrong = pair.values(name)
    assert (right != wrong).sum() == 1
    assert wrong.isfinite().all()
    (group,) = syncheck.compare(pair.good, pair.bad).groups
    evidence = dict(list_fields(group.tensors, "name", "evidence"))[name]
    assert evidence is not None
    assert evidence.damaged == (1,)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "share"), [("other-learning-rate", 0.5), ("smaller-steps", 1.0)])
def test_other_learning_rate(ctx: RankContext, syncheck_rank: Rank, fault: str, share: float) -> None:
    """Every parameter differs, AdamW's moments are equal, and the file records the rank's rate or the common rate."""
    pair = train_with_fault(ctx, syncheck_rank.shared, fault)
    assert pair.clean_differences == set()
    # Averaged gradients are equal, although the models differ.
    assert pair.differing == parameters(pair.good)
    assert optimizer_names(pair.good, "exp_avg")
    rates = [load(path)["optimizer"]["param_groups"][0]["lr"] for path in (pair.good, pair.bad)]
    assert rates[1] == share * rates[0] > 0


@pytest.mark.slow
def test_average_not_updated(ctx: RankContext, syncheck_rank: Rank) -> None:
    """The last rank's averages stay at the step before the fault; trained tensors are equal."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "average-not-updated", save_every=1)
    assert pair.clean_differences == differing_tensors(*pair.at(2)) == set()
    averages = {f"ema.{name}" for name in parameters(pair.good)}
    assert pair.differing == averages
    before, after = all_tensors(pair.at(2)[1]), all_tensors(pair.bad)
    assert all(torch.equal(before[name], after[name]) for name in averages)
    # Rank 0's new average: 0.9 of the previous average plus 0.1 of the parameters.
    first = all_tensors(pair.at(1)[0])["ema.fc.weight"]
    second = all_tensors(pair.at(2)[0])["ema.fc.weight"]
    now = all_tensors(pair.at(3)[0])["ema.fc.weight"]
    weight = all_tensors(pair.at(3)[0])["fc.weight"]
    assert torch.equal(first, all_tensors(pair.at(1)[0])["fc.weight"])
    assert torch.allclose(now, 0.9 * second + 0.1 * weight, atol=1e-6)
