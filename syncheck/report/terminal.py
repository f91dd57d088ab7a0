"""Draw a report on a terminal with rich: wrapped to its width, tables ruled, nothing cut."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from syncheck.errors import logged
from syncheck.report.parts import Grid, Labels, Line, Span

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import ConsoleOptions, RenderableType, RenderResult
    from rich.measure import Measurement

    from syncheck.report.parts import Part
    from syncheck.report.sparkline import Sparkline

# Wider than any line: coloured output that goes to a pipe is not wrapped.
_UNWRAPPED = 100_000
# Columns whose cells are never broken, beside those of numbers.
_WHOLE = ("verdict", "kind")
# Columns whose cells are broken only where they are longer than this: '0 | 1 | 2 | 3'.
_SHORT, _ENOUGH = ("ranks", "differing"), 13
# A name may take so many lines of its column; a longer one has a line of its own above its row.
_LINES = 2
# Of the tensor that a row names beside its run.
_NAME = 32
# Stands in a cell for a name that is drawn above: a private character, which no name has (they are escaped).
_ABOVE = "\uf8ff"
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
        if width is not None and isinstance(part, Grid):
            _print_table(console, part, ascii_only)
        else:
            console.print(drawn(part, ruled=width is not None, ascii_only=ascii_only))
    return logged("\n".join(line if color else line.rstrip() for line in out.getvalue().split("\n")))


def _print_table(console: Console, grid: Grid, ascii_only: bool) -> None:
    """Print a table, with names above their rows where its first column leaves them less than two lines' room."""
    room, margin = console.width - grid.indent, Segment(" " * grid.indent)
    asked, names = _asked(console, grid, room, _least(grid)), None
    if not asked:
        _print_name(console, Span(grid.columns[0], "bold"), grid.indent)
        whole = grid.rows
        names = iter(whole)
        rows = [(Span(_ABOVE), *row[1:]) for row in grid.rows]
        grid = Grid((" " * len(_ABOVE), *grid.columns[1:]), grid.right, grid.indent, rows)
        asked = _asked(console, grid, room)
        if not asked and grid.columns[1] == "kind":
            names = iter([(Span(f"{row[0].text}  {row[1].text}"), *row[1:]) for row in whole])
            rows = [(row[0], *row[2:]) for row in rows]
            grid = Grid((grid.columns[0], *grid.columns[2:]), grid.right, grid.indent, rows)
            asked = _asked(console, grid, room)
        asked = asked or room
    table = _table(grid, True, ascii_only, least=_least(grid))
    last = None
    for segments in Segment.split_lines(console.render(table, console.options.update(width=asked))):
        if names and any(_ABOVE in segment.text for segment in segments):
            name = next(names)[0]
            # Of a run's rows the first one names it.
            if name != last:
                _print_name(console, name, grid.indent)
            last = name
        shown = [Segment(segment.text.replace(_ABOVE, " "), segment.style) for segment in segments]
        console.print(Segments([margin, *shown, Segment.line()]), crop=False)


def _print_name(console: Console, name: Span, indent: int) -> None:
    console.print(Padding(Text(name.text, style=name.style, overflow="fold"), (0, 0, 0, indent)))


def _least(grid: Grid, place: int = 0) -> int:
    """Return the width that a column needs, so that no name in it takes more lines than it may.

    The name of a run, which has no parts as that of a tensor has, is broken at spaces only.
    """
    if grid.columns[place] == "run":
        return max((_longest_word(row[place].text) for row in grid.rows), default=0)
    return max((-(-cell_len(row[place].text) // _LINES) for row in grid.rows), default=0)


def _asked(console: Console, grid: Grid, room: int, least: int = 0) -> int:
    """Return the width to ask for so that a table fits into this one, or 0 where none is found.

    Rich makes room first and then gives columns their least width: what then stands out on the right would be cut.
    """
    # Columns are as wide as their widest cell and word want, so that other rows need not be drawn to see it.
    rows: dict[int, tuple[Span, ...]] = {}
    for place in range(len(grid.columns)):
        for size in (cell_len, _longest_word):
            rows |= dict([max(enumerate(grid.rows), key=lambda row: size(row[1][place].text))] if grid.rows else [])
    table = _table(Grid(grid.columns, grid.right, rows=list(rows.values())), True, True, least)
    for asked in range(room, room // 2, -1):
        text = "".join(segment.text for segment in console.render(table, console.options.update(width=asked)))
        if max(map(cell_len, text.split("\n"))) <= room:
            return asked
    return 0


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


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


def _table(grid: Grid, ruled: bool, ascii_only: bool, least: int = 0) -> Table:
    # Two columns between cells: every one counts on a terminal of 80.
    padding = (0, 1, 0, 0) if ruled else (0, 2, 0, 0)
    lines = _ASCII_RULE if ascii_only else box.SIMPLE_HEAD
    made = Table(box=lines if ruled else None, padding=padding, pad_edge=False, show_edge=False, header_style="bold")
    for place, column in enumerate(grid.columns):
        # A header of one word is never broken, nor are numbers, verdicts and kinds.
        widest = _longest_word(column)
        if column in (*_WHOLE, *_SHORT, *grid.right):
            most = max([len(column), *(cell_len(row[place].text) for row in grid.rows)])
            widest = min(most, _ENOUGH) if column in _SHORT else most
        elif place and column == "tensor":
            widest = min(_LINES * _least(grid, place), _NAME)
        made.add_column(
            column,
            overflow="fold",
            justify="right" if column in grid.right else "left",
            no_wrap=not ruled,
            min_width=max(widest, 0 if place else least),
        )
    for row in grid.rows:
        cells = zip(grid.columns, row, strict=True)
        made.add_row(*(_Name(cell) if column == "tensor" else _text(cell) for column, cell in cells))
    return made


def _text(cell: Span) -> Text:
    return Text(cell.text, style=cell.style)


class _Name:
    """A tensor's name, broken behind a dot where its column leaves it less than a line: 'layer1.0.bn1.', 'weight'."""

    def __init__(self, cell: Span) -> None:
        self.cell = cell

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return _text(self.cell).__rich_measure__(console, options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        name, width = self.cell.text, options.max_width
        parts: list[str] = []
        while cell_len(name) > width and (place := name.rfind(".", 0, width) + 1):
            parts.append(name[:place])
            name = name[place:]
        # Where that takes more lines than breaking anywhere would, names are broken anywhere.
        broken = "\n".join([*parts, name]) if len(parts) < _LINES and cell_len(name) <= width else self.cell.text
        yield Text(broken, style=self.cell.style)
