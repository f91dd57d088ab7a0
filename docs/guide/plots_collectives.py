"""Diagram for page 1: the values on each rank after a collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour-blind safe: Okabe and Ito (2008), https://jfly.uni-koeln.de/color/
COLOURS = ("#0072b2", "#d55e00", "#009e73")
RANKS = range(3)
# Per rank, the cells from left to right; per cell, the ranks whose values are summed in it.
PANELS = {
    "input": [[[r]] * 3 for r in RANKS],
    "broadcast from 1": [[[1]] * 3 for _ in RANKS],
    "all-reduce": [[[0, 1, 2]] * 3 for _ in RANKS],
    "all-gather": [[[r] for r in RANKS for _ in range(3)] for _ in RANKS],
    "reduce-scatter": [[[0, 1, 2] if column == r else [] for column in range(3)] for r in RANKS],
}


def draw(_data: None) -> Figure:
    """Draw one panel per collective with one row per rank."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(9.5, 2.4))
    for at, (title, rows) in zip(axes, PANELS.items(), strict=True):
        at.set_title(title, fontsize=11)
        for rank, cells in enumerate(rows):
            for column, sources in enumerate(cells):
                draw_cell(at, column / len(cells), 2 - rank, 1 / len(cells), sources)
        at.set(xlim=(-0.03, 1.03), ylim=(-0.1, 2.95), xticks=[])
        at.set_yticks([2.4, 1.4, 0.4], ["rank 0", "rank 1", "rank 2"] if at is axes[0] else [""] * 3)
        at.tick_params(length=0)
        at.grid(visible=False)
        at.spines[:].set_visible(False)
    figure.supxlabel("each cell is a part of a tensor; its colours are the ranks whose values are summed", fontsize=10)
    figure.tight_layout()
    return figure


def draw_cell(at: Axes, x: float, y: float, width: float, sources: list[int]) -> None:
    """Draw a cell with one stripe per source rank, or an empty frame without sources."""
    for index, source in enumerate(sources):
        height = 0.8 / len(sources)
        at.add_patch(Rectangle((x, y + index * height), width, height, facecolor=COLOURS[source], edgecolor="none"))
    at.add_patch(Rectangle((x, y), width, 0.8, fill=False, edgecolor="white" if sources else "#bbbbbb", linewidth=1.5))
