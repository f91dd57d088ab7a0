"""The table of a group's tensors: its worst rows as HTML, the others as data that the page's script shows by pages."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from syncheck.errors import one_line
from syncheck.report import words
from syncheck.report.markup import data, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Group, TensorDiff

COLUMNS = ("tensor", "kind", "ranks", "differing", "max abs", "max rel", "max ulp")

# Rows that a reader without JavaScript sees.
MOST_ROWS = 500
# Rows of all tables of a page together, about 100 bytes each; the JSON document has them all.
MOST_DATA = 100_000


def script() -> str:
    """Return the script that sorts, filters and turns the pages of the tables."""
    return resources.files(__package__).joinpath("page.js").read_text(encoding="utf-8")


def draw(group: Group, most_data: int = MOST_DATA) -> list[str]:
    """Return the parts of the page that list a group's tensors, worst first; none where there are none."""
    listed = words.listed(group)
    if not listed:
        return []
    shown, more = listed[:MOST_ROWS], listed[MOST_ROWS : MOST_ROWS + most_data]
    parts = ["<h3>Tensors that are not identical</h3>", '<div class="tensors">']
    parts.append(table(COLUMNS, [_cells(diff) for diff in shown], numbers=COLUMNS[4:]))
    if more:
        parts.append(f'<script type="application/json">{_data(more)}</script>')
        parts.append(f'<p class="note unscripted">... and {len(listed) - MOST_ROWS} more, which need JavaScript.</p>')
    if len(listed) > len(shown) + len(more):
        left_out = len(listed) - len(shown) - len(more)
        parts.append(f'<p class="note">{left_out} more are not on this page; the JSON report has all.</p>')
    return [*parts, "</div>"]


def _cells(diff: TensorDiff) -> tuple[str, ...]:
    return diff.name, diff.kind, words.clusters_text(diff), *words.gap_cells(diff)


def _data(diffs: Sequence[TensorDiff]) -> str:
    """Write the rows as names and, for the other cells, places in a list of texts: few of those are unlike."""
    texts: dict[str, int] = {}
    rows = [
        [one_line(name), *(texts.setdefault(one_line(cell), len(texts)) for cell in cells)]
        for name, *cells in map(_cells, diffs)
    ]
    return data({"texts": list(texts), "rows": rows})
