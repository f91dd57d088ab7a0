"""Format tables for options such as --list-faults."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows in columns, one line per row. On a terminal the last column is wrapped."""
    *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for *cells, last in rows:
        lines.append("  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), last]))
    if sys.stdout.isatty():
        columns, indent = shutil.get_terminal_size().columns, " " * sum(width + 2 for width in widths)
        lines = [textwrap.fill(line, max(columns, 60), subsequent_indent=indent) for line in lines]
    return "\n".join(lines) + "\n"
