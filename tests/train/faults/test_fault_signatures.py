"""The tensors, ranks and elements that each fault changes."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from planted import Pair, differing_elements, flipped_bits, optimizer_names, parameters, statistics, train_with_fault
from support.marks import slow
from support.scenarios import differing, load, tensors

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from syncheck.testing import Rank
    from train.launch import RankContext

pytestmark = pytest.mark.syncheck(ranks=2, timeout=60)


def differences(a: Path, b: Path, names: set[str]) -> Tensor:
    """Return the differences of the named tensors between two checkpoints as one vector."""
    remaining, right = tensors(a), tensors(b)
    return torch.cat([(remaining[name].double() - right[name].double()).flatten() for name in sorted(names)])


def step_counts(path: Path) -> set[float]:
    """Return the values of the optimizer's step counters."""
    return {tensors(path)[name].item() for name in optimizer_names(path, "step")}


def test_buffers_never_synced(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Only running statistics differ, in a stable direction, although the metadata claims synchronized buffers."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "buffers-never-synced", max_steps=20, save_every=19)
    names = statistics(pair.good, "running_mean")
    assert pair.differing == pair.clean_differences == names | statistics(pair.good, "running_var")
    before, after = differences(*pair.at(19), names), differences(pair.good, pair.bad, names)
    # Each step keeps nine tenths of the difference.
    assert torch.cosine_similarity(before, after, dim=0) > 0.7
    assert load(pair.bad)["syncheck"]["buffers_synced"] is True


def count_batches(pair: Pair, names: set[str]) -> set[tuple[int, ...]]:
    """Return the different counts of batches, as a tuple of the ranks' counts."""
    return {tuple(torch.stack([*pair.values(name)]).tolist()) for name in names}


@pytest.mark.slow
def test_extra_forward(ctx: RankContext, syncheck_rank: Rank) -> None:
    """The last rank counts one more batch in each BatchNorm layer; otherwise only running statistics differ."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "extra-forward")
    counts = statistics(pair.good, "num_batches_tracked")
    assert pair.clean_differences == statistics(pair.good, "running_mean", "running_var")
    assert pair.differing == pair.clean_differences | counts
    # One batch, not one per step, because the broadcast of the next step repairs the count.
    assert count_batches(pair, counts) == {(6, 7)}


@pytest.mark.slow
def test_extra_forward_adds_up_without_broadcast(ctx: RankContext, syncheck_rank: Rank) -> None:
    """With --no-buffer-sync no broadcast repairs the counts, so six steps count six more batches."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "extra-forward", buffer_sync=False)
    counts = statistics(pair.good, "num_batches_tracked")
    assert count_batches(pair, counts) == {(6, 12)}


@pytest.mark.slow
def test_variance_only_bn(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Only running variances differ, by the ratio of the corrections for the local and global sample counts."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "variance-only-bn", max_steps=1)
    assert pair.clean_differences == set()
    assert pair.differing == statistics(pair.good, "running_var")
    # The first layer processes 32 images of 8 x 8 pixels, 16 on each rank.
    right, wrong = (value - 0.9 for value in pair.values("bn1.running_var"))
    local, total = 16 * 64, 32 * 64
    expected = local / (local - 1) / (total / (total - 1))  # 1.00049
    assert (wrong / right).tolist() == pytest.approx(
        [expected] * 4, abs=2e-5
    )  # float32 rounding near 1, after subtracting 0.9


@pytest.mark.slow
def test_local_normalizer(ctx: RankContext, syncheck_rank: Rank) -> None:
    """The normalizer's mean and variance differ; its count and all trained tensors are equal."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "local-normalizer")
    assert pair.clean_differences == set()
    assert pair.differing == {"normalizer.mean", "normalizer.var"}


def test_init_not_broadcast(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Randomly initialized tensors differ by a constant; BatchNorm and optimizer state are equal."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "init-not-broadcast", save_every=1)
    assert pair.clean_differences == set()
    random = {name for name in parameters(pair.good) if "bn" not in name}
    assert pair.differing == random
    first, last = differences(*pair.at(1), random), differences(pair.good, pair.bad, random)
    assert (first != 0).double().mean() > 0.99
    # AdamW's weight decay reduces the difference by 0.005 x 5e-4 per step.
    assert (last - first).abs().max() < 2e-5 * first.abs().max()


def test_forward_through_module(ctx: RankContext, syncheck_rank: Rank) -> None:
    """All parameters and moments differ, the parameters by a growing amount; step counters are equal."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "forward-through-module", save_every=1)
    assert pair.clean_differences == set()
    names = parameters(pair.good)
    assert pair.differing == names | optimizer_names(pair.good, "exp_avg", "exp_avg_sq")
    assert differences(pair.good, pair.bad, names).norm() > 1.5 * differences(*pair.at(1), names).norm()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet8", "convnet"])
def test_late_head(ctx: RankContext, syncheck_rank: Rank, model: str) -> None:
    """Only the added layer and its optimizer moments differ."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "late-head", model=model)
    assert pair.clean_differences == set()
    block = load(pair.good)["syncheck"]
    ids = [block["optimizer_parameters"].index(name) for name in ("fc.1.weight", "fc.1.bias")]
    moments = {f"optimizer.{i}.{state}" for i, state in product(ids, ("exp_avg", "exp_avg_sq"))}
    assert pair.differing == {"fc.1.weight", "fc.1.bias"} | moments
    assert "fc.0.weight" in tensors(pair.good)


@pytest.mark.slow
@pytest.mark.parametrize("grad_clip", [pytest.param(None, marks=pytest.mark.slow), 0.5])
def test_clip_on_one_rank(ctx: RankContext, syncheck_rank: Rank, grad_clip: float | None) -> None:
    """All trained tensors differ; the last rank's first moments are shorter, with the same direction."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "clip-on-one-rank", grad_clip=grad_clip)
    assert pair.clean_differences == set()
    assert pair.differing == parameters(pair.good) | optimizer_names(pair.good, "exp_avg", "exp_avg_sq")
    ratios = []
    for name in optimizer_names(pair.good, "exp_avg"):
        right, wrong = (value.double().flatten() for value in pair.values(name))
        assert torch.cosine_similarity(right, wrong, dim=0) > 0.9
        ratios.append((wrong.norm() / right.norm()).item())
    assert max(ratios) < 0.1
    assert max(ratios) < 1.2 * min(ratios)


@pytest.mark.slow
def test_skipped_step(ctx: RankContext, syncheck_rank: Rank) -> None:
    """All tensors are equal before the skipped step; then all tensors except the buffers differ."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "skipped-step", save_every=1)
    assert pair.clean_differences == differing(*pair.at(2)) == set()
    assert pair.differing == parameters(pair.good) | optimizer_names(pair.good)
    assert (step_counts(pair.good), step_counts(pair.bad)) == ({6}, {5})
    # In the skipped step only the buffers change.
    before, after = pair.at(2)[1], pair.at(3)[1]
    assert differing(before, after) == statistics(before, "running_mean", "running_var", "num_batches_tracked")


@pytest.mark.slow
def test_optimizer_on_one_rank(ctx: RankContext, syncheck_rank: Rank) -> None:
    """After the resume, parameters and optimizer state differ, and only rank 0 has counted all steps."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "optimizer-on-one-rank", save_every=1, fault_step=5)
    assert pair.clean_differences == differing(*pair.at(4)) == set()
    assert pair.differing == parameters(pair.good) | optimizer_names(pair.good)
    assert (step_counts(pair.good), step_counts(pair.bad)) == ({6}, {2})


@pytest.mark.slow
def test_scaler_diverged(ctx: RankContext, syncheck_rank: Rank) -> None:
    """The last rank halves its loss scale, resets its growth count and skips a step; all trained tensors differ."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "scaler-diverged", save_every=1)
    assert pair.clean_differences == differing(*pair.at(2)) == set()
    assert pair.differing == parameters(pair.good) | optimizer_names(pair.good)
    right, wrong = (load(path)["scaler"] for path in pair.at(3))
    assert right["scale"] == 2 * wrong["scale"] > 0
    assert (right["_growth_tracker"], wrong["_growth_tracker"]) == (3, 0)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"sync_bn": False, "optimizer": "sgd"}], ids=["syncbn", "own statistics"])
def test_stale_rank(ctx: RankContext, syncheck_rank: Rank, changes: dict[str, Any]) -> None:
    """The last rank's final file has the tensors of the previous step."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "stale-rank", save_every=1, **changes)
    assert differing(pair.at(5)[1], pair.bad) == set()
    assert differing(pair.at(5)[0], pair.good) == set(tensors(pair.good)) == pair.differing
    assert differing(*pair.at(5)) == pair.clean_differences
    assert load(pair.bad)["syncheck"]["step"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet8", "convnet"])
def test_frozen_not_broadcast(ctx: RankContext, syncheck_rank: Rank, model: str) -> None:
    """Only the frozen first convolution differs, by a constant, and this layer has no optimizer state."""
    names = {"conv1.weight"} if model == "resnet8" else {"conv1.weight", "conv1.bias"}
    pair = train_with_fault(ctx, syncheck_rank.shared, "frozen-not-broadcast", model=model, save_every=1)
    assert pair.clean_differences == set()
    assert pair.differing == names
    assert torch.equal(differences(*pair.at(1), names), differences(pair.good, pair.bad, names))
    content = load(pair.bad)
    assert set(content["syncheck"]["frozen"]) == names
    assert not names & set(content["syncheck"]["optimizer_parameters"])
    assert len(content["optimizer"]["state"]) == len(content["optimizer"]["param_groups"][0]["params"])


def get_only_difference(pair: Pair, name: str) -> tuple[Tensor, Tensor, list[int]]:
    """Return the values and the differing elements of the only differing tensor; check that rank 0 has no fault."""
    assert pair.clean_differences == set()
    assert pair.differing == {name}
    assert differing(pair.clean_file, pair.good) == set()
    right, wrong = pair.values(name)
    return right, wrong, differing_elements(right, wrong)


def get_changed_parameter(pair: Pair) -> str:
    """Return the name of the only differing parameter."""
    (name,) = pair.differing & parameters(pair.good)
    return name


@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_bit_flip_weight(ctx: RankContext, syncheck_rank: Rank, seed: int) -> None:
    """One bit of one weight element differs after the last step, and the weight's maximum does not grow."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "bit-flip-weight", fault_step=6, seed=seed)
    right, wrong, indices = get_only_difference(pair, get_changed_parameter(pair))
    assert len(indices) == flipped_bits(right, wrong) == 1
    assert wrong.abs().max() <= right.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_bit_flip_stays_in_its_element(ctx: RankContext, syncheck_rank: Rank, optimizer: str) -> None:
    """Half a run later only the same element differs; with SGD, weight decay copies the difference to the momentum."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "bit-flip-weight", save_every=1, optimizer=optimizer)
    assert pair.clean_differences == differing(*pair.at(2)) == set()
    name = get_changed_parameter(pair)
    moment = f"optimizer.{load(pair.bad)['syncheck']['optimizer_parameters'].index(name)}.momentum_buffer"
    assert differing(*pair.at(3)) == {name}
    assert pair.differing == ({name} if optimizer == "adamw" else {name, moment})
    (index,) = differing_elements(*(tensors(path)[name] for path in pair.at(3)))
    assert all(differing_elements(*pair.values(changed)) == [index] for changed in pair.differing)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "moment"), [("adamw", "exp_avg"), ("sgd", "momentum_buffer")])
def test_bit_flip_exp_avg(ctx: RankContext, syncheck_rank: Rank, optimizer: str, moment: str) -> None:
    """One bit of one element of one first moment differs, and all parameters are equal."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "bit-flip-exp-avg", optimizer=optimizer)
    (name,) = pair.differing
    assert name.endswith(f".{moment}")
    right, wrong, indices = get_only_difference(pair, name)
    assert len(indices) == flipped_bits(right, wrong) == 1
    assert wrong.isfinite().all()


def test_nan_on_one_rank(ctx: RankContext, syncheck_rank: Rank) -> None:
    """One element of one weight is NaN on the last rank."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "nan-on-one-rank")
    right, wrong, indices = get_only_difference(pair, get_changed_parameter(pair))
    assert right.isfinite().all()
    assert wrong.isnan().flatten().nonzero().flatten().tolist() == indices
    assert len(indices) == 1


def test_nan_spreads_from_an_earlier_step(ctx: RankContext, syncheck_rank: Rank) -> None:
    """One step later, averaged gradients have spread the NaN to all weights of all ranks."""
    pair = train_with_fault(
        ctx, syncheck_rank.shared, "nan-on-one-rank", fault_step=5, model="convnet", explained=False
    )
    for path in (pair.good, pair.bad):
        assert all(tensors(path)[name].isnan().all() for name in ("conv1.weight", "fc.bias"))


@pytest.mark.parametrize(("width", "length"), [(4, 64), (1, 36)])
def test_contiguous_corruption(ctx: RankContext, syncheck_rank: Rank, width: int, length: int) -> None:
    """64 adjacent elements of one weight differ, or half of a smaller tensor, and all values are finite."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "contiguous-corruption", model="convnet", width=width)
    right, wrong, indices = get_only_difference(pair, get_changed_parameter(pair))
    assert indices == list(range(indices[0], indices[0] + length))
    assert wrong.isfinite().all()
    assert right.numel() > length


@pytest.mark.slow
def test_rounding_only(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Every element of every parameter differs by one unit in the last place, and no other tensor differs."""
    pair = train_with_fault(ctx, syncheck_rank.shared, "rounding-only")
    assert pair.clean_differences == set()
    assert pair.differing == parameters(pair.good)
    for name in pair.differing:
        right, wrong = pair.values(name)
        assert torch.equal(wrong, torch.nextafter(right, torch.full_like(right, torch.inf)))
