"""On the same global batches, every method trains the same model within rounding; HSDP replicas are bitwise equal."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.marks import slow
from support.scenarios import NEEDS_FSDP, SMALL, fsdp, run, slow_fsdp, trained, whole_state
from support.states import find_largest_difference
from torch.nn.utils import clip_grad_norm_

from train.launch import RankContext
from train.settings import DEFAULT
from train.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from syncheck.testing import Rank
    from train.settings import Settings

# Without BatchNorm, because each rank would normalize with its own samples, but `single` with all samples.
NO_BN = replace(SMALL, model="convnet", width=None, shuffle=False, max_steps=20, save_per_rank=False)
# Two ranks sum a gradient in two parts, which rounds differently: 6e-8 relative per sum, on weights below 1, over 20
# steps of momentum at a learning rate of up to 0.1. Measured: 3e-8 to 4e-7, and 2e-6 on four ranks. The injected faults
# below and in test_methods.py cause differences of at least 1e-3.
ROUNDING = 1e-5
CLIP = 0.1  # the gradient norm is 0.16 to 0.39, so every step is clipped
GPT = {"data": "text", "model": "gpt-tiny", "width": 16, "depth": 2, "max_steps": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp --accumulate": {"accumulate": 3},
    "ddp --grad-clip": {"grad_clip": CLIP},
    "ddp --accumulate --grad-clip": {"accumulate": 3, "grad_clip": CLIP},
    "ddp --find-unused": {"find_unused": True},
    "ddp --augment strong --mixup": {"augment": "strong", "mixup": 0.2, "label_smoothing": 0.1},
    "zero": {"method": "zero"},
    "zero --accumulate --grad-clip": {"method": "zero", "accumulate": 3, "grad_clip": CLIP},
    # Averaging models with equal starts after every step is averaging gradients, because SGD is linear in the gradient.
    "diloco --average-every 1": {"method": "diloco", "average_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0},
    "ddp --static-graph": {"static_graph": True},
    "ddp --bucket-view": {"bucket_view": True, "accumulate": 3},
    "replicate": {"method": "replicate", "accumulate": 3, "grad_clip": CLIP},
    "replicate --cpu-offload": {"method": "replicate", "cpu_offload": True},
    "fsdp --reshard-after-forward": {"method": "fsdp", "reshard_after_forward": "false"},
    "fsdp --cpu-offload": {"method": "fsdp", "cpu_offload": True, "accumulate": 3, "grad_clip": CLIP},
    "fsdp": {"method": "fsdp"},
    "fsdp --accumulate": {"method": "fsdp", "accumulate": 3},
    "fsdp --accumulate --grad-clip": {"method": "fsdp", "accumulate": 3, "grad_clip": CLIP},
    "ddp --model gpt-tiny-moe": GPT | {"model": "gpt-tiny-moe"},
    "fsdp --model gpt-tiny": GPT | {"method": "fsdp", "accumulate": 3},
}


@cache
def train_alone(settings: Settings) -> dict[str, Tensor]:
    """Train in this process alone. Cached, because many variants have the same reference."""
    return whole_state(trained(RankContext(), settings))


def difference_to_single(ctx: RankContext, settings: Settings) -> float:
    """Train on all ranks, then in each process alone on whole batches; return the maximum difference of the models."""
    together = whole_state(trained(ctx, settings))
    alone = replace(settings, method="single", accumulate=1, find_unused=False, sync_bn=False)
    options = ("average_every", "outer_lr", "outer_momentum", "static_graph", "bucket_view")
    options += ("reshard_after_forward", "cpu_offload")
    alone = replace(alone, **{name: getattr(DEFAULT, name) for name in options})
    reference = train_alone(alone)
    assert list(together) == list(reference)
    return max((together[name].double() - reference[name].double()).abs().max().item() for name in reference)


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("batch_size", [32, 35], ids=["even", "uneven"])
@pytest.mark.parametrize("variant", [fsdp(name) if name[0] in "fr" else name for name in VARIANTS])
def test_trains_like_single(ctx: RankContext, variant: str, batch_size: int) -> None:
    """Without BatchNorm, every variant ends within rounding of one process, with even and uneven shares."""
    assert difference_to_single(ctx, replace(NO_BN, batch_size=batch_size, **VARIANTS[variant])) < ROUNDING


@pytest.mark.slow
@NEEDS_FSDP
@pytest.mark.syncheck(ranks=4)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"reshard_after_forward": "1"}, marks=pytest.mark.slow),
        {"accumulate": 3, "grad_clip": CLIP},
    ],
    ids=["reshard after forward", "accumulate and clip"],
)
def test_hsdp_trains_like_single(ctx: RankContext, changes: dict[str, Any]) -> None:
    """Two sharded replicas on four ranks end within rounding of one process."""
    assert difference_to_single(ctx, replace(NO_BN, method="hsdp", **changes)) < ROUNDING


@NEEDS_FSDP
@pytest.mark.syncheck(ranks=4)
@pytest.mark.slow
def test_hsdp_with_sync_bn_trains_like_single(ctx: RankContext) -> None:
    """With SyncBatchNorm over all four ranks, HSDP ends within rounding of one process, running statistics included."""
    settings = replace(SMALL, method="hsdp", sync_bn=True, shuffle=False, max_steps=5, save_per_rank=False)
    assert difference_to_single(ctx, settings) < ROUNDING


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["ddp", slow_fsdp("fsdp"), *slow("zero")])
def test_gradients_are_unscaled_before_clipping(ctx: RankContext, method: str) -> None:
    """With fp16, clipping applies to the unscaled gradient; clipping the scaled gradient would train another model."""
    settings = replace(NO_BN, method=method, amp="fp16", grad_clip=CLIP, max_steps=6)  # CPUs are slow at float16
    assert difference_to_single(ctx, settings) < 1e-3  # float16 rounds at 1e-3; measured: 2e-5
    # Clipping the scaled gradient to a norm equals clipping the gradient to norm / 65536, the initial scale.
    right = whole_state(trained(ctx, settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.methods.single.clip_grad_norm_", lambda p, norm: clip_grad_norm_(p, norm / 65536))
        wrong = whole_state(trained(ctx, settings))
    assert find_largest_difference(right, wrong) > 1e-3


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["ddp", slow_fsdp("fsdp"), *slow("zero")])
def test_adamw_trains_like_single(ctx: RankContext, method: str) -> None:
    """AdamW ends near one process too; its rounding is coarser, because Adam divides by small numbers at first."""
    assert difference_to_single(ctx, replace(NO_BN, method=method, optimizer="adamw", lr=0.005)) < 1e-4


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["ddp", slow_fsdp("fsdp"), *slow("zero")])
def test_sync_bn_equals_batchnorm_on_the_whole_batch(ctx: RankContext, method: str) -> None:
    """Only with --sync-bn does a network with BatchNorm end within rounding of one process with plain BatchNorm.

    The comparison includes running statistics. The run is short, because rounding in the statistics feeds back.
    """
    with_bn = replace(SMALL, method=method, shuffle=False, max_steps=5, save_per_rank=False)
    assert difference_to_single(ctx, replace(with_bn, sync_bn=True)) < ROUNDING
    assert difference_to_single(ctx, replace(with_bn, sync_bn=True, batch_size=35, accumulate=1)) < ROUNDING
    assert difference_to_single(ctx, with_bn) > 1e-3


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("method", ["ddp", slow_fsdp("fsdp"), *slow("zero")])
def test_the_last_smaller_batch_has_its_own_mean(ctx: RankContext, method: str) -> None:
    """With --keep-last, 70 samples make batches of 32, 32 and 6, and each loss is the mean over its own batch."""
    settings = replace(NO_BN, method=method, keep_last=True, limit_train=70, accumulate=1, max_steps=None, epochs=3)
    assert difference_to_single(ctx, settings) < ROUNDING
    assert difference_to_single(ctx, replace(settings, keep_last=False)) < ROUNDING
    result = run(ctx, settings)
    assert (result.steps, result.trained.samples) == (9, 70)
    assert run(ctx, replace(settings, accumulate=2)).steps == 6  # 6 samples are too few for 4 micro-batches of 2


def average_each_part(self: Trainer, x: Tensor, y: Tensor, samples: int, metric_sums: Any) -> None:
    """Average each micro-batch on its own, as if all micro-batches were equally large."""
    ACCUMULATE(self, x, y, len(y) * self.ctx.world_size * self.settings.accumulate, metric_sums)


def clip_each_part(self: Trainer, x: Tensor, y: Tensor, samples: int, metric_sums: Any) -> None:
    """Clip the partial sum after each micro-batch, before the gradient is complete."""
    ACCUMULATE(self, x, y, samples, metric_sums)
    torch.nn.utils.clip_grad_norm_(self.method.module.parameters(), CLIP)


ACCUMULATE = Trainer.accumulate


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("fault", [average_each_part, clip_each_part])
def test_wrong_accumulation_exceeds_the_tolerance(
    ctx: RankContext, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    """Averaging or clipping each micro-batch on its own far exceeds the tolerance of the tests above."""
    settings = replace(NO_BN, accumulate=3, batch_size=35, grad_clip=CLIP)
    right = whole_state(trained(ctx, settings))
    monkeypatch.setattr(Trainer, "accumulate", fault)
    wrong = whole_state(trained(ctx, settings))
    assert find_largest_difference(right, wrong) > 1e-3


@NEEDS_FSDP
@pytest.mark.slow
@pytest.mark.syncheck(ranks=6)
def test_hsdp_arranges_ranks_in_rows(ctx: RankContext) -> None:
    """With three replicas on six ranks, ranks 0, 2 and 4 hold one shard, and ranks 1, 3 and 5 the other."""
    job = trained(ctx, replace(NO_BN, method="hsdp", replicas=3, max_steps=2))
    parts = ctx.gather([p.to_local().detach().numpy().tobytes() for p in job.method.module.parameters()])  # type: ignore[operator]
    assert parts[0] == parts[2] == parts[4] != parts[1] == parts[3] == parts[5]
    assert ctx.gather(job.method.metadata_fields["mesh"])[3] == {"replicate": 1, "shard": 1}


@pytest.mark.slow
@NEEDS_FSDP
@pytest.mark.syncheck(ranks=4)
@pytest.mark.parametrize("fault", [False, True], ids=["healthy", "planted"])
def test_hsdp_replicas_are_bitwise_equal(ctx: RankContext, syncheck_rank: Rank, *, fault: bool) -> None:
    """Ranks 0 and 2 hold equal bytes, as do ranks 1 and 3, while ranks 0 and 1 hold different shards.

    A weight changed on rank 2 is the only difference.
    """
    job = trained(ctx, replace(SMALL, method="hsdp", optimizer="adamw", lr=0.005, save_per_rank=False))
    parameters = dict(job.method.module.named_parameters())
    if fault and ctx.rank == 2:
        parameters["layer2.0.conv1.weight"].to_local().data[0, 0, 0, 0] += 1e-6  # type: ignore[operator]
    mine = {name: p.to_local().detach().numpy().tobytes() for name, p in parameters.items()}  # type: ignore[operator]
    for index, states in job.trainer.optimizer.state_dict()["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            mine[f"{index}.{key}"] = states[key].to_local().numpy().tobytes()
    every = ctx.gather(mine)
    unequal = {name for a, b in ((0, 2), (1, 3)) for name in mine if every[a][name] != every[b][name]}
    assert unequal == ({"layer2.0.conv1.weight"} if fault else set())
    assert all(every[0][name] != every[1][name] for name in mine if name.endswith("weight"))
