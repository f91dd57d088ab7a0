"""Parts of a text report: lines, tables and labeled sentences.

`plain` draws them for pipes and files without rich, `terminal` draws them with rich. Texts from files are escaped here,
and neither interprets them as markup.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncheck.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.report.sparkline import Sparkline


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
