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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from train.bench.runs import Row

PIPE_WIDTH = 200  # columns, if stdout is not a terminal
SCHEMA = 1  # of the JSON document; removing a field increases it
TEXTS = 4  # columns of text, aligned to the left
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
    bases = [other for other in rows if other.case.name in REFERENCES and other.timings and other.model == row.model]
    if not bases or not row.timings:
        return None
    # Both runs of a round are affected by the same load on the machine; a case that fails is not repeated.
    pairs = zip(row.timings, bases[0].timings, strict=False)
    return statistics.median(own.samples_per_second / base.samples_per_second for own, base in pairs)


def format_row(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """Format the cells of a measured row."""
    speed_up = compute_speed_up(row, rows)
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
        "-" if speed_up is None else f"{speed_up:.2f}",
        f"{row.timings[-1].test_accuracy * 100:.1f}",
        f"{row.compute_median('peak_memory_bytes') / 1e6:.0f}",
        "/".join(f"{percent:.0f}" for percent in row.timings[-1].gpu_utilization) or "-",
    )


def as_text(rows: Sequence[Row], machine: dict[str, Any], width: int | None = None) -> str:
    """Format the table and, below the table, the problems. width: columns; None uses the width of the terminal."""
    # On a narrow terminal the table has several parts, and each part begins with the names of the cases.
    width = width or (shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH)
    lines = [HEAD, *(format_row(row, rows) for row in rows if row.timings)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    parts = [[0]]
    for i in range(1, len(HEAD)):
        if sum(widths[j] + 2 for j in parts[-1]) + widths[i] > width:
            parts.append([0])
        parts[-1].append(i)
    paragraphs = [textwrap.fill(format_machine(machine), width, break_on_hyphens=False)]
    for part in parts:
        cells = ([f"{line[i]:{'<' if i < TEXTS else '>'}{widths[i]}}" for i in part] for line in lines)
        paragraphs.append("\n".join("  ".join(line).rstrip() for line in cells))
    notes = [*(f"{row.case.name}: {row.problem}" for row in rows if row.problem), textwrap.fill(NOTES, width)]
    return "\n\n".join([*paragraphs, "\n".join(notes)]) + "\n"


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
