"""The one training loop, the same for every method."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from train.data import DistributedBatchSampler, load_data, smallest_share
from train.errors import UserError
from train.faults import make_fault
from train.methods import METHODS, check_modifiers
from train.metrics import Meter, Score
from train.models import build_model
from train.progress import Plan, Silent
from train.saver import Saver
from train.step import Step
from train.watch import Watch

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.data.dataset import Samples
    from train.launch import RankContext
    from train.methods.base import Method
    from train.settings import Settings

Batches = DataLoader[tuple["Tensor", ...]]
WARM_UP = 0.1  # share of all steps over which the learning rate rises
EVALUATION_BATCH = 512  # samples per rank and forward at most; any number gives the same score


@dataclass(frozen=True)
class Result:
    """What a run achieved.

    seconds: from the first step to the last evaluation. trained: over the last epoch. saved: the files of all
    ranks. replaced: files of an earlier run of the same name that are gone.
    """

    run: str
    epochs: int
    steps: int
    seconds: float
    trained: Score
    test: Score
    saved: tuple[Path, ...]
    replaced: int


@dataclass(frozen=True)
class Job:
    """One run, ready to start."""

    settings: Settings
    ctx: RankContext
    plan: Plan
    sampler: DistributedBatchSampler
    train_batches: Batches
    test_batches: Batches
    method: Method
    step: Step
    watch: Watch
    saver: Saver


def train(settings: Settings, ctx: RankContext, progress: Silent) -> Result:
    """Train one model as the settings say, save what they ask for, and check it if they ask for that.

    To be called on every rank, inside the process group if the method needs one. Bitwise reproducible with
    the same settings, number of ranks, libraries and machine. Raises UserError, and what the checks raise, on all ranks
    alike.
    """
    job = prepare(settings, ctx, progress.console)
    progress.start(job.plan)
    start, step, epoch = time.perf_counter(), 0, 0
    with job.watch:
        while step < job.plan.steps:
            epoch += 1
            epoch_start = time.perf_counter()
            step, meter = train_epoch(job, step, epoch, progress)
            elapsed = time.perf_counter() - epoch_start
            trained, test = meter.over_ranks(ctx), evaluate(job.method.module, job.test_batches, ctx)
            speed = trained.samples / elapsed
            progress.epoch(step, epoch, trained, test, speed)
    seconds = time.perf_counter() - start
    return Result(settings.run, epoch, step, seconds, trained, test, tuple(job.saver.saved), job.saver.replaced)


def prepare(settings: Settings, ctx: RankContext, console: Console | None = None) -> Job:
    """Load the data, build the model, and check that they fit; a collective. Raises UserError.

    console: where the checks of --monitor print; None for stderr.
    """
    check_agreement(settings, ctx)
    check_modifiers(settings)
    torch.manual_seed(settings.seed)  # the same on all ranks, so that all build the same model
    with ctx.together():
        data = load_data(settings.data, settings.data_dir, settings.limit_train)
    samples = len(data.train)
    method = METHODS[settings.method](settings, ctx)
    sampler = DistributedBatchSampler(
        samples,
        settings.batch_size,
        ctx.rank,
        ctx.world_size,
        shuffle=settings.shuffle,
        seed=settings.seed,
        keep_last=settings.keep_last
        and smallest_share(samples % settings.batch_size, ctx.world_size, settings.accumulate, method.replicas) > 1,
    )
    plan = make_plan(settings, samples, len(sampler))
    fault = make_fault(settings, ctx, plan.steps)
    model = build_model(settings.model, data.channels, data.classes, settings.width)
    check_batchnorm(model, settings, ctx.world_size, method.replicas)
    forward = fault.wrapped(method, method.wrap(model))
    # After wrapping: a method may replace the parameters.
    optimizer = build_optimizer(settings, method)
    step = Step(settings, ctx, method, forward, optimizer, fault)
    return Job(
        settings=settings,
        ctx=ctx,
        plan=plan,
        sampler=sampler,
        train_batches=DataLoader(data.train, batch_sampler=sampler),
        test_batches=evaluation_batches(data.test, ctx),
        method=method,
        step=step,
        watch=Watch(settings, step, console),
        saver=Saver(settings, ctx, plan, step),
    )


def check_agreement(settings: Settings, ctx: RankContext) -> None:
    """Refuse ranks that were started with different options: they would wait for each other, or train nonsense.

    A collective. Raises UserError on all ranks alike. Only folders may differ.
    """
    ranks = ctx.gather({name: value for name, value in vars(settings).items() if name not in ("data_dir", "out")})
    for rank, theirs in enumerate(ranks):
        for name, value in theirs.items():
            if value != ranks[0][name]:
                found = f"rank {rank} was started with {name}={value}, rank 0 with {ranks[0][name]}"
                raise UserError(f"{found}: give all ranks the same options")


def train_epoch(job: Job, step: int, epoch: int, progress: Silent) -> tuple[int, Meter]:
    """Train on every global batch once, or until the plan ends.

    step: optimizer steps done before. epoch: counted from 1. Returns the steps done after, and this rank's
    sums.
    """
    steps, meter, start, seen = job.plan.steps, Meter(job.ctx.device), time.perf_counter(), 0
    job.sampler.set_epoch(epoch - 1)
    job.step.forward.train()
    for samples, (x, y) in zip(job.sampler.sizes, job.train_batches, strict=True):
        set_learning_rate(job.step.optimizer, job.settings.lr * schedule(step, steps))
        step += 1
        job.step.run(step, x, y, samples, meter)
        # Checked and saved at once: no later forward may touch the buffers before. Checked first, so that what is
        # saved is what was found to be right, or was repaired.
        job.watch.after_step(step, last=step == steps)
        job.saver.after_step(step)
        seen += samples
        progress.step(step, epoch, meter, seen / (time.perf_counter() - start))
        if step == steps:
            break
    return step, meter


def make_plan(settings: Settings, samples: int, steps_per_epoch: int) -> Plan:
    """Count the steps. Raises UserError when the data does not fill one global batch."""
    if steps_per_epoch == 0:
        raise UserError(f"--batch-size {settings.batch_size} is more than the {samples} training samples")
    steps = settings.epochs * steps_per_epoch
    if settings.max_steps is not None:
        steps = min(steps, settings.max_steps)
    return Plan(settings.run, math.ceil(steps / steps_per_epoch), steps, steps_per_epoch)


def check_batchnorm(model: nn.Module, settings: Settings, world_size: int, replicas: int) -> None:
    """Refuse a batch that may leave BatchNorm one value per channel, which minus its own mean is zero.

    So it is with one sample where images have shrunk to 1x1, and statistics of one sample mean little elsewhere. The
    smallest share counts, for a rank that fails alone leaves the others waiting. replicas: of each rank.
    Raises UserError.
    """
    ranks = 1 if settings.sync_bn else world_size
    if smallest_share(settings.batch_size, ranks, settings.accumulate, replicas) > 1:
        return
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        shares = ranks * settings.accumulate * replicas
        advice = f"use a multiple of {shares}, {2 * shares} or more" if replicas > 1 else f"use {2 * shares} or more"
        if ranks > 1 and "--sync-bn" not in METHODS[settings.method].refuses and settings.batch_size > 1:
            advice += ", or --sync-bn"
        raise UserError(f"--batch-size {settings.batch_size} (global) gives BatchNorm a single sample; {advice}")


def build_optimizer(settings: Settings, method: Method) -> Optimizer:
    """Let the method build the optimizer that the settings name."""
    if settings.optimizer == "adamw":
        return method.build_optimizer(torch.optim.AdamW, lr=settings.lr, weight_decay=settings.weight_decay)
    return method.build_optimizer(
        torch.optim.SGD, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
    )


def schedule(step: int, steps: int) -> float:
    """Scale the learning rate: a linear rise to 1, then half a cosine towards 0. step: 0 to steps - 1."""
    rise = max(1, int(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / (steps - rise)))


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set it for all parameters, on every rank to the same number."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def evaluation_batches(samples: Samples, ctx: RankContext) -> Batches:
    """Give each rank every world_size-th test sample: each one counted once, none repeated to fill up.

    In equally many batches on all ranks, for under FSDP every forward is a collective. Raises UserError when
    there are fewer samples than ranks.
    """
    if len(samples) < ctx.world_size:
        raise UserError(f"{len(samples)} test samples for {ctx.world_size} ranks: each needs one; start fewer ranks")
    mine = torch.arange(ctx.rank, len(samples), ctx.world_size)
    largest_share = math.ceil(len(samples) / ctx.world_size)
    parts = mine.tensor_split(math.ceil(largest_share / EVALUATION_BATCH))
    return DataLoader(samples, batch_sampler=[part.tolist() for part in parts])


def evaluate(module: nn.Module, batches: Batches, ctx: RankContext) -> Score:
    """Score the model on the test set; a collective.

    module: the unwrapped model. A forward through DDP's wrapper, even without gradients, would copy rank 0's
    buffers to all ranks, and skip that copy before the next training step. Here nothing of the model changes.
    It follows that under plain DDP every rank scores its share with its own BatchNorm statistics.
    """
    module.eval()
    meter = Meter(ctx.device)
    with torch.no_grad():  # not inference_mode: FSDP keeps what it gathers
        for x, y in batches:
            logits, labels = module(x.to(ctx.device)), y.to(ctx.device)
            meter.add(F.cross_entropy(logits, labels, reduction="sum"), logits, labels)
    module.train()
    return meter.over_ranks(ctx)
