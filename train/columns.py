"""The columns of a table of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def align_columns(rows: Sequence[Sequence[str]], texts: int) -> list[list[str]]:
    """Return the cells by column, each padded to the width of its column.

    rows: the cells of each row. texts: number of first columns with text, which is on the left; numbers are on the
    right.
    """
    columns = []
    for index, cells in enumerate(zip(*rows, strict=True)):
        width = max(len(cell) for cell in cells)
        if index < texts:
            columns.append([cell.ljust(width) for cell in cells])
        else:
            columns.append([cell.rjust(width) for cell in cells])
    return columns


def join_columns(columns: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
