"""Elements of a report page: tables, definitions and paragraphs of HTML, from plain texts that they escape."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from syncheck.sentences import Part
from syncheck.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Definition(NamedTuple):
    """A label with its content in HTML. css_class: of the content."""

    label: str
    content: str
    css_class: str = "text"


def escape_line(value: str) -> str:
    """Return a text on one line, without HTML markup."""
    return escape(one_line(value))


def write(text: str, part: Part) -> str:
    """Write a part of a sentence, code as an element to which the script of the page adds a button that copies it."""
    escaped = escape_line(text)
    if part is Part.CODE:
        return f"<code>{escaped}</code>"
    return escaped


def breakable(name: str) -> str:
    """Return an escaped name that is wrapped after a dot or a slash."""
    return escape_line(name).replace(".", ".<wbr>").replace("/", "/<wbr>")


def break_paths(text: str) -> str:
    """Return an escaped text whose paths are wrapped after a folder."""
    # Not after the first slash of an absolute path.
    return re.sub(r"(?<=\w)/", "/<wbr>", escape_line(text))


# How the cells of a class are written.
_WRITERS = {"name": breakable}


def quote(name: str) -> str:
    """Return a name for the fragment of a URL, escaped."""
    from urllib.parse import quote

    return escape(quote(one_line(name), safe=""))


def paragraphs(texts: Iterable[str], css_class: str = "text") -> list[str]:
    """Return texts as paragraphs of a class."""
    return [f'<p class="{css_class}">{escape_line(text)}</p>' for text in texts]


def definitions(rows: Iterable[Definition]) -> str:
    """Return a list of labels with their contents."""
    lines = []
    for row in rows:
        lines.append(f'<dt>{escape_line(row.label)}</dt><dd class="{row.css_class}">{row.content}</dd>')
    return f"<dl>{''.join(lines)}</dl>"


def link_address(address: str) -> str:
    """Return a link to a page of the documentation, with the address as its text."""
    escaped = escape_line(address)
    return f'<a href="{escaped}">{escaped}</a>'


def open_part(name: str, title: str, *, is_open: bool = True, css_class: str = "part") -> str:
    """Return the start of a part of the page that can be folded. title: in HTML."""
    return f'<details class="{css_class}" id="{name}"{" open" * is_open}><summary><h2>{title}</h2></summary>'


def fold(title: str, content: str) -> str:
    """Return a folded part. content: in HTML."""
    return f"<details><summary>{title}</summary>\n{content}</details>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """Return a table of plain texts. numbers: columns aligned to the right; a first column of names is in monospace."""
    # page.js copies the classes of the header cells to added rows.
    class_of_column = {columns[0]: "name", **dict.fromkeys(numbers, "number")}
    classes = []
    head = ""
    for column in columns:
        css_class = class_of_column.get(column, "")
        classes.append(css_class)
        head += f'<th scope="col" class="{css_class}">{escape_line(column)}</th>'

    body = "\n".join(f"<tr>{_row(row, classes)}</tr>" for row in rows)
    # A region that scrolls needs the focus of the keyboard.
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="table: {escape_line(columns[0])}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _row(row: Sequence[str], classes: Sequence[str]) -> str:
    cells = []
    for css_class, cell in zip(classes, row, strict=True):
        write_cell = _WRITERS.get(css_class, escape_line)
        cells.append(f'<td class="{css_class}">{write_cell(cell)}</td>')
    return "".join(cells)
