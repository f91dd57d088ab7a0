"""Parts of a text report: lines, tables, labeled sentences and curves.

`plain` draws them for pipes and files without rich, `terminal` draws them with rich. Texts from files are escaped here,
and neither interprets them as markup.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncheck.text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

# Marks from small to large differences; separate marks for no difference and for an unknown difference.
_BLOCKS, _ASCII = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588", ".:-=+*#@"
_AGREES, _AGREES_ASCII, _UNKNOWN = "\u00b7", "_", "?"
# Columns of one point, of the narrowest and of the widest curve.
_CELL, _LEAST, _WIDEST = 4, 8, 100
# Ratio of largest to smallest difference from which the scale is logarithmic.
_LOG_RATIO = 100


@dataclass(frozen=True)
class Span:
    """Text with a style of rich: 'bold red'."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Line:
    """A line or paragraph. indent: columns. A Line without spans is a blank line."""

    spans: tuple[Span, ...] = ()
    indent: int = 0


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Labels:
    """A column of labels, each with a sentence or a curve."""

    rows: tuple[tuple[str, str | Sparkline], ...]
    indent: int = 0


@dataclass
class Grid:
    """A table. right: columns aligned to the right."""

    columns: tuple[str, ...]
    right: tuple[str, ...] = ()
    indent: int = 0
    rows: list[tuple[Span, ...]] = field(default_factory=list)

    def add(self, *cells: str | Span, style: str = "") -> None:
        """Append a row. style: of cells given as str."""
        self.rows.append(tuple(c if isinstance(c, Span) else Span(one_line(c), style) for c in cells))


Part = Line | Labels | Grid


def line(text: str, style: str = "", indent: int = 0) -> Line:
    """Return an escaped line in one style."""
    return Line((Span(one_line(text), style),), indent)


def lines(texts: Sequence[str], style: str = "", indent: int = 0) -> list[Part]:
    """Return escaped lines in one style."""
    return [line(text, style, indent) for text in texts]


BLANK = Line()


def _marks(values: Sequence[float | None], room: int, ascii_only: bool) -> str:
    levels, agrees = (_ASCII, _AGREES_ASCII) if ascii_only else (_BLOCKS, _AGREES)
    points = _downsample(values, room)
    known = [value for value in values if value]
    low, high = min(known, default=1.0), max(known, default=1.0)

    def mark(value: float | None) -> str:
        if not value:
            return _UNKNOWN if value is None else agrees
        share = value / high
        if _needs_log_scale(values):
            # The largest value has the highest mark, the smallest the lowest.
            share = (1 + 7 * (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))) / 8
        return levels[max(0, math.ceil(share * 8 - 1e-9) - 1)]

    return "".join(mark(value) * max(1, min(_CELL, room // len(points))) for value in points)


def _needs_log_scale(values: Sequence[float | None]) -> bool:
    known = [value for value in values if value]
    return max(known, default=0) > _LOG_RATIO * min(known, default=0)


def _downsample(values: Sequence[float | None], room: int) -> list[float | None]:
    """Return at most `room` values, each the maximum of adjacent values."""
    if len(values) <= room:
        return list(values)
    parts = [values[i * len(values) // room : (i + 1) * len(values) // room] for i in range(room)]
    return [max((value for value in part if value is not None), default=None) for part in parts]
