"""Tensor parallelism trains the same model as one process, and syncheck compares its replicated tensors and copies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.listings import list_codes, list_failing
from support.resumed import assert_bitwise
from support.scenarios import NEEDS_FSDP, make_job, run, trained, whole_state
from support.states import clone_parameters

import syncheck
from train.errors import UserError
from train.launch import RankContext
from train.methods import METHODS, assign_mesh, check_modifiers
from train.methods.tensor_parallel_plan import check_length
from train.metrics import MetricSums
from train.settings import Settings
from train.trainer import Trainer

if TYPE_CHECKING:
    from torch import Tensor

    from syncheck.testing import Rank

GPT = Settings(
    method="tp",
    data="text",
    model="gpt-tiny",
    width=16,
    depth=1,
    limit_train=400,
    batch_size=16,
    max_steps=20,
    shuffle=False,
    grad_clip=0.3,
    accumulate=2,
)
# Relative difference of losses and gradient norms. Measured: 1e-7 to 3e-7. Losses are float32 sums over 1024 tokens.
ROUNDING = 1e-6
BOTH = {"sequence_parallel": True, "loss_parallel": True}


def measure_steps(ctx: RankContext, settings: Settings) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Train, and return loss and gradient norm of each step, and the whole model; a collective."""
    steps: list[tuple[float, float]] = []

    def run_step(self: Trainer, step: int, *arguments: Any) -> None:
        before = arguments[-1].totals.clone()
        RUN(self, step, *arguments)
        sums = ctx.sum_over_ranks((arguments[-1].totals - before) * self.ctx.mesh.counts)
        assert self.grad_norm is not None
        steps.append((float(sums[0] / sums[2]), float(self.grad_norm)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "run", run_step)
        job = trained(ctx, settings)
    assert len(steps) == settings.max_steps
    return steps, whole_state(job)


RUN = Trainer.run


def check_like_single(ctx: RankContext, settings: Settings) -> None:
    """Compare losses, gradient norms and the model with a run in one process."""
    steps, state = measure_steps(ctx, settings)
    own_values = {"sequence_parallel": False, "loss_parallel": False, "accumulate": 1}
    expected, reference = measure_steps(RankContext(), replace(settings, method="single", **own_values))
    coarse = 1e4 if settings.amp == "bf16" else 1.0  # bfloat16 rounds at 4e-3
    torch.testing.assert_close(torch.tensor(steps), torch.tensor(expected), rtol=ROUNDING * coarse, atol=0)
    torch.testing.assert_close(state, reference, rtol=0, atol=ROUNDING * coarse)


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2, timeout=120)
@pytest.mark.parametrize(
    "variants",
    [
        [{**BOTH, "model": "gpt-tiny-moe"}],
        pytest.param([{}, {"sequence_parallel": True}, {**BOTH, "amp": "bf16"}], marks=pytest.mark.slow),
    ],
)
def test_shards_train_like_single(ctx: RankContext, variants: list[dict[str, Any]]) -> None:
    """Two shards have the losses, gradient norms and weights of one process, except for rounding."""
    for changes in variants:
        check_like_single(ctx, replace(GPT, **changes))


@pytest.mark.slow
@NEEDS_FSDP
@pytest.mark.syncheck(ranks=4, timeout=240)
@pytest.mark.parametrize("method", ["ddp_tp", pytest.param("fsdp_tp", marks=pytest.mark.slow)])
def test_copies_of_shards_train_like_single(ctx: RankContext, method: str) -> None:
    """The combinations with data parallelism do, too."""
    check_like_single(ctx, replace(GPT, method=method, **BOTH))


@NEEDS_FSDP
@pytest.mark.slow
@pytest.mark.syncheck(ranks=8, timeout=300)
def test_a_mesh_of_three_dimensions_trains_like_single(ctx: RankContext) -> None:
    """Eight ranks: copies of FSDP shards of tensor-parallel shards."""
    check_like_single(ctx, replace(GPT, method="hsdp_tp", max_steps=5, sequence_parallel=True))


def count_compared(ctx: RankContext, settings: Settings) -> tuple[list[str], int, int]:
    """Train, and return the codes of failures, and the numbers of compared and of all tensors."""
    run(ctx, settings)
    (group,) = syncheck.compare(settings.out).groups
    codes = list_codes(list_failing(group))
    ctx.gather(None)  # other ranks read the files, too
    return codes, group.counts.compared, group.counts.tensors


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2, timeout=120)
def test_two_ranks_compare_replicated_tensors(ctx: RankContext, syncheck_rank: Rank) -> None:
    """3 norms and their momentum are compared; gradients that are not reduced are reported as SYN231."""
    settings = replace(GPT, max_steps=4, save_per_rank=True, sequence_parallel=True, grad_clip=None)
    out = syncheck_rank.shared
    assert count_compared(ctx, replace(settings, out=out / "clean")) == ([], 6, 23)
    for fault in ("norm-not-reduced", "clip-by-local-norm"):
        assert count_compared(ctx, replace(settings, out=out / fault, fault=fault)) == (["SYN231"], 6, 23)


