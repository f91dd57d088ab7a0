"""Listings for people: the contents of a checkpoint, the findings, one finding explained."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from rich.text import Text

from syncheck.errors import one_line
from syncheck.report import words
from syncheck.report.text import table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType


def contents(listed: Mapping[str, Any], boxed: bool) -> list[RenderableType]:
    """Return the parts of `syncheck show`. listed: what `contents.describe` returns."""
    numbers = ("bytes", "min", "max", "mean", "std", "nonfinite")
    made = table(("name", "kind", "dtype", "shape", *numbers), boxed, right=numbers)
    for row in listed["tensors"]:
        cells = [row["refused"] or "", "", "", "", ""] if row["refused"] else [_short(row[n]) for n in numbers[1:]]
        shape = "x".join(map(str, row["shape"])) or "scalar"
        size = "-" if row["bytes"] is None else str(row["bytes"])
        made.add_row(
            Text(one_line(row["name"])),
            row["kind"],
            row["dtype"],
            shape,
            size,
            *(Text(one_line(c)) for c in cells),
        )
    lines = [
        f"{listed['path']}: {listed['format']}, {len(listed['tensors'])} tensors, {words.bytes_text(listed['bytes'])}"
    ]
    if listed["metadata"]:
        lines.append("metadata: " + ", ".join(f"{k} {v}" for k, v in listed["metadata"].items() if v is not None))
    elif listed["kinds_guessed"]:
        lines.append("no metadata: which tensors are parameters and which buffers is guessed from their names")
    values = [f"{name} = {value!r}" for name, value in listed["values"].items()]
    if values:
        more = f" and {len(values) - 12} more" if len(values) > 12 else ""
        lines.append("values: " + ", ".join(values[:12]) + more)
    if listed["stubs"]:
        lines.append("objects of unknown classes, kept inert: " + ", ".join(listed["stubs"]))
    return [*(Text(one_line(line)) for line in lines), Text(""), made]


def _short(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


def rules(listed: Sequence[Any], boxed: bool) -> list[RenderableType]:
    """Return one line for each finding that syncheck knows."""
    made = table(("code", "finding", "severity", "says"), boxed)
    for rule in listed:
        made.add_row(rule.CODE, rule.SLUG, rule.SEVERITY, Text(inspect.cleandoc(rule.__doc__).partition("\n")[0]))
    return [made]


def rule(found: Any) -> list[RenderableType]:
    """Return what a finding means, paragraph by paragraph: its module's docstring."""
    title = Text(f"{found.CODE} {found.SLUG} ({found.SEVERITY})\n", style="bold")
    paragraphs = inspect.cleandoc(found.__doc__).split("\n\n")
    return [title, *(Text(" ".join(paragraph.split("\n")) + "\n") for paragraph in paragraphs)]
