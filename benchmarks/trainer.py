"""Measure the parts of a DDP step, the overhead of the trainer, or its launchers on two nodes.

    python -m benchmarks.trainer parts -- --model resnet18       # why DDP is not twice as fast on two processes
    python -m benchmarks.trainer overhead                        # the trainer compared with a bare loop
    python -m benchmarks.trainer nodes -- --gpus none            # two network namespaces; needs Linux, root and `ip`

Ranks are started with the options of train/run.py after --. The first round of several is warm-up.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from benchmarks.trainer_nodes import measure_nodes
from train.bench.__main__ import WORKLOAD
from train.engine import Job, train_epoch
from train.errors import UserError
from train.launch import spawn
from train.launch.process_group import process_group
from train.launch.signals import ExitStatus
from train.methods import METHODS
from train.options import build_parser, settings_from
from train.parts import build_optimizer, load, make_model
from train.run import find_rank
from train.schedule import Position
from train.settings import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings

    Measurement = Callable[[Settings, RankContext, int], str]

STEPS = 3  # consecutive steps per measurement of a part
# Settings that the bare loop does not support.
UNSUPPORTED = (
    *("amp", "accumulate", "grad_clip", "ema", "keep_last", "join", "compile", "channels_last"),
    *("fault", "workers", "monitor", "save_every", "checkpoint_every", "resume"),
)


def print_measurement(measurement: Measurement, options: Sequence[str], rounds: int) -> None:
    """Call the function on every rank inside the process group, and print the text that it returns on rank 0.

    measurement: a picklable function of settings, rank and number of rounds. options: options of run.py; --spawn N
    starts N ranks, otherwise this process is the only rank. Raises UserError if a rank fails.
    """
    args = build_parser().parse_args(list(options))
    args = Namespace(**vars(args), measurement=measurement, rounds=rounds)
    status = run_rank(args) if args.spawn is None else spawn.run_ranks(run_rank, args)
    if status.code:
        raise UserError(status.message)


def run_rank(args: Namespace) -> ExitStatus:
    """Run the measurement on this rank; rank 0 prints the result."""
    try:
        settings = settings_from(args)
        ctx = find_rank(settings, args)
        with process_group(ctx, args.timeout):
            text = args.measurement(settings, ctx, args.rounds)
        if ctx.is_main:
            sys.stdout.write(text)
            sys.stdout.flush()
    except UserError as error:
        return ExitStatus(2, str(error), shared=True)
    return ExitStatus()


def measure_in_turns(
    parts: Mapping[str, Callable[[], object]], ctx: RankContext, rounds: int, repeats: int = 1
) -> dict[str, list[float]]:
    """Call the functions in turns, and return the seconds of the slowest rank for each call; a collective.

    The first round is warm-up and not returned. The times include the work on the device. repeats: consecutive calls in
    a turn.
    """
    times: dict[str, list[float]] = {name: [] for name in parts}
    synchronize = torch.cuda.synchronize if ctx.device.type == "cuda" else lambda _: None
    for number in range(rounds + 1):
        # The order alternates, because the first function of a round may find other caches.
        for name in sorted(parts, reverse=number % 2 == 0):
            ctx.gather(None)  # all ranks start together; idle ranks wait without using a core
            synchronize(ctx.device)
            start = time.perf_counter()
            for _ in range(repeats):
                parts[name]()
            synchronize(ctx.device)
            slowest = max(ctx.gather((time.perf_counter() - start) / repeats))
            if number:
                times[name].append(slowest)
    return times


def train_step(forward: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """Train one step without metrics, schedule or checks."""
    F.cross_entropy(forward(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def measure_parts(settings: Settings, ctx: RankContext, rounds: int) -> str:
    """Time the parts of a DDP step, `rounds` times after a round for warm-up; a collective.

    The parts, of which the medians are formatted:

    - whole: a single process on the whole global batch, while the other ranks are idle;
    - share: a single process on a rank's share, while the other ranks are idle;
    - together: all ranks on their shares at the same time, without communication;
    - ddp: all ranks on their shares with DDP;
    - reduce: an all-reduce of the size of the gradient, without computation.
    """
    data = load(settings, ctx)
    x, y = (column.to(ctx.device) for column in data.train[: settings.batch_size])
    share = slice(ctx.rank, None, ctx.world_size)
    method = METHODS["ddp"](settings, ctx)
    torch.manual_seed(settings.seed)
    forward = method.wrap(make_model(settings, data))
    optimizer = build_optimizer(settings, method)
    gradient = torch.zeros(sum(p.numel() for p in method.module.parameters()), device=ctx.device)
    parts: dict[str, Callable[[], object]] = {
        "whole": lambda: train_step(method.module, optimizer, x, y) if ctx.is_main else None,
        "share": lambda: train_step(method.module, optimizer, x[share], y[share]) if ctx.is_main else None,
        "together": lambda: train_step(method.module, optimizer, x[share], y[share]),
        "ddp": lambda: train_step(forward, optimizer, x[share], y[share]),
        "reduce": lambda: dist.all_reduce(gradient),
    }
    times = measure_in_turns(parts, ctx, rounds, STEPS)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return format_parts(medians, gradient.numel() * gradient.element_size() / 1e6, ctx.world_size)


def format_parts(parts: Mapping[str, float], megabytes: float, ranks: int) -> str:
    """Format the seconds of the parts, with their speed-ups over one process. megabytes: size of the gradient."""
    whole, ddp = parts["whole"], parts["ddp"]
    exposed = 100 * (ddp - parts["together"]) / ddp
    rows = (
        ("1 process, global batch", whole, ""),
        ("1 process, a rank's share", parts["share"], f"{ranks} if speed did not depend on the batch size"),
        (f"{ranks} processes, no messages", parts["together"], "upper limit for DDP, including contention"),
        (f"{ranks} processes, DDP", ddp, f"{exposed:.1f} % of the step waits for the all-reduce"),
    )
    lines = [
        f"{part:30} {1000 * seconds:8.1f} ms per step {whole / seconds:5.2f} x  {note}".rstrip()
        for part, seconds, note in rows
    ]
    return "\n".join([*lines, f"{f'all-reduce of {megabytes:.1f} MB':30} {1000 * parts['reduce']:8.1f} ms\n"])


def check_settings(settings: Settings, ctx: RankContext) -> None:
    """Refuse settings for which the two loops would do different work. Raises the same UserError on all ranks."""
    for name in UNSUPPORTED:
        if getattr(settings, name) != getattr(DEFAULT, name):
            raise UserError(f"overhead: not with --{name.replace('_', '-')}, which the bare loop does not support")
    if settings.batch_size % ctx.world_size:
        raise UserError(
            f"overhead: --batch-size {settings.batch_size} must be a multiple of the {ctx.world_size} ranks, because "
            "the bare loop needs equal shares"
        )


def measure_overhead(settings: Settings, ctx: RankContext, rounds: int) -> str:
    """Time epochs of the trainer and of a bare loop in turns, `rounds` pairs after a pair for warm-up; a collective.

    Both loops use the same model, method, data and batch size. Only the work around the step differs: the schedule, the
    exact sums of loss and accuracy, and the hooks for saving and checks. Returns a line with the median and the range
    of the pairs' ratios.
    """
    check_settings(settings, ctx)
    # The plan has as many epochs as are timed, because after its last step the trainer would do nothing.
    settings = replace(settings, epochs=rounds + 1, max_steps=None)
    job = Job(settings, ctx)
    data = load(settings, ctx)
    method = METHODS[settings.method](settings, ctx)
    forward = method.wrap(make_model(settings, data))
    forward.train()
    optimizer = build_optimizer(settings, method)
    sampler: Sampler[int] = DistributedSampler(data.train, ctx.world_size, ctx.rank)
    # Index the data set with whole batches, which is as fast as in the trainer.
    batches = BatchSampler(sampler, settings.batch_size // ctx.world_size, drop_last=True)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(data.train, sampler=batches, batch_size=None)
    position = Position(ctx.device)

    def run_trainer() -> None:
        train_epoch(job, position)
        job.metrics_logger.read_clock()
        position.next_epoch()

    def run_bare() -> None:
        for x, y in loader:
            train_step(forward, optimizer, x.to(ctx.device), y.to(ctx.device))

    times = measure_in_turns({"trainer": run_trainer, "bare": run_bare}, ctx, rounds)
    # DistributedSampler pads the epoch, so the bare loop may have one more step than the trainer.
    steps = job.plan.steps_per_epoch
    pairs = zip(times["trainer"], times["bare"], strict=True)
    percents = [100 * (trainer / steps / (bare / len(loader)) - 1) for trainer, bare in pairs]
    return (
        f"{settings.method}: {statistics.median(percents):+.2f} % per step compared with a bare loop "
        f"({rounds} pairs of epochs of {steps} steps, {min(percents):+.2f} to {max(percents):+.2f} %)\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement of the command line, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    options = words[end + 1 :] or list(WORKLOAD)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trainer", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("measurement", choices=("parts", "overhead", "nodes"))
    parser.add_argument("--processes", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per process (default: 1)")
    arguments = parser.parse_args(words[:end])
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    ddp = ["--method", "ddp", "--spawn", str(arguments.processes), *options]
    try:
        if arguments.measurement == "nodes":
            measure_nodes(options, arguments.rounds, arguments.threads)
        elif arguments.measurement == "parts":
            print_measurement(measure_parts, ddp, arguments.rounds)
        else:
            print_measurement(measure_overhead, ["--method", "single", *options], arguments.rounds)
            print_measurement(measure_overhead, ddp, arguments.rounds)
    except UserError as error:
        sys.stderr.write(f"benchmarks.trainer: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
