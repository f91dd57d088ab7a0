"""The part of the HTML page that tells how many elements of a tensor are how far apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.records import DECADES
from syncheck.report import words
from syncheck.report.markup import table, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Group, Histogram

# The powers of ten between the bins.
POWERS = (*DECADES, DECADES.stop)
_CAPTION = (
    "Share of the tensor's elements by how far apart they are: against the majority, and where there is none, between "
    "the two ranks that lie farthest apart."
)


def used(found: Sequence[Histogram]) -> range:
    """Return the bins from the first to the last in which any histogram has an element; at least one."""
    places = [i for one in found for i, count in enumerate(one.counts) if count] or [0]
    return range(min(places), max(places) + 1)


def draw(group: Group, *, charts: bool) -> list[str]:
    """Return the parts of the page for the tensors of a group that have a histogram, worst first; none without any.

    charts: with a drawing, in which the page's script shows what the reader chooses; that takes matplotlib.
    """
    told = [(diff, diff.histogram) for diff in words.listed(group) if diff.histogram is not None]
    if not told:
        return []
    found = [histogram for _, histogram in told]
    parts = ["<h3>How far apart the elements are</h3>", '<div class="histograms">']
    rows, bins = [], used(found)
    for diff, one in told:
        differing, absolute, *_ = words.gap_cells(diff)
        counts = [one.equal, *(one.counts[i] for i in bins), one.not_finite]
        rows.append((diff.name, differing, absolute, *map(str, counts)))
    if charts:
        from syncheck.report.charts import histograms

        parted = any(one.elements < diff.numel for diff, one in told)
        caption = _CAPTION + " Of very large tensors evenly spread parts were looked at." * parted
        parts.append(f'<p class="said">{text(said(*rows[0][:3]))}</p>')
        parts.append(f"<figure>{histograms(found)}<figcaption>{text(caption)}</figcaption></figure>")
    columns = ("tensor", "differing", "max abs", "equal", *map(label, bins), "not finite")
    numbers = table(columns, rows, numbers=columns[2:])
    what = f"The numbers of {len(rows)} tensors" if len(rows) > 1 else "The numbers"
    return [*parts, f"<details><summary>{what}</summary>\n{numbers}</details>", "</div>"]


def said(name: str, differing: str, absolute: str) -> str:
    """Return the line over a drawing. The script of the page makes the same."""
    return f"{name}: elements that differ: {differing}; largest gap: {absolute}"


def label(place: int) -> str:
    """Name a bin: '< 1e-12', '1e-3 to 1e-2', '>= 1e6'."""
    if place == 0:
        return f"< 1e{POWERS[0]}"
    return f"1e{POWERS[place - 1]} to 1e{POWERS[place]}" if place < len(POWERS) else f">= 1e{POWERS[-1]}"
