"""Draw a report for pipes and files, without wrapping, boxes, colors or cuts, to keep names searchable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.report.parts import Grid, Labels, Line
from syncheck.report.unbroken import unmark
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
        indent = " " * part.indent
        for line in _lines(part):
            text += f"{indent}{line}".rstrip() + "\n"
    return logged(text)


def _lines(part: Part) -> Iterator[str]:
    """Yield the lines of a part without its indent."""
    if isinstance(part, Line):
        yield part.text
    elif isinstance(part, Labels):
        yield from _labels(part)
    else:
        yield from _grid(part)


def _labels(labels: Labels) -> Iterator[str]:
    widest = len(max(dict(labels.rows), key=len))
    for label, text in labels.rows:
        if not isinstance(text, str):
            text = text.render(_WIDTH, ascii_only=True)
        yield f"{label:{widest}}  {unmark(text)}"


def _grid(grid: Grid) -> Iterator[str]:
    texts_of_columns = []
    for number, title in enumerate(grid.columns):
        texts = [title, *grid.list_texts(number)]
        width = len(max(texts, key=len))
        align = str.rjust if title in grid.right else str.ljust
        texts_of_columns.append([align(text, width) for text in texts])

    for cells in zip(*texts_of_columns, strict=True):
        yield "  ".join(cells)
