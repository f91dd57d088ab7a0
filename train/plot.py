"""Draw the loss and accuracy curves of runs that --log-dir has recorded.

    python -m train.plot logs/ddp/metrics.jsonl                            # writes metrics.png
    python -m train.plot logs/*/metrics.jsonl -o curves.svg                # several runs in one picture

Solid lines are training, dashed lines the test set. Exit code 2, with one line on stderr: a mistake in the options or
the files.
"""

from __future__ import annotations

import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    # As in run.py: import `train` from this clone.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    for module, extra in (("torch", "train"), ("matplotlib", "train")):
        if find_spec(module) is None:
            sys.stderr.write(f"plot.py: {module} is not installed; in this clone: pip install -e '.[{extra}]'\n")
            sys.exit(2)

from train.errors import UserError
from train.options import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
Records = list[dict[str, Any]]


def read_records(path: Path) -> Records:
    """Read the records of one run, without partial lines. Raises UserError for an unreadable or different file."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; pass metrics.jsonl files of --log-dir") from error
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("run"), str):
            records.append(record)
    starts = [record for record in records if record.get("event") == "start"]
    if not starts or not number(starts[0], "steps_per_epoch") > 0:
        raise UserError(f"{path}: has no event start; pass DIR/<run>/metrics.jsonl of a run with --log-dir DIR")
    if not any(record.get("event") in ("step", "epoch") for record in records):
        raise UserError(f"{path}: has no step and no epoch yet; wait, or use a smaller --log-interval")
    return records


def number(record: dict[str, Any], name: str) -> float:
    """Return a field of a record; NaN, which leaves a gap in a curve, if it is missing, null or no number."""
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) else math.nan


def curve(records: Records, event: str, name: str) -> list[tuple[float, float]]:
    """Return a field of all events of a kind as points: time in epochs, and value, which may be NaN."""
    steps = number(next(record for record in records if record.get("event") == "start"), "steps_per_epoch")
    return [(number(r, "step") / steps, number(r, name)) for r in records if r.get("event") == event]


def name_runs(paths: Sequence[Path], runs: Sequence[Records]) -> list[str]:
    """Name each run for the legend; runs of one name are distinguished by their paths."""
    names = [run[0]["run"] for run in runs]
    return [f"{name} ({path})" if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)]


def draw(runs: Sequence[Records], names: Sequence[str]) -> Figure:
    """Draw the curves of all runs: loss on the left, accuracy, if any run has it, on the right, one color per run."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    fields = ["loss", "accuracy"] if any("accuracy" in record for run in runs for record in run) else ["loss"]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, field in zip(figure.subplots(1, len(fields), squeeze=False)[0], fields, strict=True):
        for index, records in enumerate(runs):
            # A short run has few records within its epochs.
            training = max((curve(records, event, field) for event in ("epoch", "step")), key=len)
            axes.plot(*zip(*training, strict=True), "." if len(training) == 1 else "-", color=f"C{index}")
            # Connect the evaluated epochs across epochs without an evaluation.
            tested = [point for point in curve(records, "epoch", f"test_{field}") if not math.isnan(point[1])]
            if tested:
                axes.plot(*zip(*tested, strict=True), "o--", color=f"C{index}", markersize=3)
        axes.set(xlabel="epoch", title=field)
        axes.grid(color="#dddddd")
    handles = [Line2D([], [], color=f"C{index}") for index in range(len(runs))]
    kinds = [Line2D([], [], color="black"), Line2D([], [], color="black", linestyle="--", marker="o", markersize=3)]
    legend = figure.legend(handles + kinds, [*names, "training", "test"], loc="outside lower center", ncols=3)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a path may contain dollar signs
    return figure


def main(argv: list[str] | None = None) -> int:
    """Draw the runs of the command line, and return the exit code."""
    parser = Parser(prog="python -m train.plot", description="Draw the loss and accuracy curves of runs.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="metrics.jsonl", help="one file for each run")
    text = "picture to write, a .png or .svg file (default: %(default)s)"
    parser.add_argument("-o", "--output", type=Path, default=Path("metrics.png"), metavar="FILE", help=text)
    try:
        args = parser.parse_args(argv)
        if args.output.suffix not in FORMATS:
            raise UserError(f"--output {args.output}: must be a .png or .svg file")
        runs = [read_records(path) for path in args.paths]
        try:
            draw(runs, name_runs(args.paths, runs)).savefig(args.output, dpi=120)
        except OSError as error:
            raise UserError(f"--output {args.output}: cannot be written: {error.strerror}") from error
    except UserError as error:
        sys.stderr.write(f"plot.py: {error}\n")
        return 2
    sys.stdout.write(f"wrote {args.output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
