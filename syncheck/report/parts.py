"""What reports for people are made of, before it is known where they go: lines, tables, labelled sentences.

`plain` draws them for pipes and files, without rich; `terminal` draws them on a terminal, with it. Texts from files
are escaped here, once, and are never taken for markup by either.
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
    """A piece of text in one style, of rich's words: 'bold red'."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Line:
    """A line or paragraph. indent: columns. An empty one is a blank line."""

    spans: tuple[Span, ...] = ()
    indent: int = 0


@dataclass(frozen=True)
class Labels:
    """Sentences, or a curve, behind labels, the labels under each other."""

    rows: tuple[tuple[str, str | Sparkline], ...]
    indent: int = 0


@dataclass
class Grid:
    """A table. right: columns of numbers, aligned to the right."""

    columns: tuple[str, ...]
    right: tuple[str, ...] = ()
    indent: int = 0
    rows: list[tuple[Span, ...]] = field(default_factory=list)

    def add(self, *cells: str | Span, style: str = "") -> None:
        """Append a row; style is that of cells without their own."""
        self.rows.append(tuple(c if isinstance(c, Span) else Span(one_line(c), style) for c in cells))


Part = Line | Labels | Grid


def line(text: str, style: str = "", indent: int = 0) -> Line:
    """Return a line in one style."""
    return Line((Span(one_line(text), style),), indent)


def lines(texts: Sequence[str], style: str = "", indent: int = 0) -> list[Part]:
    """Return lines in one style."""
    return [line(text, style, indent) for text in texts]


BLANK = Line()