@pytest.mark.syncheck(ranks=4, timeout=240)
@pytest.mark.slow
def test_copies_of_shards_are_compared(ctx: RankContext, syncheck_rank: Rank) -> None:
    """With two copies all tensors are compared, also after a resume; a clip by the local norm is SYN231."""
    settings = replace(GPT, method="ddp_tp", max_steps=4, save_per_rank=True, sequence_parallel=True)
    out = syncheck_rank.shared
    assert count_compared(ctx, replace(settings, out=out / "clean")) == ([], 23, 23)
    fault = replace(settings, out=out / "fault", fault="clip-by-local-norm")
    assert count_compared(ctx, fault) == (["SYN231"], 23, 23)
    assert_bitwise(ctx, out, replace(settings, checkpoint_every=2), [2])


@pytest.mark.syncheck(ranks=2, timeout=120)
def test_an_overflow_in_one_shard_skips_the_step_on_all_ranks(ctx: RankContext) -> None:
    """With fp16, an infinite gradient of one rank's shard leaves all weights unchanged and halves all scales."""
    job = make_job(ctx, replace(GPT, amp="fp16", max_steps=1, grad_clip=None, accumulate=1))
    trainer, method = job.trainer, job.trainer.method
    before, backward = clone_parameters(method.module), method.backward

    def overflow(loss: Tensor) -> None:
        backward(loss)
        if ctx.rank == 1:
            method.module.get_parameter("layers.0.attention.q.weight").grad.to_local()[0, 0] = torch.inf  # type: ignore[union-attr, operator]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(method, "backward", overflow)
        x = torch.zeros(16, 8, dtype=torch.int64)
        trainer.run(1, x, x, 16, MetricSums(ctx.device))
    assert trainer.scaler.get_scale() == 2**15
    assert all(torch.equal(a.to_local(), p.to_local()) for a, p in zip(before, method.module.parameters(), strict=True))  # type: ignore[attr-defined, operator]


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        ({}, 1, "needs at least 2 ranks, found 1"),
        ({"parallel_degree": -2}, 2, "^--parallel-degree -2: must be at least 2"),
        ({"parallel_degree": 0}, 2, "^--parallel-degree 0: must be at least 2"),
        ({"parallel_degree": 2}, 4, "use fsdp_tp or ddp_tp"),
        ({"method": "ddp_tp"}, 3, "needs a multiple of 2 ranks, found 3"),
        ({"method": "hsdp_tp"}, 4, "needs a multiple of 8 ranks, found 4"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(changes: dict[str, Any], world_size: int, message: str) -> None:
    """The message has the number of ranks."""
    settings = replace(GPT, **changes)
    with pytest.raises(UserError, match=message):
        METHODS[settings.method].mesh_shape(settings, world_size)


@pytest.mark.syncheck(ranks=4)
@pytest.mark.slow
def test_models_that_cannot_be_sharded_are_refused(ctx: RankContext) -> None:
    """A model without a plan, more ranks than heads, and tokens that ranks cannot share."""
    with pytest.raises(UserError, match=r"^--model resnet8: --method tp needs a model with a tp_plan; use gpt"):
        make_job(ctx, replace(GPT, model="resnet8", data="digits", width=None, depth=None))
    with pytest.raises(UserError, match=r"^--method tp --parallel-degree 4: must divide the 2 heads of .*attention\.k"):
        make_job(ctx, GPT)


@pytest.mark.parametrize("method", ["tp", "cp", "pp"])
@pytest.mark.syncheck(ranks=2)
def test_the_refused_model_of_a_task(ctx: RankContext, method: str) -> None:
    """The model of a task is refused by the name of the task."""
    settings = replace(GPT, method=method, task="tasks:Images", parallel_degree=None)
    network = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match=rf"^--task tasks:Images: --method {method} .*; use another --method$"):
        METHODS[method](settings, assign_mesh(settings, ctx)).wrap(network)


def test_options_that_need_tensor_parallelism_are_refused() -> None:
    """Sequence and loss parallelism are options of the tensor-parallel methods."""
    with pytest.raises(UserError, match=r"^--sequence-parallel: only for --method tp or fsdp_tp or"):
        check_modifiers(replace(GPT, method="ddp", sequence_parallel=True))
    with pytest.raises(UserError, match=r"^--sequence-parallel: 2 ranks cannot share 7 tokens equally"):
        check_length(torch.zeros(1, 7), 2)
