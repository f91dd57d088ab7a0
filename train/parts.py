"""Build and check the parts of a run before the first step: data, model, sampler, plan and optimizer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from train.data import DistributedBatchSampler, OwnSharesSampler, download, smallest_share
from train.errors import UserError, refuse
from train.methods import METHODS
from train.methods.sync_batchnorm import SyncBatchNorm
from train.schedule import Plan
from train.task import load_task_data, make_task

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from train.data import Data
    from train.launch import RankContext
    from train.methods.single import Method
    from train.settings import Settings


def load(settings: Settings, ctx: RankContext) -> Data:
    """Load the data, after one rank of each machine has downloaded it with --download; a collective.

    Raises UserError on all ranks.
    """
    with ctx.share_errors():
        if settings.download and ctx.local_rank == 0:
            download(settings.data, settings.data_dir)
    with ctx.share_errors():
        return load_task_data(make_task(settings), settings)


def make_model(settings: Settings, data: Data) -> nn.Module:
    """Build the task's model for this data. Raises UserError."""
    model = make_task(settings).build_model(settings, data)
    if settings.channels_last:
        # Before wrapping and before the optimizer allocates its state in the layout of the weights. Only 4-dimensional
        # weights change.
        model = model.to(memory_format=torch.channels_last)
    return model


def check_agreement(settings: Settings, ctx: RankContext) -> None:
    """Raise UserError if ranks were started with different options: they would hang or train incorrectly.

    A collective; the error is raised on all ranks. Only paths may differ.
    """
    mine = dict(vars(settings))
    for folder in ("data_dir", "out"):
        del mine[folder]
    mine["log_dir"] = "given" if settings.log_dir else None  # records need collectives
    ranks = ctx.gather(mine)
    for rank, theirs in enumerate(ranks):
        for name, value in theirs.items():
            if value != ranks[0][name]:
                difference = f"rank {rank} was started with {name}={value}, rank 0 with {ranks[0][name]}"
                raise UserError(f"{difference}; start all ranks with the same options")


def make_sampler(
    settings: Settings, ctx: RankContext, samples: int, replicas: int
) -> DistributedBatchSampler | OwnSharesSampler:
    """Build the sampler of this rank. replicas: of each rank."""
    s, shares = settings, (samples, settings.batch_size, ctx.mesh.data_rank, ctx.mesh.data_size)
    if s.join:
        return OwnSharesSampler(*shares, shuffle=s.shuffle, seed=s.seed)
    remainder = smallest_share(samples % s.batch_size, ctx.mesh.data_size, s.accumulate, replicas)
    return DistributedBatchSampler(*shares, shuffle=s.shuffle, seed=s.seed, keep_last=s.keep_last and remainder > 1)


def check_model(
    model: nn.Module,
    sampler: DistributedBatchSampler | OwnSharesSampler,
    plan: Plan,
    settings: Settings,
    ctx: RankContext,
    replicas: int,
) -> None:
    """Raise UserError for a model that the batches do not suit. replicas: of each rank."""
    check_batchnorm(model, settings, ctx.mesh.data_size, replicas)
    if isinstance(sampler, OwnSharesSampler):
        check_own_shares(model, sampler, plan, settings)


