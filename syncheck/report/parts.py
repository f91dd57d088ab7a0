"""Parts of a text report: lines, tables, labeled sentences and curves.

`plain` draws them for pipes and files without rich, `terminal` draws them with rich. Texts from files are escaped here,
and neither interprets them as markup.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import TYPE_CHECKING

from syncheck.frozen import mutable_record, record
from syncheck.text import logged, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

# Marks from small to large differences; separate marks for no difference and for an unknown difference.
_BLOCKS, _ASCII = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588", ".:-=+*#@"
_AGREES, _AGREES_ASCII, _UNKNOWN = "\u00b7", "_", "?"
# Columns of one point, of the narrowest and of the widest curve.
_CELL, _LEAST, _WIDEST = 4, 8, 100
# Ratio of largest to smallest difference from which the scale is logarithmic.
_LOG_RATIO = 100
# Less than the rounding error of a height.
_ROUNDING = 1e-9


@record
class Span:
    """Text with a style of rich: 'bold red'."""

    text: str
    style: str = ""


@record
class Line:
    """A line or paragraph. indent: columns. A Line without spans is a blank line."""

    spans: tuple[Span, ...] = ()
    indent: int = 0

    @property
    def text(self) -> str:
        """The text without styles and indent."""
        return "".join(span.text for span in self.spans)


@record
class Sparkline:
    """Differences over steps, with the texts before and after the curve. None is an unknown difference."""

    values: tuple[float | None, ...]
    before: str
    after: str

    def render(self, width: int, *, ascii_only: bool = False) -> str:
        """Return the line, at most `width` columns wide unless the curve would be narrower than eight columns."""
        scale = ", log scale" if _needs_log_scale(self.values) else ""
        room = width - len(self.before) - len(self.after) - len(scale) - 4
        marks = _marks(self.values, max(_LEAST, min(room, _WIDEST)), ascii_only)
        return f"{self.before} |{marks}| {self.after}{scale}"


@record
class Labels:
    """A column of labels, each with a sentence, which may be by `unbroken.write_unbroken`, or a curve."""

    rows: tuple[tuple[str, str | Sparkline], ...]
    indent: int = 0


@mutable_record
class Grid:
    """A table. right: columns aligned to the right."""

    columns: tuple[str, ...]
    right: tuple[str, ...] = ()
    indent: int = 0
    rows: list[tuple[Span, ...]] = field(default_factory=list)

    def add(self, *cells: str | Span, style: str = "") -> None:
        """Append a row. style: of cells given as str."""
        spans = []
        for cell in cells:
            if isinstance(cell, str):
                # Escaped before the columns are measured, because escapes are longer.
                cell = Span(logged(one_line(cell)), style)
            spans.append(cell)
        self.rows.append(tuple(spans))

    def list_texts(self, column: int) -> list[str]:
        """Return the texts of a column without its title. column: its number."""
        return [row[column].text for row in self.rows]


Part = Line | Labels | Grid


def line(text: str, style: str = "", indent: int = 0) -> Line:
    """Return an escaped line in one style."""
    return Line((Span(one_line(text), style),), indent)


def lines(texts: Sequence[str], style: str = "", indent: int = 0) -> list[Part]:
    """Return escaped lines in one style."""
    return [line(text, style, indent) for text in texts]


BLANK = Line()


def _marks(values: Sequence[float | None], room: int, ascii_only: bool) -> str:
    """Return a curve of at most `room` columns."""
    points = _downsample(values, room)
    repetitions = max(1, min(_CELL, room // len(points)))
    low, high = _find_range(points)
    levels = _ASCII if ascii_only else _BLOCKS
    no_difference = _AGREES_ASCII if ascii_only else _AGREES
    is_log_scale = _needs_log_scale(values)
    marks = ""
    for value in points:
        if value is None:
            mark = _UNKNOWN
        elif not value:
            mark = no_difference
        else:
            height = _log_height(value, low, high) if is_log_scale else value / high
            mark = levels[max(0, math.ceil(height * len(levels) - _ROUNDING) - 1)]
        marks += mark * repetitions

    return marks


def _log_height(value: float, low: float, high: float) -> float:
    """Return the height of a mark from 0 to 1. The largest value has the highest mark, the smallest the lowest."""
    share = (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
    return (1 + 7 * share) / 8


def _needs_log_scale(values: Sequence[float | None]) -> bool:
    low, high = _find_range(values)
    return high > _LOG_RATIO * low


def _find_range(values: Sequence[float | None]) -> tuple[float, float]:
    """Return the smallest and the largest difference; 1 and 1 if there is none."""
    differences = [value for value in values if value]
    return min(differences, default=1.0), max(differences, default=1.0)


def _downsample(values: Sequence[float | None], room: int) -> list[float | None]:
    """Return at most `room` values, each the maximum of adjacent values."""
    if len(values) <= room:
        return list(values)
    maxima = []
    for column in range(room):
        adjacent = values[column * len(values) // room : (column + 1) * len(values) // room]
        maxima.append(max((value for value in adjacent if value is not None), default=None))
    return maxima
