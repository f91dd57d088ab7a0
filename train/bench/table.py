"""Formats the benchmark table for a terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from train.bench.cases import REFERENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from train.bench.runs import Row

THROUGHPUT, EPOCH_TIME = attrgetter("throughput"), attrgetter("epoch_time")
START, MEMORY = attrgetter("start_time"), attrgetter("memory")
PIPE_WIDTH = 200  # columns, if stdout is not a terminal
SCHEMA = 1  # of the JSON document; removing a field increases it
HEAD = (
    *("case", "launcher", "processes", "start s", "epoch s", "step ms", "samples/s", "speed-up", "test %"),
    "memory MB",
)
NOTES = (
    "Medians over the rounds, without the first epoch of each run. start: time from the command to the first step. "
    "speed-up: samples/s divided by samples/s of single. test %: accuracy at the end. memory: peak of a single "
    "process, on its GPU if it has one."
)


def compute_speed_up(row: Row, rows: Sequence[Row]) -> float | None:
    """Return the row's throughput divided by that of `single`; None if either was not measured."""
    base = next((other for other in rows if other.case.name == REFERENCE), None)
    if base is None or not base.timings or not row.timings:
        return None
    return row.compute_median(THROUGHPUT) / base.compute_median(THROUGHPUT)


def format_row(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """Format the cells of a measured row."""
    speed_up = compute_speed_up(row, rows)
    return (
        row.case.name,
        row.case.launcher,
        str(row.processes),
        f"{row.compute_median(START):.1f}",
        f"{row.compute_median(EPOCH_TIME):.2f}",
        f"{1000 * row.compute_median(EPOCH_TIME) / row.timings[0].steps:.1f}",
        f"{row.compute_median(THROUGHPUT):.1f}",
        "-" if speed_up is None else f"{speed_up:.2f}",
        f"{row.timings[-1].accuracy * 100:.1f}",
        f"{row.compute_median(MEMORY) / 1e6:.0f}",
    )


def as_text(rows: Sequence[Row], machine: dict[str, Any], width: int | None = None) -> str:
    """Format the table and, below the table, the problems. width: columns; None uses the width of the terminal."""
    # rich would fold at 80 columns if stdout is not a terminal.
    console = Console(width=width if width or sys.stdout.isatty() else PIPE_WIDTH)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in HEAD:
        # On a narrow terminal, long names of cases are folded, so that no number is truncated.
        table.add_column(
            name.translate({ord(" "): "\n", ord("-"): "-\n", ord("/"): "\n/"}),
            justify="left" if name in HEAD[:2] else "right",
            no_wrap=name != HEAD[0],
            overflow="fold",
            vertical="bottom",
        )
    for row in rows:
        if row.timings:
            table.add_row(*format_row(row, rows))
    with console.capture() as captured:
        console.print(format_machine(machine), markup=False, highlight=False)
        console.print()
        console.print(table)
        console.print()
        for row in rows:
            if row.problem:
                console.print(f"{row.case.name}: {row.problem}", markup=False, highlight=False)
        console.print(NOTES, markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def as_markdown(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """Format the table for a README or a pull request."""
    lines = [format_machine(machine), "", f"| {' | '.join(HEAD)} |", "|---|---|" + "---:|" * (len(HEAD) - 2)]
    lines += [f"| {' | '.join(format_row(row, rows))} |" for row in rows if row.timings]
    problems = [f"- `{row.case.name}`: {row.problem}" for row in rows if row.problem]
    return "\n".join([*lines, "", *problems, *([""] if problems else []), NOTES]) + "\n"


def as_json(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """Format all numbers without rounding: seconds, bytes, and fractions."""
    document = {"schema": SCHEMA, "machine": machine, "cases": [_row_as_dict(row, rows) for row in rows]}
    return json.dumps(document, indent=1) + "\n"


def _row_as_dict(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "case": row.case.name,
        "method": row.case.method,
        "options": list(row.case.options),
        "launcher": row.case.launcher,
        "processes": row.processes,
        "problem": row.problem or None,
        "runs": [
            {
                "start_s": timing.start_time,
                "epoch_times_s": list(timing.epochs),
                "steps": timing.steps,
                "samples": timing.samples,
                "test_accuracy": timing.accuracy,
                "peak_memory_bytes": timing.memory,
            }
            for timing in row.timings
        ],
    }
    if row.timings:
        fields |= {
            "epoch_time_s": row.compute_median(EPOCH_TIME),
            "batch_time_s": row.compute_median(EPOCH_TIME) / row.timings[0].steps,
            "samples_per_second": row.compute_median(THROUGHPUT),
            "speed_up": compute_speed_up(row, rows),
        }
    return fields


def format_machine(machine: dict[str, Any]) -> str:
    """Format hardware, versions and options in a line."""
    devices = ", ".join(machine["gpus"]) or f"{machine['cpu']}, {machine['cores']} cores"
    workload = " ".join(machine["options"])
    return (
        f"{devices}; torch {machine['torch']}, {machine['threads']} thread(s) per process, "
        f"{machine['rounds']} round(s); {workload}"
    )
