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
    text = ""
    for part in parts:
        text += "".join(f"{line.rstrip()}\n" for line in _lines(part))
    return logged(text)


def _lines(part: Part) -> Iterator[str]:
    indent = " " * part.indent
    if isinstance(part, Line):
        yield indent + "".join(span.text for span in part.spans)
    elif isinstance(part, Labels):
        widest = max(len(label) for label, _ in part.rows)
        for label, text in part.rows:
            if not isinstance(text, str):
                text = text.render(_WIDTH, ascii_only=True)
            yield f"{indent}{label:{widest}}  {text}"
    else:
        for line in _grid(part):
            yield indent + line


def _grid(grid: Grid) -> Iterator[str]:
    table: list[tuple[str, ...]] = [grid.columns]
    for row in grid.rows:
        table.append(tuple(cell.text for cell in row))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for texts in table:
        cells = []
        for name, cell, width in zip(grid.columns, texts, widths, strict=True):
            cells.append(cell.rjust(width) if name in grid.right else cell.ljust(width))
        yield "  ".join(cells)
