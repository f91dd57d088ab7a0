"""Draw a report on a terminal with rich, wrapped to its width without cutting names or numbers."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.control import Control
from rich.padding import Padding
from rich.segment import ControlType, Segment, Segments
from rich.table import Table
from rich.text import Text

from syncheck.report.parts import Grid, Labels, Line, Span
from syncheck.report.unbroken import fit, unmark
from syncheck.text import logged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import ConsoleOptions, RenderableType, RenderResult
    from rich.measure import Measurement

    from syncheck.report.parts import Part, Sparkline

# Colored output to a pipe is not wrapped.
_UNWRAPPED = 100_000
# Columns, besides numbers, whose cells are never wrapped.
_NEVER_WRAPPED = ("verdict", "kind")
# Columns whose cells are wrapped only if they are longer than '0 | 1 | 2 | 3'.
_RARELY_WRAPPED, _MIN_WRAP_WIDTH = ("ranks", "differing"), 13
# Names longer than this number of lines are printed on a separate line above their row.
_MOST_LINES = 2
# Largest minimum width of a tensor column beside a run column.
_TENSOR_WIDTH = 32
# Marks the cell of a name printed above its row. A private character cannot occur in a name, where it is escaped.
_PLACEHOLDER = "\uf8ff"
_ASCII_RULE = box.Box(str(box.SIMPLE_HEAD).replace("\u2500", "-"), ascii=True)


def render(parts: Iterable[Part], width: int | None, color: bool, *, ascii_only: bool = False) -> str:
    """Return the text. width: columns of the terminal, None without a terminal. color: whether to add ANSI codes.

    ascii_only: draw tables and curves with ASCII characters.
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
            console.print(make_renderable(part, ruled=width is not None, ascii_only=ascii_only))

    lines = out.getvalue().split("\n")
    if not color:
        lines = [line.rstrip() for line in lines]

    return logged("\n".join(lines))


def start_line(console: Console) -> None:
    """Go to the start of a line without text: a progress bar, or a text without end, stays in the line before.

    Nobody knows the column of the cursor. Spaces for one line end in the same line if it is the first column, else in
    the next line; zsh starts its prompt in this way. Does nothing in a file.
    """
    # A variable of the environment may demand colors in a file, and a script may replace stderr by any object.
    is_terminal = getattr(console.file, "isatty", bool)
    if is_terminal() and not console.is_dumb_terminal:
        console.print(Segments([Segment(" " * console.width)]), end="")
        console.control(Control(ControlType.CARRIAGE_RETURN))


def _print_table(console: Console, grid: Grid, ascii_only: bool) -> None:
    """Print a table, with names above their rows if the first column is too narrow for them."""
    # Rich would cut a table that is wider than the terminal.
    layout = _choose_layout(console, grid)
    if layout.grid is not grid:
        _print_name(console, Span(grid.columns[0], "bold"), grid.indent)

    table = _table(layout.grid, True, ascii_only, min_name_width=_min_width(layout.grid))
    options = console.options.update(width=layout.width)
    names = iter(layout.names)
    previous = None
    for segments in Segment.split_lines(console.render(table, options)):
        line = [Segment(" " * grid.indent)]
        for segment in segments:
            if _PLACEHOLDER in segment.text:
                name = next(names)
                # Print the name of a run once, above its first row.
                if name != previous:
                    _print_name(console, name, grid.indent)
                previous = name
                segment = Segment(segment.text.replace(_PLACEHOLDER, " "), segment.style)
            line.append(segment)
        console.print(Segments([*line, Segment.line()]), crop=False)


class _Layout(NamedTuple):
    """How to print a table on a terminal."""

    grid: Grid
    width: int
    """Columns to request from rich."""
    names: list[Span]
    """The names to print above the rows; empty if the table has room for them."""


def _choose_layout(console: Console, grid: Grid) -> _Layout:
    """Return the layout of a table: itself if it fits, else with names above the rows, else also with kinds there."""
    room = console.width - grid.indent
    width = _find_width(console, grid, room, _min_width(grid))
    if width:
        return _Layout(grid, width, [])

    names = [row[0] for row in grid.rows]
    narrow_grid = _without_first_columns(grid, 1)
    width = _find_width(console, narrow_grid, room)
    # Kinds are words of a few letters, so a name and its kind fit on a line.
    if not width and grid.columns[1] == "kind":
        names = [Span(f"{row[0].text}  {row[1].text}") for row in grid.rows]
        narrow_grid = _without_first_columns(grid, 2)
        width = _find_width(console, narrow_grid, room)

    return _Layout(narrow_grid, width or room, names)


def _without_first_columns(grid: Grid, count: int) -> Grid:
    """Return a table with a placeholder for its first columns. count: number of first columns."""
    # As wide as the placeholder.
    columns = (" ", *grid.columns[count:])
    rows = [(Span(_PLACEHOLDER), *row[count:]) for row in grid.rows]
    return Grid(
        columns,
        right=grid.right,
        indent=grid.indent,
        rows=rows,
    )


def _print_name(console: Console, name: Span, indent: int) -> None:
    console.print(Padding(Text(name.text, style=name.style, overflow="fold"), (0, 0, 0, indent)))


def _min_width(grid: Grid, column: int = 0) -> int:
    """Return the minimum width of a column of names for at most _MOST_LINES lines per name.

    Names of tensors may be broken anywhere, names of runs at spaces only.
    """
    texts = grid.list_texts(column)
    if grid.columns[column] == "run":
        return _longest_word(" ".join(texts))
    return math.ceil(_longest(texts) / _MOST_LINES)


