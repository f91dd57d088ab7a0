"""Draw a report for pipes and files, without wrapping, boxes, colors or cuts, to keep names searchable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.report.parts import Grid, Labels, Line
from syncheck.text import logged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from syncheck.report.parts import Part

# Columns of a curve.
_WIDTH = 100


def render(parts: Iterable[Part]) -> str:
    """Return the text, ending in a newline."""
    return logged("".join(f"{line.rstrip()}\n" for part in parts for line in _lines(part)))


def _lines(part: Part) -> Iterator[str]:
    indent = " " * part.indent
    if isinstance(part, Line):
        yield indent + "".join(span.text for span in part.spans)
    elif isinstance(part, Labels):
        widest = max(len(label) for label, _ in part.rows)
        for label, text in part.rows:
            value = text if isinstance(text, str) else text.render(_WIDTH, ascii_only=True)
            yield f"{indent}{label:{widest}}  {value}"
    else:
        yield from (indent + line for line in _grid(part))


def _grid(grid: Grid) -> Iterator[str]:
    table = [grid.columns, *(tuple(cell.text for cell in row) for row in grid.rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(
            cell.rjust(width) if name in grid.right else cell.ljust(width)
            for name, cell, width in zip(grid.columns, row, widths, strict=True)
        )
