"""Formats the benchmark table for a terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from train.bench.cases import REFERENCES
from train.columns import align_columns, join_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from train.bench.runs import Row

# Columns, if stdout is not a terminal.
PIPE_WIDTH = 200
# The version of the JSON document; removing a field increases it.
SCHEMA = 1
# Columns of text, aligned to the left.
TEXTS = 4
HEAD = (
    *("case", "launcher", "model", "data", "processes", "start s", "total s", "epoch s", "steps", "step ms"),
    *("samples/s", "speed-up", "test %", "memory MB", "GPU %"),
)
NOTES = (
    "Medians over the rounds, without the first epoch of each run. start: time from the command to the first step. "
    "total: whole command, with start, all epochs and evaluation. steps: timed steps of all rounds. "
    "speed-up: samples/s divided by that of single with the same model in the same round. test %: accuracy at the end. "
    "memory: peak of a process, on its GPU if it has one. GPU %: utilization of each rank's GPU in the last round."
)


def compute_speed_up(row: Row, rows: Sequence[Row]) -> float | None:
    """Return the median over the rounds of the throughput relative to `single`; None if not measured."""
    for reference in rows:
        if reference.case.name in REFERENCES and reference.model == row.model:
            # Both runs of a round are affected by the same load on the machine; a case that fails is not repeated.
            ratios = []
            for timing, base in zip(row.timings, reference.timings, strict=False):
                ratios.append(timing.samples_per_second / base.samples_per_second)
            if ratios:
                return statistics.median(ratios)
    return None


def format_row(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """Format the cells of a measured row."""
    speed_up = compute_speed_up(row, rows)
    speed_up_text = "-"
    if speed_up is not None:
        speed_up_text = f"{speed_up:.2f}"
    return (
        row.case.name,
        row.case.launcher,
        row.model,
        row.data,
        str(row.processes),
        f"{row.compute_median('start_s'):.1f}",
        f"{row.compute_median('total_s'):.1f}",
        f"{row.compute_median('epoch_time_s'):.2f}",
        str(sum(timing.steps * len(timing.epoch_times_s) for timing in row.timings)),
        f"{1000 * row.compute_median('epoch_time_s') / row.timings[0].steps:.1f}",
        f"{row.compute_median('samples_per_second'):.1f}",
        speed_up_text,
        f"{row.timings[-1].test_accuracy * 100:.1f}",
        f"{row.compute_median('peak_memory_bytes') / 1e6:.0f}",
        "/".join(f"{percent:.0f}" for percent in row.timings[-1].gpu_utilization) or "-",
    )


def as_text(rows: Sequence[Row], machine: dict[str, Any], width: int | None = None) -> str:
    """Format the table and, below the table, the problems. width: columns; None uses the width of the terminal."""
    # On a narrow terminal the table has several parts, and each part begins with the names of the cases.
    if width is None:
        width = PIPE_WIDTH
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns
    columns = align_columns([HEAD, *(format_row(row, rows) for row in rows if row.timings)], TEXTS)
    paragraphs = [textwrap.fill(format_machine(machine), width, break_on_hyphens=False)]
    part, part_width = [columns[0]], len(columns[0][0])
    for column in columns[1:]:
        column_width = 2 + len(column[0])
        if part_width + column_width > width:
            paragraphs.append("\n".join(join_columns(part)))
            part, part_width = [columns[0]], len(columns[0][0])
        part.append(column)
        part_width += column_width
    paragraphs.append("\n".join(join_columns(part)))
    notes = [f"{row.case.name}: {row.problem}" for row in rows if row.problem]
    notes.append(textwrap.fill(NOTES, width))
    paragraphs.append("\n".join(notes))
    return "\n\n".join(paragraphs) + "\n"


def as_markdown(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """Format the table for a README or a pull request."""
    rule = "---|" * TEXTS + "---:|" * (len(HEAD) - TEXTS)
    lines = [format_machine(machine), "", f"| {' | '.join(HEAD)} |", f"|{rule}"]
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
        "nodes": row.case.nodes,
        "model": row.model or None,
        "data": row.data or None,
        "processes": row.processes,
        "problem": row.problem or None,
        "runs": [asdict(timing) for timing in row.timings],
    }
    if row.timings:
        fields |= {
            "total_s": row.compute_median("total_s"),
            "epoch_time_s": row.compute_median("epoch_time_s"),
            "batch_time_s": row.compute_median("epoch_time_s") / row.timings[0].steps,
            "samples_per_second": row.compute_median("samples_per_second"),
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
