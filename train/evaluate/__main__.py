"""Evaluate each rank's checkpoint on the same test data, to measure the cost of drifted BatchNorm statistics.

    python -m train.evaluate ckpts/                             # after train/run.py --save-per-rank
    python -m train.evaluate 'ckpts/ddp_rank*.pth' --json

Evaluation uses one process on the CPU. If a run cannot be evaluated, one line is printed on stderr, the remaining runs
are evaluated, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    # As in run.py: import `train` and `syncheck` from this clone, also for `python train/evaluate`.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    if find_spec("torch") is None:
        sys.stderr.write("evaluate.py: torch is not installed; in this clone: pip install -e '.[train]'\n")
        sys.exit(2)

from train.columns import align_columns, join_columns
from train.errors import UserError
from train.evaluate.rank_scores import score_run
from train.evaluate.replicas import find_replicas
from train.metrics import replace_nonfinite
from train.optional import MISSING, SyncheckError
from train.options import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from train.evaluate.rank_scores import RunScores
    from train.metrics import Score

# The version of the JSON document; removing a field increases it.
SCHEMA = 1
HEAD = ("run", "step", "rank", "accuracy", "loss", "averaged: accuracy", "loss")
DESCRIPTION = """Evaluate each rank's checkpoint on the same test data.

For each run and step, each rank has two scores: with the BatchNorm statistics in its file, and with the statistics
averaged over the ranks (means are averaged; variances are averaged, plus the variance of the means). The spread is the
best accuracy minus the worst accuracy, in percentage points. Loss is the mean cross-entropy in nats. For text, and with
--task, accuracy is replaced by the first metric of the task.
"""
EPILOG = """exit codes:
  0  all checkpoints were evaluated
  2  invalid options, or a checkpoint cannot be evaluated: sharded model, no other rank, damaged file

examples:
  python train/run.py --spawn 2 --save-per-rank --no-buffer-sync
  python -m train.evaluate ckpts/
"""


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Parser(
        prog="python -m train.evaluate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="checkpoints of train/run.py: files, folders or globs")
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="folder of the data (default: the digits in this clone)"
    )
    parser.add_argument("--task", metavar="MODULE:CLASS", help="the --task of the run, whose code is imported")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of a table")
    return parser


def as_table(runs: Sequence[RunScores]) -> str:
    """Format a line per rank, the spread of each run below its ranks, and finally a sentence per run.

    Runs with equal tables are printed once, because the last saved step usually equals the final files.
    """
    metrics = {run.ranks[0].own.main[0] for run in runs}
    metric = "metric"
    if len(metrics) == 1:
        metric = metrics.pop()
    rows = [tuple(cell.replace("accuracy", metric) for cell in HEAD)]
    sentences = {}
    for run in runs:
        table = _list_rows(run)
        if table not in sentences:
            rows += table
        sentences[table] = run.sentence
    lines = [*join_columns(align_columns(rows, texts=1)), "", *sentences.values()]
    return "".join(f"{escape_unprintable(line)}\n" for line in lines)


def _list_rows(run: RunScores) -> tuple[tuple[str, ...], ...]:
    """Return a row for each rank, and a row with the spread of the run."""
    step = str(run.replicas.step)
    if run.replicas.step is None:
        step = "-"
    head = (run.replicas.run, step)
    rows = [(*head, str(rank.rank), *_format_score(rank.own), *_format_score(rank.averaged)) for rank in run.ranks]
    spread, averaged_spread = _format_points(run, run.spread), _format_points(run, run.averaged_spread)
    rows.append((*head, "spread", spread, "", averaged_spread, ""))
    return tuple(rows)


def _format_score(score: Score | None) -> tuple[str, str]:
    if score is None:
        return "-", "-"
    return score.format(2, named=False), f"{score.loss:.4f}"


def _format_points(run: RunScores, spread: float | None) -> str:
    if spread is None:
        return "-"
    if run.ranks[0].own.main[0] == "accuracy":
        return f"{100 * spread:.2f}"
    return f"{spread:.4g}"


def as_json(runs: Sequence[RunScores], refused: Sequence[str]) -> str:
    """Format all numbers with full precision as JSON; a non-finite loss is null."""
    document = {"schema": SCHEMA, "runs": [_run_as_dict(run) for run in runs], "refused": list(refused)}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _run_as_dict(run: RunScores) -> dict[str, Any]:
    r, settings = run.replicas, run.replicas.settings
    return {
        "run": r.run,
        "step": r.step,
        "task": settings.task,
        "model": None if settings.task else settings.model,
        "data": None if settings.task else settings.data,
        "world_size": r.world_size,
        "parameters_differ": r.parameters_differ,
        "statistics_differ": r.statistics_differ,
        "ranks": [
            {"rank": s.rank, "path": s.path, "own": _score_as_dict(s.own), "averaged": _score_as_dict(s.averaged)}
            for s in run.ranks
        ],
        "spread": run.spread,
        "averaged_spread": run.averaged_spread,
        "sentence": run.sentence,
    }


def _score_as_dict(score: Score | None) -> dict[str, Any] | None:
    if score is None:
        return None
    return replace_nonfinite({"loss": score.loss, **score.metrics, "samples": score.samples})


def escape_unprintable(text: str) -> str:
    """Escape line breaks and control characters, because names in checkpoints are untrusted."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def evaluate_paths(args: argparse.Namespace) -> int:
    """Evaluate the checkpoints, print the scores, and return the exit code. Raises UserError and SyncheckError."""
    if MISSING:
        raise UserError(f"{MISSING}, which finds the replicas; run it in a clone of syncheck")
    checkpoints, refused = find_replicas(args.paths, args.task)
    runs = []
    for replicas in checkpoints:
        try:
            runs.append(score_run(replicas, args.data_dir))
        except UserError as error:
            refused.append(str(error))
    if args.json:
        sys.stdout.write(as_json(runs, refused))
    elif runs:
        sys.stdout.write(as_table(runs))
    sys.stdout.flush()
    for reason in dict.fromkeys(refused):  # missing data causes the same line for all runs
        print_error(reason)
    return 2 if refused else 0


def print_error(reason: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(f"evaluate.py: {escape_unprintable(reason)}\n")


def main(argv: list[str] | None = None) -> int:
    """Evaluate the checkpoints of the command line, and return the exit code."""
    try:
        return evaluate_paths(build_parser().parse_args(argv))
    except (UserError, SyncheckError) as error:
        print_error(str(error))
        return 2
    except KeyboardInterrupt:
        print_error("interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader closed the pipe, for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # as a shell reports it


if __name__ == "__main__":
    sys.exit(main())
