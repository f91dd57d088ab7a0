"""Train a model under a parallel method and save one checkpoint per rank.

    torchrun --nproc-per-node 2 train/run.py --save-per-rank    # ddp
    python train/run.py                                         # single

A mistake in the options, the data or the output folder is one line on stderr and exit code 2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # Python put train/ here. The root of this clone takes its place, before anything of ours is imported, so
    # that `train` and `syncheck` are the ones beside this file whatever else is installed.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from train.engine import Result, train
from train.errors import RankError, UserError
from train.launch import from_environment, leave, process_group
from train.methods import METHODS
from train.options import build_parser, settings_from
from train.progress import make_progress
from train.settings import check

LONGEST = 604_800  # seconds: a week


def summary(result: Result) -> str:
    """Say in one line what was reached, and in a second what was written."""
    reached = f"{result.test.accuracy:.1%} test accuracy, {_count(result.epochs, 'epoch')}"
    first = f"{result.run}: {reached}, {_count(result.steps, 'step')}, {result.seconds:.1f} s\n"
    if not result.saved:
        return first + "saved nothing; --save-per-rank writes one checkpoint per rank\n"
    where = f"{result.saved[0]} to {result.saved[-1]}" if len(result.saved) > 1 else f"{result.saved[0]}"
    return first + f"saved {_count(len(result.saved), 'file')}: {where}\n"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def main(argv: list[str] | None = None) -> int:
    """Run one training; returns the exit code."""
    try:
        args = build_parser().parse_args(argv)
        settings = settings_from(args)
        ctx = from_environment(os.environ, settings.method, grouped=METHODS[settings.method].grouped)
        check(settings, ctx.world_size)
        if not 0 < args.timeout <= LONGEST:
            raise UserError(f"--timeout {args.timeout}: needs seconds, above 0 and up to {LONGEST}")
        with process_group(ctx, args.timeout), make_progress(args.progress, is_main=ctx.is_main) as progress:
            result = train(settings, ctx, progress)
    except UserError as error:
        if isinstance(error, RankError) or os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"run.py: error: {error}\n")
            sys.stderr.flush()
        return 2
    except KeyboardInterrupt:
        return 130
    if ctx.is_main:
        sys.stdout.write(summary(result))
    return 0


if __name__ == "__main__":
    leave(main())
