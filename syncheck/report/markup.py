"""Pieces of HTML that hold texts from files, all of them escaped."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any

from syncheck.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def text(value: str) -> str:
    """Return a text on one line with nothing in it that HTML obeys."""
    return escape(one_line(value))


def data(value: Any) -> str:
    """Return a JSON document for a script element, which no text inside it can end."""
    drawn = json.dumps(value, separators=(",", ":"), allow_nan=False)
    # Entities mean nothing inside a script element; JSON's own escapes do the same there.
    return drawn.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """Draw a table of plain texts. numbers: columns aligned to the right; the first column is set as a name."""
    classes = ["name" if i == 0 else "number" if column in numbers else "" for i, column in enumerate(columns)]
    # The classes of heads are of use to a script that fills the table.
    head = "".join(f'<th scope="col" class="{k}">{text(c)}</th>' for k, c in zip(classes, columns, strict=True))
    lines = [
        "<tr>" + "".join(f'<td class="{k}">{text(cell)}</td>' for k, cell in zip(classes, row, strict=True)) + "</tr>"
        for row in rows
    ]
    body = "\n".join(lines)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
