"""Listings for people: the contents of a checkpoint, the findings, one finding explained."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from syncheck.messages import names_text
from syncheck.report import words
from syncheck.report.parts import BLANK, Grid, Part, Span, line, lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def contents(listed: Mapping[str, Any]) -> list[Part]:
    """Return the parts of `syncheck show`. listed: what `contents.describe` returns."""
    numbers = ["bytes", "min", "max", "mean", "std"]
    # A column of zeros would take the room of names; the first line says it of all.
    finite = not any(row["nonfinite"] for row in listed["tensors"])
    numbers += [] if finite else ["nonfinite"]
    grid = Grid(("name", "kind", "dtype", "shape", *numbers), right=tuple(numbers))
    for row in listed["tensors"]:
        statistics = [_short(row[name]) for name in numbers[1:]]
        shape = "x".join(map(str, row["shape"])) or "scalar"
        size = "-" if row["bytes"] is None else str(row["bytes"])
        grid.add(row["name"], row["kind"], row["dtype"], row["refused"] or shape, size, *statistics)
    about = [
        f"{listed['path']}: {listed['format']}, {len(listed['tensors'])} tensors, {words.bytes_text(listed['bytes'])}"
    ]
    if finite and any(row["nonfinite"] == 0 for row in listed["tensors"]):
        about[0] += ", all numbers finite"
    if listed["metadata"]:
        about.append("metadata: " + ", ".join(f"{k} {v}" for k, v in listed["metadata"].items() if v is not None))
    elif listed["kinds_guessed"]:
        about.append("no metadata: which tensors are parameters and which buffers is guessed from their names")
    values = [f"{name} = {value!r}" for name, value in listed["values"].items()]
    if values:
        about.append(f"values: {names_text(values, 12)}")
    if listed["stubs"]:
        about.append("objects of unknown classes, kept inert: " + ", ".join(listed["stubs"]))
    return [*lines(about), BLANK, grid]


def _short(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


def rules(listed: Sequence[Any]) -> list[Part]:
    """Return one line for each finding that syncheck knows."""
    grid = Grid(("code", "finding", "severity", "says"))
    for found in listed:
        grid.add(found.CODE, Span(found.SLUG), found.SEVERITY, found.__doc__.partition("\n")[0])
    return [grid]


def rule(found: Any) -> list[Part]:
    """Return what a finding means, paragraph by paragraph: its module's docstring."""
    parts: list[Part] = [line(f"{found.CODE} {found.SLUG} ({found.SEVERITY})", "bold")]
    for paragraph in textwrap.dedent(found.__doc__).strip().split("\n\n"):
        parts += [BLANK, line(" ".join(paragraph.split("\n")))]
    return parts