def has_batchnorm(model: nn.Module) -> bool:
    """Return whether a layer computes statistics of a batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def check_own_shares(model: nn.Module, sampler: OwnSharesSampler, plan: Plan, settings: Settings) -> None:
    """Raise UserError for --join settings that would fail on some ranks only."""
    single_sample = (
        "the last batch of an epoch would be a single sample, from which BatchNorm cannot compute statistics"
    )
    shortage = f"{sampler.samples} training samples make {sampler.batches} batches of {sampler.size}"
    refuse(
        (
            sampler.batches < sampler.world_size,
            f"--join: {shortage}, and each of {sampler.world_size} ranks needs one; use a smaller --batch-size",
        ),
        (
            sampler.smallest == 1 and has_batchnorm(model),
            f"--join --batch-size {settings.batch_size}: {single_sample}; use another --batch-size or --limit-train",
        ),
    )
    epoch = plan.steps_per_epoch
    intervals = {
        "--monitor": settings.monitor,
        "--save-every": settings.save_every,
        "--checkpoint-every": settings.checkpoint_every,
    }
    for option, steps in intervals.items():
        if steps is not None and steps % epoch:
            raise UserError(
                f"--join {option} {steps}: must be a multiple of {epoch}, because ranks synchronize only after an epoch"
            )


def make_plan(settings: Settings, samples: int, steps_per_epoch: int) -> Plan:
    """Count the steps. Raises UserError if the data does not fill one global batch."""
    if steps_per_epoch == 0:
        raise UserError(f"--batch-size {settings.batch_size} is more than the {samples} training samples")
    steps = settings.epochs * steps_per_epoch
    if settings.max_steps is not None:
        steps = min(steps, settings.max_steps)
    return Plan(settings.run, math.ceil(steps / steps_per_epoch), steps, steps_per_epoch)


def check_batchnorm(model: nn.Module, settings: Settings, world_size: int, replicas: int) -> None:
    """Raise UserError if a batch may leave BatchNorm with a single sample.

    One value per channel, as after shrinking to 1x1, equals its own mean, and statistics of one sample are not useful
    otherwise. The smallest share of all ranks counts, because a rank that fails alone leaves the other ranks waiting.
    replicas: of each rank.
    """
    # With --sync-bn, the statistics are of all ranks' samples.
    ranks = 1 if settings.sync_bn else world_size
    smallest = smallest_share(settings.batch_size, ranks, settings.accumulate, replicas)
    if smallest > 1 or not has_batchnorm(model):
        return
    shares = ranks * settings.accumulate * replicas
    advice = f"use {2 * shares} or more"
    if replicas > 1:
        advice = f"use a multiple of {shares}, {2 * shares} or more"
    samples_of_all_ranks = min(ranks, settings.batch_size)
    if samples_of_all_ranks > 1 and "--sync-bn" not in METHODS[settings.method].refuses:
        advice += ", or --sync-bn"
    raise UserError(f"--batch-size {settings.batch_size} (global) gives BatchNorm a single sample; {advice}")


def build_optimizer(settings: Settings, method: Method) -> Optimizer:
    """Build the optimizer in the settings with the method."""
    if settings.optimizer == "adamw":
        return method.build_optimizer(torch.optim.AdamW, lr=settings.lr, weight_decay=settings.weight_decay)
    return method.build_optimizer(
        torch.optim.SGD, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )


def compile_model(wrapped: nn.Module, ctx: RankContext) -> nn.Module:
    """Compile the model with torch.compile, after a test on all ranks; a collective.

    wrapped: the module called in training, including the parallel wrapper. Compiling around DDP lets torch split the
    graph at gradient buckets, so backward still overlaps with communication. The inner model keeps its tensor names,
    and evaluation uses it uncompiled. The first call compiles, and so does each new batch size. Raises UserError on all
    ranks if torch cannot compile. https://docs.pytorch.org/docs/stable/generated/torch.compile.html
    """
    with ctx.share_errors():
        check_compiler(ctx.device)
    for module in wrapped.modules():
        if isinstance(module, SyncBatchNorm):
            # Exclude its collectives in forward and backward from compiled code.
            disabled = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
            module.forward = disabled  # type: ignore[method-assign]
    return cast("nn.Module", torch.compile(wrapped))


def check_compiler(device: torch.device) -> None:
    """Compile one line, which needs everything that a model needs: a C++ compiler, Python's headers, triton on GPUs.

    Raises UserError with torch's reason.
    """
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:  # torch raises many types, some private, depending on the missing part
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--compile: torch {torch.__version__} cannot compile for {device.type} here: {reason}; "
            "install the missing part (on the CPU g++, or set CXX), or remove --compile"
        ) from error
