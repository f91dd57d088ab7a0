"""Train a model with a parallel method; with --save-per-rank, save one checkpoint per rank.

    torchrun --nproc-per-node 2 train/run.py --save-per-rank    # ddp
    torchrun train/run.py --save-per-rank                       # the same, or one rank per GPU: see docs/launchers.md
    python train/run.py --spawn 2 --save-per-rank               # the same without torchrun
    python train/run.py                                         # single

Other ways to start: train/scripts/ and `run.py --help`. Exit code 2, with one line on stderr: a mistake in the options,
the data or the output folder. Exit code 1: the end of another rank, or a finding of --on-desync raise. A signal stops
all ranks after the same step; the exit code is 128 plus its number: 130 for Ctrl-C, 143 for SIGTERM, 138 for SIGUSR1.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # Python put train/ here. The root of this clone replaces it before the imports below, so that `train` and
    # `syncheck` come from this clone whatever else is installed.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    if find_spec("torch") is None:
        sys.stderr.write("run.py: error: torch is not installed; in this clone: pip install -e '.[train]'\n")
        sys.exit(2)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C during the imports, which take seconds, needs no traceback of theirs.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    # torch logs pages of C++ stack traces when another rank is missing or lost, and raises the same errors.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

if __name__ in ("__main__", "__mp_main__"):  # the second one in the ranks of --spawn
    # The imports create a million objects that live to the end of the process. The garbage collector would search them
    # again and again, which takes a fifth of the time of the imports.
    gc.disable()

from train.engine import train
from train.errors import RankError, Stopped, UserError
from train.launch import spawn
from train.launch.environment import describe_idle_gpus, make_rank_context, prints_for_all_ranks
from train.launch.launch_options import LaunchOptions
from train.launch.process_group import PeerLost, process_group
from train.launch.signals import (
    INTERRUPTED,
    SIGNALS,
    ExitStatus,
    exit_process,
    open_closed_streams,
    print_once,
    print_status,
)
from train.methods import METHODS, assign_mesh, check_modifiers
from train.optional import MISSING, SyncheckError
from train.options import build_parser, settings_from
from train.recorders.composite import make_recorder
from train.recorders.progress import Output
from train.result import summary
from train.settings import check

if TYPE_CHECKING:
    import argparse

    from train.launch import RankContext
    from train.result import Result
    from train.settings import Settings

if __name__ in ("__main__", "__mp_main__"):
    gc.freeze()
    gc.enable()

LONGEST = 604_800  # seconds: a week


def find_rank(settings: Settings, args: argparse.Namespace) -> RankContext:
    """Find out the rank of this process, and check the settings for it. Raises UserError."""
    check_options_of_method(settings, args)
    grouped = METHODS[settings.method].grouped
    ctx = make_rank_context(os.environ, settings.method, grouped=grouped, options=LaunchOptions.from_args(args))
    ctx = assign_mesh(settings, ctx)
    # The number of ranks with data of their own depends on the mesh of the method.
    check(settings, ctx.mesh.data_size)
    if not 0 < args.timeout <= LONGEST:
        raise UserError(f"--timeout {args.timeout}: needs seconds, above 0 and up to {LONGEST}")
    return ctx


def check_options_of_method(settings: Settings, args: argparse.Namespace) -> None:
    """Raise UserError for an option that the method does not support, with advice if the method ddp supports it."""
    try:
        check_modifiers(settings)
    except UserError as error:
        advice = ""
        if args.method is None and settings.method == "single":
            with suppress(UserError):
                check_modifiers(replace(settings, method="ddp"))
                advice = "; add --spawn 2, or start with torchrun"
        raise UserError(f"{error}{advice}") from error


def train_rank(settings: Settings, args: argparse.Namespace) -> ExitStatus:
    """Train on this rank, the only one of this process."""
    try:
        ctx = find_rank(settings, args)
        if idle := describe_idle_gpus(args.gpus, ctx.devices, ctx.local_world_size):
            print_once(ctx, idle)
        if MISSING:
            print_once(ctx, f"{MISSING}: checkpoints have no metadata blocks")
        output = Output()
        recorder = make_recorder(settings, ctx, args.progress, output)
        with process_group(ctx, args.timeout), recorder:
            result = train(settings, ctx, recorder, SIGNALS)
        return report(result, settings, ctx, output)
    except UserError as error:
        return ExitStatus(2, str(error), shared=not isinstance(error, RankError))
    except Stopped as error:
        return ExitStatus(128 + error.number, str(error), shared=True)
    except SyncheckError as error:  # of --monitor
        return ExitStatus(error.exit_code, str(error), shared=True)
    except PeerLost as error:
        return ExitStatus(1, str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough, as `| head` does
        return ExitStatus(128 + signal.SIGPIPE)  # what a shell reports


def report(result: Result, settings: Settings, ctx: RankContext, output: Output) -> ExitStatus:
    """Print the summary of a complete training, and return its status."""
    if ctx.is_main:
        output.write(summary(result, settings.method))
    if result.diverged is not None:
        since = f"the loss is not finite since epoch {result.diverged}"
        print_once(ctx, f"warning: {since}; lower --lr, or add --grad-clip")
    if result.failed:
        return ExitStatus(2, result.failed, shared=True)
    if output.lost is not None:
        # Not before: a lost console must not cost the training.
        reason = output.lost.strerror
        return ExitStatus(2, f"cannot write to stdout: {reason}; the training itself has come to its end")
    return ExitStatus()


def spawn_ranks(settings: Settings, args: argparse.Namespace) -> ExitStatus:
    """Start all ranks of --spawn, after reporting the errors of rank 0. Raises UserError."""
    spawn.check_options(os.environ, LaunchOptions.from_args(args))
    find_rank(settings, spawn.make_rank_args(args, 0, Path.cwd()))
    return spawn.run_ranks(partial(train_rank, settings), args)


def main(argv: list[str] | None = None) -> ExitStatus:
    """Run the training of a command line, print its final message, and return its status."""
    args = None
    try:
        args = build_parser().parse_args(argv)
        settings = settings_from(args)
        spawn.replace_torchrun(os.environ, args, saves=settings.save_per_rank)
        status = train_rank(settings, args) if args.spawn is None else spawn_ranks(settings, args)
    except UserError as error:
        status = ExitStatus(2, str(error), shared=True)
    if not status.shared or prints_for_all_ranks(os.environ, args):
        print_status(status)
    return status


if __name__ == "__main__":
    open_closed_streams()
    SIGNALS.listen()
    status = main()
    exit_process(status.code, shared=status.shared, signaled=SIGNALS.number != 0)
