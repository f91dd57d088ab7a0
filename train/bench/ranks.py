"""Runs a measurement on ranks that are started with the options of run.py, and returns the result of rank 0."""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from train.errors import UserError
from train.launch import spawn
from train.launch.exits import ExitStatus
from train.launch.group import process_group
from train.options import build_parser
from train.run import settings_and_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from train.launch import RankContext
    from train.settings import Settings

    Measurement = Callable[[Settings, RankContext, int], dict[str, Any]]


def run_on_ranks(measurement: Measurement, options: Sequence[str], rounds: int) -> dict[str, Any]:
    """Call the function on every rank inside the process group, and return its result on rank 0.

    measurement: function of settings, rank and number of rounds; it must be picklable. options: options of run.py;
    --spawn N starts N ranks, otherwise this process is the only rank. Raises UserError if a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = build_parser().parse_args(list(options))
        args = Namespace(**vars(args), measurement=measurement, rounds=rounds, result=str(Path(folder) / "result"))
        status = run_rank(args) if args.spawn is None else spawn.run_ranks(run_rank, args)
        if status.code:
            raise UserError(status.message)
        result: dict[str, Any] = json.loads(Path(args.result).read_text())
        return result


def run_rank(args: Namespace) -> ExitStatus:
    """Run the measurement on this rank; rank 0 writes the result."""
    try:
        settings, ctx = settings_and_rank(args)
        with process_group(ctx, args.timeout):
            result = args.measurement(settings, ctx, args.rounds)
        if ctx.is_main:
            Path(args.result).write_text(json.dumps(result))
    except UserError as error:
        return ExitStatus(2, str(error), shared=True)
    return ExitStatus()


def measure_in_turns(
    loops: Mapping[str, Callable[[], object]], ctx: RankContext, rounds: int
) -> dict[str, list[float]]:
    """Call the functions in turns, and return the seconds of the slowest rank for each call; a collective.

    The first round is warm-up and not returned. The times include the work on the device.
    """
    times: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds + 1):
        # The order alternates, because the first function of a round may find other caches.
        for name in sorted(loops, reverse=number % 2 == 0):
            ctx.gather(None)  # all ranks start together; idle ranks wait without using a core
            _synchronize(ctx.device)
            start = time.perf_counter()
            loops[name]()
            _synchronize(ctx.device)
            slowest = max(ctx.gather(time.perf_counter() - start))
            if number:
                times[name].append(slowest)
    return times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
