"""The field's table, for a terminal, as markdown and as JSON."""

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
WIDE = 200  # columns
SCHEMA = 1  # of the JSON document; removing a field raises it
HEAD = (
    *("case", "started by", "ranks", "start s", "epoch s", "step ms", "samples/s", "speed-up", "test %"),
    "memory MB",
)
NOTES = (
    "Medians over the rounds; a run's first epoch is left out. start: from the command to the first step. speed-up: of "
    "samples/s, over single. test %: accuracy at the end. memory: the most of one process, on its GPU if any."
)


def speed_up(row: Row, rows: Sequence[Row]) -> float | None:
    """Give a row's throughput over that of `single`; None where one of them was not measured."""
    base = next((other for other in rows if other.case.name == REFERENCE), None)
    if base is None or not base.timings or not row.timings:
        return None
    return row.middle(THROUGHPUT) / base.middle(THROUGHPUT)


def cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """Write one measured row."""
    gain = speed_up(row, rows)
    return (
        row.case.name,
        row.case.launcher,
        str(row.processes),
        f"{row.middle(START):.1f}",
        f"{row.middle(EPOCH_TIME):.2f}",
        f"{1000 * row.middle(EPOCH_TIME) / row.timings[0].steps:.1f}",
        f"{row.middle(THROUGHPUT):.1f}",
        "-" if gain is None else f"{gain:.2f}",
        f"{row.timings[-1].accuracy * 100:.1f}",
        f"{row.middle(MEMORY) / 1e6:.0f}",
    )


def as_text(rows: Sequence[Row], machine: dict[str, Any], width: int | None = None) -> str:
    """Draw the table; what could not be run stands below it. width: columns, or None for those of the terminal."""
    # In a pipe rich takes 80 columns, and would fold what nobody sees folded.
    console = Console(width=width if width or sys.stdout.isatty() else WIDE)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in HEAD:
        # On a narrow terminal long names of cases are folded, and no number is cut.
        table.add_column(
            name.translate({ord(" "): "\n", ord("-"): "-\n", ord("/"): "\n/"}),
            justify="left" if name in HEAD[:2] else "right",
            no_wrap=name != HEAD[0],
            overflow="fold",
            vertical="bottom",
        )
    for row in rows:
        if row.timings:
            table.add_row(*cells(row, rows))
    with console.capture() as captured:
        console.print(describe(machine), markup=False, highlight=False)
        console.print()
        console.print(table)
        console.print()
        for row in rows:
            if row.problem:
                console.print(f"{row.case.name}: {row.problem}", markup=False, highlight=False)
        console.print(NOTES, markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def as_markdown(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """Write it for a README or a pull request."""
    lines = [describe(machine), "", f"| {' | '.join(HEAD)} |", "|---|---|" + "---:|" * (len(HEAD) - 2)]
    lines += [f"| {' | '.join(cells(row, rows))} |" for row in rows if row.timings]
    problems = [f"- `{row.case.name}`: {row.problem}" for row in rows if row.problem]
    return "\n".join([*lines, "", *problems, *([""] if problems else []), NOTES]) + "\n"


def as_json(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """Write every number, unrounded: seconds, bytes, and shares of 1."""
    document = {"schema": SCHEMA, "machine": machine, "cases": [_document(row, rows) for row in rows]}
    return json.dumps(document, indent=1) + "\n"


def _document(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {
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
        found |= {
            "epoch_time_s": row.middle(EPOCH_TIME),
            "batch_time_s": row.middle(EPOCH_TIME) / row.timings[0].steps,
            "samples_per_second": row.middle(THROUGHPUT),
            "speed_up": speed_up(row, rows),
        }
    return found


def describe(machine: dict[str, Any]) -> str:
    """Say in a line what was measured with."""
    devices = ", ".join(machine["gpus"]) or f"{machine['cpu']}, {machine['cores']} cores"
    workload = " ".join(machine["options"])
    return (
        f"{devices}; torch {machine['torch']}, {machine['threads']} thread(s) a process, {machine['rounds']} round(s); "
        f"{workload}"
    )