def _find_width(console: Console, grid: Grid, room: int, min_name_width: int = 0) -> int:
    """Return the width to request from rich for a table in `room` columns, or 0 if the table does not fit.

    Rich distributes the requested width first and applies minimum column widths afterwards, so a table may become
    wider than requested, and its right part would be cut.
    """
    # Drawing the rows that determine the width is enough.
    longest = Grid(grid.columns, grid.right, rows=_longest_rows(grid))
    table = _table(longest, True, True, min_name_width)
    for width in range(room, room // 2, -1):
        segments = console.render(table, console.options.update(width=width))
        text = "".join(segment.text for segment in segments)
        if _longest(text.split("\n")) <= room:
            return width

    return 0


def _longest_rows(grid: Grid) -> list[tuple[Span, ...]]:
    """Return the rows with the longest cell or the longest word of a column."""
    if not grid.rows:
        return []

    rows: dict[int, tuple[Span, ...]] = {}
    for column in range(len(grid.columns)):
        texts = grid.list_texts(column)
        for measure in (cell_len, _longest_word):
            number = texts.index(max(texts, key=measure))
            rows[number] = grid.rows[number]

    return list(rows.values())


def _longest(texts: Iterable[str]) -> int:
    """Return the number of columns of the longest text. Wide characters take two columns."""
    return cell_len(max(texts, key=cell_len, default=""))


def _longest_word(text: str) -> int:
    return _longest(text.split())


def make_renderable(part: Part, ruled: bool = True, *, ascii_only: bool = False) -> RenderableType:
    """Convert a part into a rich renderable. ruled: draw a line under a table's header."""
    renderable: RenderableType
    if isinstance(part, Line):
        renderable = Text.assemble(*[(span.text, span.style) for span in part.spans])
    elif isinstance(part, Labels):
        renderable = _labels(part, ascii_only)
    else:
        renderable = _table(part, ruled, ascii_only)
    if not part.indent:
        return renderable

    return Padding(renderable, (0, 0, 0, part.indent), expand=False)


def _labels(labels: Labels, ascii_only: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in labels.rows:
        if isinstance(text, str):
            table.add_row(label, _Sentence(text))
        else:
            table.add_row(label, _Curve(text, ascii_only))

    return table


class _Sentence:
    """A sentence whose code is on one line: if the rest of a line has no room for it, it starts the next line."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Text(unmark(self.text)).__rich_measure__(console, options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sentence = Text(fit(self.text, options.max_width))
        for line in sentence.wrap(console, options.max_width, overflow="fold"):
            yield Text(unmark(line.plain))


class _Curve:
    """A curve with the remaining width of the terminal."""

    def __init__(self, line: Sparkline, ascii_only: bool) -> None:
        self.line, self.ascii_only = line, ascii_only

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.line.render(options.max_width, ascii_only=self.ascii_only))


def _table(grid: Grid, ruled: bool, ascii_only: bool, min_name_width: int = 0) -> Table:
    table = Table(
        pad_edge=False,
        show_edge=False,
        header_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
    )
    if ruled:
        table.box = _ASCII_RULE if ascii_only else box.SIMPLE_HEAD
        # Narrow padding saves space on a terminal of 80 columns.
        table.padding = (0, 1, 0, 0)

    for number, title in enumerate(grid.columns):
        min_width = _min_column_width(grid, number)
        if number == 0:
            min_width = max(min_width, min_name_width)
        table.add_column(
            title,
            overflow="fold",
            justify="right" if title in grid.right else "left",
            no_wrap=not ruled,
            min_width=min_width,
        )

    for row in grid.rows:
        cells: list[RenderableType] = []
        for title, cell in zip(grid.columns, row, strict=True):
            draw = _DRAWN_CELLS.get(title, _text)
            cells.append(draw(cell))
        table.add_row(*cells)

    return table


def _min_column_width(grid: Grid, number: int) -> int:
    """Return the minimum width of a column. Words of headers, numbers, verdicts and kinds are never broken."""
    title = grid.columns[number]
    if title in (*_NEVER_WRAPPED, *grid.right):
        return _longest_cell(grid, number)
    if title in _RARELY_WRAPPED:
        return min(_longest_cell(grid, number), _MIN_WRAP_WIDTH)
    if number and title == "tensor":
        return min(_MOST_LINES * _min_width(grid, number), _TENSOR_WIDTH)

    return _longest_word(title)


def _longest_cell(grid: Grid, number: int) -> int:
    return _longest([grid.columns[number], *grid.list_texts(number)])


def _text(cell: Span) -> Text:
    return Text(cell.text, style=cell.style)


class _TensorName:
    """A tensor's name, which is broken after a dot if it is too long: 'layer1.0.bn1.', 'weight'."""

    def __init__(self, cell: Span) -> None:
        self.cell = cell

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return _text(self.cell).__rich_measure__(console, options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        name, width = self.cell.text, options.max_width
        parts: list[str] = []
        while cell_len(name) > width and (end := name.rfind(".", 0, width) + 1):
            parts.append(name[:end])
            name = name[end:]

        # If breaking after dots takes too many lines, rich breaks the name anywhere.
        fits = len(parts) < _MOST_LINES and cell_len(name) <= width
        broken = "\n".join([*parts, name]) if fits else self.cell.text
        yield Text(broken, style=self.cell.style)


# How cells are drawn in columns that need more than their text.
_DRAWN_CELLS: dict[str, Callable[[Span], RenderableType]] = {"tensor": _TensorName}
