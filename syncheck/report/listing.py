"""Text output of `syncheck show` and `syncheck explain`: a checkpoint's contents, all findings, one finding."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from syncheck.messages import names_text
from syncheck.report import words
from syncheck.report.parts import BLANK, Grid, Part, Span, line, lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def list_contents(contents: Mapping[str, Any]) -> list[Part]:
    """Return the output of `syncheck show`. contents: the result of `contents.describe`."""
    numbers = ["bytes", "min", "max", "mean", "std"]
    # If all values are finite, the first line states it instead of a column of zeros.
    finite = not any(row["nonfinite"] for row in contents["tensors"])
    numbers += [] if finite else ["nonfinite"]
    grid = Grid(("name", "kind", "dtype", "shape", *numbers), right=tuple(numbers))
    for row in contents["tensors"]:
        statistics = [_number_cell(row[name]) for name in numbers[1:]]
        shape = "x".join(map(str, row["shape"])) or "scalar"
        size = "-" if row["bytes"] is None else str(row["bytes"])
        grid.add(row["name"], row["kind"], row["dtype"], row["refused"] or shape, size, *statistics)
    size = words.bytes_text(contents["bytes"])
    header = [f"{contents['path']}: {contents['format']}, {len(contents['tensors'])} tensors, {size}"]
    if finite and any(row["nonfinite"] == 0 for row in contents["tensors"]):
        header[0] += ", all values finite"
    if contents["metadata"]:
        header.append("metadata: " + ", ".join(f"{k} {v}" for k, v in contents["metadata"].items() if v is not None))
    elif contents["kinds_guessed"]:
        header.append("no metadata: parameters and buffers are distinguished by name")
    values = [f"{name} = {value!r}" for name, value in contents["values"].items()]
    if values:
        header.append(f"values: {names_text(values, 12)}")
    if contents["stubs"]:
        header.append("objects of unknown classes, not loaded: " + ", ".join(contents["stubs"]))
    return [*lines(header), BLANK, grid]


def _number_cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


def list_rules(rules: Sequence[Any]) -> list[Part]:
    """Return the table of all findings, one row per rule module."""
    grid = Grid(("code", "finding", "severity", "summary"))
    for rule in rules:
        grid.add(rule.CODE, Span(rule.SLUG), rule.SEVERITY, rule.__doc__.partition("\n")[0])
    return [grid]


def explain_rule(rule: Any) -> list[Part]:
    """Return the docstring of a rule module, one paragraph per line."""
    parts: list[Part] = [line(f"{rule.CODE} {rule.SLUG} ({rule.SEVERITY})", "bold")]
    for paragraph in textwrap.dedent(rule.__doc__).strip().split("\n\n"):
        parts += [BLANK, line(" ".join(paragraph.split("\n")))]
    return parts
