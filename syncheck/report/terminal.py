"""Draw a report on a terminal with rich: wrapped to its width, tables ruled, nothing cut."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from syncheck.errors import logged
from syncheck.report.parts import Grid, Labels, Line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import ConsoleOptions, RenderableType, RenderResult

    from syncheck.report.parts import Part
    from syncheck.report.sparkline import Sparkline

# Wider than any line: coloured output that goes to a pipe is not wrapped.
_UNWRAPPED = 100_000
# A column whose cells are never broken.
_WHOLE = "verdict"
_ASCII_RULE = box.Box(str(box.SIMPLE_HEAD).replace("\u2500", "-"), ascii=True)


def render(parts: Iterable[Part], width: int | None, color: bool, *, ascii_only: bool = False) -> str:
    """Return the text. width: columns of the terminal, None outside one. color: with ANSI codes.

    ascii_only: draw tables and curves with what every terminal has.
    """
    out = io.StringIO()
    console = Console(
        file=out,
        width=width or _UNWRAPPED,
        force_terminal=color,
        color_system="truecolor" if color else None,
        no_color=not color,
        highlight=False,
        legacy_windows=False,
    )
    for part in parts:
        made = drawn(part, ruled=width is not None, ascii_only=ascii_only)
        narrow = width is not None and isinstance(part, Grid) and _WHOLE in part.columns
        console.print(made, width=_asked(console, made) if narrow else None)
    return logged("\n".join(line if color else line.rstrip() for line in out.getvalue().split("\n")))


def _asked(console: Console, made: RenderableType) -> int:
    """Return the width to ask for so that a table fits: rich makes room first and then gives columns their least width.

    What then stands out on the right would be cut.
    """
    for asked in range(console.width, console.width // 2, -1):
        text = "".join(segment.text for segment in console.render(made, console.options.update(width=asked)))
        if max(map(cell_len, text.split("\n"))) <= console.width:
            return asked
    return console.width


def drawn(part: Part, ruled: bool = True, *, ascii_only: bool = False) -> RenderableType:
    """Return what rich prints for a part. ruled: whether a line stands under a table's header."""
    if isinstance(part, Line):
        made: RenderableType = Text.assemble(*((span.text, span.style) for span in part.spans))
    elif isinstance(part, Labels):
        made = Table.grid(padding=(0, 2))
        made.add_column(style="dim", no_wrap=True)
        made.add_column(overflow="fold")
        for label, text in part.rows:
            made.add_row(label, Text(text) if isinstance(text, str) else _Curve(text, ascii_only))
    else:
        made = _table(part, ruled, ascii_only)
    return Padding(made, (0, 0, 0, part.indent), expand=False) if part.indent else made


class _Curve:
    """A curve as wide as the terminal leaves it; rich itself draws progress, not curves."""

    def __init__(self, line: Sparkline, ascii_only: bool) -> None:
        self.line, self.ascii_only = line, ascii_only

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.line.drawn(options.max_width, ascii_only=self.ascii_only))


def _table(grid: Grid, ruled: bool, ascii_only: bool) -> Table:
    # Two columns between cells: every one counts on a terminal of 80.
    padding = (0, 1, 0, 0) if ruled else (0, 2, 0, 0)
    lines = _ASCII_RULE if ascii_only else box.SIMPLE_HEAD
    made = Table(box=lines if ruled else None, padding=padding, pad_edge=False, show_edge=False, header_style="bold")
    for place, column in enumerate(grid.columns):
        # A header of one word is never broken, nor is a verdict.
        widest = max((len(row[place].text) for row in grid.rows), default=0) if column == _WHOLE else len(column)
        made.add_column(
            column,
            overflow="fold",
            justify="right" if column in grid.right else "left",
            no_wrap=not ruled,
            min_width=None if " " in column else max(widest, len(column)),
        )
    for row in grid.rows:
        made.add_row(*(Text(cell.text, style=cell.style) for cell in row))
    return made
