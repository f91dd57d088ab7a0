"""Expert parallelism: equal to one process, files compared across ranks, and the findings of its faults."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.listings import find_all, list_codes, list_failing, list_fields, list_names, list_starts
from support.scenarios import run, tensors, trained
from support.sequences import MOE, ROUNDING, difference_to_single

import syncheck
from train.errors import UserError
from train.methods import check_modifiers

if TYPE_CHECKING:
    from syncheck.testing import Rank
    from train.launch import RankContext

EP = replace(MOE, method="ep")


@pytest.mark.slow
@pytest.mark.syncheck(ranks=4)
@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": 3, "grad_clip": 0.5},
        pytest.param({"parallel_degree": 4}, marks=pytest.mark.slow),
        pytest.param({"grad_clip": 0.5, "batch_size": 11}, marks=pytest.mark.slow),
    ],
    ids=["accumulate and clip", "one expert per rank", "uneven shares"],
)
def test_trains_like_single(ctx: RankContext, changes: dict[str, Any]) -> None:
    """The losses of 20 steps equal those of one process within rounding; every step is clipped with --grad-clip."""
    assert difference_to_single(ctx, replace(EP, **changes)) < ROUNDING


@pytest.mark.slow
@pytest.mark.syncheck(ranks=4, timeout=60)
@pytest.mark.parametrize(
    ("fault", "part"),
    [(None, ""), ("expert-replicated-wrongly", ".moe.experts"), ("router-updated-locally", ".router")],
)
def test_findings(ctx: RankContext, syncheck_rank: Rank, fault: str | None, part: str) -> None:
    """Without a fault all tensors are compared and in sync. A fault is SYN212, in the parameters that it affects."""
    settings = replace(EP, max_steps=6, save_per_rank=True, fault=fault, out=syncheck_rank.shared)
    (group,) = syncheck.compare(*run(ctx, settings).saved).groups
    assert group.counts.not_compared == 0
    failing = list_failing(group)
    assert list_codes(failing) == ["SYN212"] * bool(fault)
    differing = set(list_names(find_all(group.tensors, out_of_sync=True)))
    assert bool(differing) == bool(fault)
    assert all(part in name for name in differing)


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
def test_all_tensors_except_experts_are_compared(ctx: RankContext, syncheck_rank: Rank) -> None:
    """On two ranks only experts have no replica: in files, in averages of --ema and in the checks of --monitor."""
    settings = replace(EP, max_steps=3, ema=0.9, monitor=1, on_desync="raise", out=syncheck_rank.shared)
    (group,) = syncheck.compare(*run(ctx, replace(settings, save_per_rank=True)).saved).groups
    names = set(list_names(group.tensors))
    assert set(list_starts(names, ".")) >= {"ema", "optimizer"}
    assert all(".moe.experts." in name for name in names)
    with pytest.raises(syncheck.OutOfSync) as caught:
        run(ctx, replace(settings, fault="router-updated-locally"))
    (group,) = caught.value.report.groups
    differing = find_all(group.tensors, out_of_sync=True)
    assert set(list_fields(differing, "kind")) == {"parameter", "optimizer", "ema"}
    assert all(".router" in diff.name for diff in differing)


@pytest.mark.syncheck(ranks=4, timeout=60)
@pytest.mark.slow
def test_resume_is_bitwise(ctx: RankContext, syncheck_rank: Rank) -> None:
    """A run resumed by the same ranks saves the same bytes as an uninterrupted run."""
    out = syncheck_rank.shared
    settings = replace(EP, save_per_rank=True, optimizer="adamw", max_steps=6, checkpoint_every=3, out=out)
    complete = tensors(run(ctx, settings).saved[ctx.rank])
    if ctx.is_main:
        for path in out.rglob("step_6/*"):
            path.unlink()
    ctx.gather(ctx.rank)
    resumed = tensors(run(ctx, replace(settings, resume=True)).saved[ctx.rank])
    assert list(resumed) == list(complete)
    assert all(torch.equal(local(resumed[name]), local(complete[name])) for name in complete)


def local(tensor: Any) -> torch.Tensor:
    """Return the values of a tensor or DTensor on this rank."""
    values: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return values


@pytest.mark.syncheck(ranks=2)
def test_refusals(ctx: RankContext) -> None:
    """A model without experts, and a degree that does not divide the experts or the ranks, are refused in one line."""
    for changes, message in (
        ({"model": "gpt-tiny"}, "^--model gpt-tiny: .* use gpt-tiny-moe$"),
        ({"parallel_degree": 4}, "^--method ep --parallel-degree 4: needs a multiple of 4 ranks, found 2$"),
        ({"fault": "expert-replicated-wrongly"}, "no replicas on 2 ranks; start 4$"),
        ({"amp": "fp16"}, "^--amp fp16: not with --method ep: "),
    ):
        settings = replace(EP, **changes)
        with pytest.raises(UserError, match=message):  # noqa: PT012 - either of them refuses
            check_modifiers(settings)
            trained(ctx, settings)
