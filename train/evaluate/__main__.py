"""Evaluate each rank's checkpoint on the same test data: what drifted BatchNorm statistics cost.

    python -m train.evaluate ckpts/                             # after train/run.py --save-per-rank
    python -m train.evaluate 'ckpts/ddp_rank*.pth' --json

Runs in one process on the CPU. What cannot be evaluated is one line on stderr and exit code 2; the rest still is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    # As in run.py: `train` and `syncheck` are those of this clone, also for `python train/evaluate`.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    if find_spec("torch") is None:
        sys.stderr.write("evaluate.py: torch is not installed; in this clone: pip install -e '.[train]'\n")
        sys.exit(2)

from syncheck import SyncheckError
from train.errors import UserError
from train.evaluate.rank_scores import score_run
from train.evaluate.replicas import find
from train.options import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from train.evaluate.rank_scores import RunScores
    from train.metrics import Score

SCHEMA = 1  # of the JSON document; removing a field raises it
HEAD = ("run", "step", "rank", "accuracy", "loss", "averaged: accuracy", "loss")
DESCRIPTION = """Evaluate each rank's checkpoint on the same test data.

Two scores for each rank of each run and step: with the BatchNorm statistics in its file, and with those averaged over
the ranks (means averaged; variances averaged, plus the variance of the means). The spread is the best rank's accuracy
less the worst's, in percentage points. Loss is the mean cross-entropy in nats.
"""
EPILOG = """exit codes:
  0  everything was evaluated
  2  something could not be: a mistake in the options, parts of a sharded model, a rank alone, a broken file

examples:
  python train/run.py --spawn 2 --save-per-rank --no-buffer-sync
  python -m train.evaluate ckpts/
"""


def build_parser() -> argparse.ArgumentParser:
    """List the options."""
    parser = Parser(
        prog="python -m train.evaluate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="checkpoints of train/run.py: files, folders or globs")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="folder of the data (default: the clone's own)")
    parser.add_argument("--json", action="store_true", help="write a JSON document instead of a table")
    return parser


def as_table(runs: Sequence[RunScores]) -> str:
    """Write a line for each rank, the spread of each run below it, and then a sentence for each run.

    The last of the steps saved and the final files say the same, once.
    """
    tables = {}
    for run in runs:
        r = run.replicas
        head = (r.run, "-" if r.step is None else str(r.step))
        table = [(*head, str(rank.rank), *_cells(rank.own), *_cells(rank.averaged)) for rank in run.ranks]
        table.append((*head, "spread", _points(run.spread), "", _points(run.averaged_spread), ""))
        tables[tuple(table)] = run.sentence
    rows = [HEAD, *(row for table in tables for row in table)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "".join(f"{printable(line)}\n" for line in [*lines, "", *tables.values()])


def _cells(score: Score | None) -> tuple[str, str]:
    return ("-", "-") if score is None else (f"{score.accuracy:.2%}", f"{score.loss:.4f}")


def _points(spread: float | None) -> str:
    return "-" if spread is None else f"{100 * spread:.2f}"


def as_json(runs: Sequence[RunScores], refused: Sequence[str]) -> str:
    """Write all numbers, with full precision. What JSON has no number for, such as a loss of NaN, is null."""
    document = {"schema": SCHEMA, "runs": [_run(run) for run in runs], "refused": list(refused)}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _run(run: RunScores) -> dict[str, Any]:
    r = run.replicas
    return {
        "run": r.run,
        "step": r.step,
        "model": r.task.model,
        "data": r.task.data,
        "world_size": r.world_size,
        "parameters_differ": r.parameters_differ,
        "statistics_differ": r.statistics_differ,
        "ranks": [
            {"rank": rank.rank, "path": rank.path, "own": _numbers(rank.own), "averaged": _numbers(rank.averaged)}
            for rank in run.ranks
        ],
        "spread": run.spread,
        "averaged_spread": run.averaged_spread,
        "sentence": run.sentence,
    }


def _numbers(score: Score | None) -> dict[str, float | int | None] | None:
    if score is None:
        return None
    loss = score.loss if math.isfinite(score.loss) else None
    return {"accuracy": score.accuracy, "loss": loss, "samples": score.samples}


def printable(text: str) -> str:
    """Escape what would break a line or steer a terminal: names in a file are not to be trusted."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def work(args: argparse.Namespace) -> int:
    """Evaluate what can be, and print it. Returns the exit code. Raises UserError and SyncheckError."""
    found, refused = find(args.paths)
    runs = []
    for replicas in found:
        try:
            runs.append(score_run(replicas, args.data_dir))
        except UserError as error:
            refused.append(str(error))
    if args.json:
        sys.stdout.write(as_json(runs, refused))
    elif runs:
        sys.stdout.write(as_table(runs))
    sys.stdout.flush()
    for reason in dict.fromkeys(refused):  # once, where it is the data that all of them lack
        complain(reason)
    return 2 if refused else 0


def complain(reason: str) -> None:
    """Write a line on stderr."""
    sys.stderr.write(f"evaluate.py: {printable(reason)}\n")


def main(argv: list[str] | None = None) -> int:
    """Evaluate the checkpoints that the arguments name; returns the exit code."""
    try:
        return work(build_parser().parse_args(argv))
    except (UserError, SyncheckError) as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:
        complain("interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read our output has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # what a shell reports


if __name__ == "__main__":
    sys.exit(main())
