"""Run a measurement on the ranks that run.py's own options start, and bring its result back."""

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
    from collections.abc import Callable, Sequence

    from train.launch import RankContext
    from train.settings import Settings

    Measurement = Callable[[Settings, RankContext, int], dict[str, Any]]


def on_ranks(measurement: Measurement, options: Sequence[str], rounds: int) -> dict[str, Any]:
    """Call a function of a module on every rank, inside the process group; return what it gave on rank 0.

    options: of run.py; with --spawn N on N ranks, else in this process. measurement: takes the settings, the rank and
    the number of rounds. Raises UserError with the reason where a rank could not.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = build_parser().parse_args(list(options))
        args = Namespace(**vars(args), measurement=measurement, rounds=rounds, result=str(Path(folder) / "result"))
        status = work(args) if args.spawn is None else spawn.run_ranks(work, args)
        if status.code:
            raise UserError(status.message)
        found: dict[str, Any] = json.loads(Path(args.result).read_text())
        return found


def work(args: Namespace) -> ExitStatus:
    """Be one rank."""
    try:
        settings, ctx = settings_and_rank(args)
        with process_group(ctx, args.timeout):
            found = args.measurement(settings, ctx, args.rounds)
        if ctx.is_main:
            Path(args.result).write_text(json.dumps(found))
    except UserError as error:
        return ExitStatus(2, str(error), shared=True)
    return ExitStatus()


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time a call until its device is done."""
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
