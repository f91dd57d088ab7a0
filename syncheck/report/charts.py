"""Charts for the HTML page, drawn by matplotlib as SVG with selectable text."""

from __future__ import annotations

import io
import math
import warnings
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from syncheck.errors import one_line
from syncheck.kinds import BN_STATISTICS
from syncheck.report.chart_data import POWERS, bin_counts, bins_in_use, distinct_modules, natural_key
from syncheck.series import by_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from syncheck.records import Group, Histogram, Report
    from syncheck.report.chart_data import Curve, Heatmap

# Readable on white and on black, because the page follows the browser's color scheme.
_GREY = "#808080"
# Okabe and Ito's palette, which most color-blind readers can distinguish.
_COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_AGREES = (0.5, 0.5, 0.5, 0.12)
_MOST_TENSORS = 60
# matplotlib overflows near the largest float64; the table beside the chart has the exact number.
_LARGEST = 1e300
_NOT_NUMERIC = "differs, no numeric difference"


def draw_drift(report: Report) -> list[str]:
    """Return charts of the drift of running statistics: by tensor and, if a run has several steps, over the steps."""
    runs = by_run(report.groups)
    last = {run: groups[-1] for run, groups in runs.items() if _has_statistics(groups[-1])}
    charts = []
    if any(drift >= 0 for group in last.values() for drift in _drift_by_tensor(group).values()):
        charts.append(_draw_by_tensor(last))
    if any(len({p.step for p in report.drift if p.run == run}) > 1 for run in runs):
        charts.append(_draw_over_steps(report))
    return charts


def draw_curves(curves: Mapping[str, Curve]) -> str:
    """Return a chart of the difference of each finding over steps; a cross on the axis marks an unknown difference."""
    figure, axes = _figure(9, 3.2)
    for i, (label, curve) in enumerate(curves.items()):
        values = [math.nan if value is None else min(value, _LARGEST) for _, value in curve]
        color = _COLORS[i % len(_COLORS)]
        axes.plot([step for step, _ in curve], values, "o-", color=color, label=_escape_math(label))
        unknown = [step for step, value in curve if value is None]
        if unknown:
            axes.plot(unknown, [0.0] * len(unknown), "x", color=color, label=_NOT_NUMERIC, clip_on=False)
    known = [min(value, _LARGEST) for curve in curves.values() for _, value in curve if value]
    if max(known, default=0) > 100 * min(known, default=0):
        # matplotlib overflows over hundreds of decades, so the scale is linear below 30 decades.
        least = max(10.0 ** math.floor(math.log10(min(known))), max(known) * 1e-30)
        axes.set_yscale("symlog", linthresh=least)
        axes.set_ylim(0, max(known) * 2)
    else:
        _start_at_zero(axes)
    axes.set_ylabel("max abs difference", color=_GREY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return _svg(figure, axes, "optimizer step", "Findings over steps", "findings")


def draw_heatmap(heatmap: Heatmap) -> str:
    """Return a chart of tensors x ranks, colored by the logarithm of the difference."""
    known = [math.log10(cell) for row in heatmap.cells for cell in row if 0 < cell < math.inf]
    low = math.floor(min(known, default=-3))
    high = max(math.ceil(max(known, default=-3)), low + 1)
    # Skip the dark end of viridis, which is invisible on a dark page.
    colors = mpl.colormaps["viridis"].resampled(256)([i / 319 + 0.2 for i in range(256)])
    palette = ListedColormap(colors).with_extremes(bad=_AGREES, over=_COLORS[0])
    figure, axes = _figure(9, max(2.4, 1.6 + 0.2 * len(heatmap.rows)))
    cells = [[math.nan if not cell else min(math.log10(cell), high + 1) for cell in row] for row in heatmap.cells]
    # The file stores one pixel per cell, which the browser scales.
    image = axes.imshow(cells, cmap=palette, vmin=low, vmax=high, aspect="auto", interpolation="none")
    axes.set_yticks(range(len(heatmap.rows)), [_escape_math(_shorten(row)) for row in heatmap.rows], fontsize=8)
    every = math.ceil(len(heatmap.columns) / 16)
    axes.set_xticks(range(0, len(heatmap.columns), every), heatmap.columns[::every])
    for i, (above, below) in enumerate(pairwise(distinct_modules(heatmap.rows))):
        if above != below:
            axes.axhline(i + 0.5, color=_GREY, linewidth=0.8)
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02)
    bar.set_ticks(MaxNLocator(8, integer=True))
    bar.formatter = FuncFormatter(lambda decade, _: f"$10^{{{decade:g}}}$")
    bar.ax.tick_params(colors=_GREY)
    bar.set_label("max abs difference", color=_GREY)
    bar.outline.set_edgecolor(_GREY)
    keys = [Patch(color=_AGREES, label="agrees")]
    if any(cell == math.inf for row in heatmap.cells for cell in row):
        keys.append(Patch(color=_COLORS[0], label=_NOT_NUMERIC))
    return _svg(figure, axes, "rank", "Difference by tensor and rank", "heatmap", keys)


def draw_histograms(histograms: Sequence[Histogram]) -> str:
    """Return a chart of the share of elements by difference, with one visible histogram, at first the first.

    All histograms have the same scale, for comparisons between tensors.
    """
    bins = bins_in_use(histograms)
    figure, axes = _figure(9, 3.2)
    shares = [[100 * count / histogram.elements for count in bin_counts(histogram, bins)] for histogram in histograms]
    least = 10.0 ** math.floor(math.log10(min(share for row in shares for share in row if share)))
    last = len(bins)
    # Columns: equal elements, a space, one per decade, a space, NaN and infinite elements.
    edges = [-2.0, -1.0, *(float(i) for i in range(last + 1)), last + 1.0, last + 2.0]
    for i, (equal, *decades, not_finite) in enumerate(shares):
        values = [max(share, least / 2) for share in (equal, 0.0, *decades, 0.0, not_finite)]
        axes.stairs(values, edges, baseline=least / 2, fill=True, color=_COLORS[1], gid=f"histogram-{i}")
    axes.set_yscale("log")
    axes.set_ylim(least / 2, 150)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g}%"))
    axes.yaxis.set_minor_locator(NullLocator())
    ticks, labels = [-1.5], ["equal"]
    for edge in range(last + 1):
        # Bin b lies between the powers b - 1 and b; the outermost bins are open.
        power = bins[0] + edge - 1
        if 0 <= power < len(POWERS):
            ticks.append(float(edge))
            labels.append(f"$10^{{{POWERS[power]}}}$")
    if any(histogram.not_finite for histogram in histograms):
        ticks.append(last + 1.5)
        labels.append("not finite")
    axes.set_xticks(ticks, labels)
    axes.set_xlim(-2.2, edges[-1] + 0.2 if ticks[-1] > last + 1 else last + 0.2)
    axes.set_ylabel("elements", color=_GREY)
    axes.grid(color=_GREY, alpha=0.25)
    axes.set_axisbelow(True)
    svg = _svg(figure, axes, "absolute difference between ranks", "Elements by difference", "histograms", ())
    for i in range(len(histograms)):
        svg = svg.replace(f'id="histogram-{i}"', f'class="histogram{" chosen" * (i == 0)}"')
    return svg


def _has_statistics(group: Group) -> bool:
    """Whether running statistics were compared. Other runs must not be drawn at 0, which means equal."""
    return any(counts.compared for kind, counts in group.kinds.items() if kind in BN_STATISTICS)


def _drift_by_tensor(group: Group) -> dict[str, float]:
    """Return the drift of each differing running statistic; NaN, which is not drawn, if the drift is unknown."""
    statistics = [diff for diff in group.tensors if diff.kind in BN_STATISTICS]
    return {diff.name: math.nan if diff.max_abs is None else float(diff.max_abs) for diff in statistics}


def _draw_by_tensor(last: dict[str, Group]) -> str:
    drift_by_run = {run: _drift_by_tensor(group) for run, group in last.items()}
    names = sorted({name for drift in drift_by_run.values() for name in drift}, key=natural_key)[:_MOST_TENSORS]
    # The height grows with the rows to keep every name readable.
    figure, axes = _figure(9, 1.2 + 0.22 * len(names))
    for i, (run, drift) in enumerate(drift_by_run.items()):
        values = [drift.get(name, 0.0) for name in names]
        unknown = all(map(math.isnan, values))
        label = f"{_escape_math(run)} (differences unknown)" if unknown else _escape_math(run)
        axes.plot(values, range(len(names)), "o", color=_COLORS[i % len(_COLORS)], label=label, alpha=0.85)
    axes.set_yticks(range(len(names)), [_escape_math(_shorten(name)) for name in names], fontsize=8)
    axes.invert_yaxis()
    # Logarithmic for the drifts, linear around 0 for equal statistics.
    positive = [value for drift in drift_by_run.values() for value in drift.values() if value > 0]
    decade = 10.0 ** math.floor(math.log10(min(positive, default=1e-12)))
    axes.set_xscale("symlog", linthresh=decade, linscale=0.4)
    axes.set_xlim(-0.1 * decade, max(positive, default=decade) * 1.6)
    return _svg(
        figure, axes, "max abs difference between ranks (0 = bitwise equal)", "Drift by tensor, last step", "tensor"
    )


def _draw_over_steps(report: Report) -> str:
    figure, axes = _figure(9, 3.6)
    for i, run in enumerate(dict.fromkeys(point.run for point in report.drift)):
        points = [(p.step, p.max_abs) for p in report.drift if p.run == run and p.step is not None]
        steps, values = [step for step, _ in points], [value for _, value in points]
        axes.plot(steps, values, "o-", color=_COLORS[i % len(_COLORS)], label=_escape_math(run))
    axes.set_ylabel("max abs difference", color=_GREY)
    _start_at_zero(axes)
    return _svg(figure, axes, "optimizer step", "Drift over steps", "steps")


def _start_at_zero(axes: Axes) -> None:
    """Start the y axis at 0 and leave room for the legend above the lines."""
    axes.margins(y=0.25)
    axes.set_ylim(bottom=0)


def _escape_math(text: str) -> str:
    # A dollar sign starts a formula in matplotlib.
    return one_line(text).replace("$", r"\$")


def _shorten(name: str) -> str:
    """Keep the end of a long name, which distinguishes neighbors, and leave room for the chart."""
    name = one_line(name)
    return name if len(name) <= 60 else f"...{name[-57:]}"


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure, axes: Axes, xlabel: str, title: str, salt: str, keys: Sequence[Patch] | None = None) -> str:
    """Return a chart as SVG. keys: entries of a legend above the chart, () for no legend, None for the lines' own."""
    axes.set_xlabel(xlabel, color=_GREY)
    axes.set_title(title, color=_GREY, loc="left")
    axes.tick_params(colors=_GREY)
    if keys is None:
        axes.grid(color=_GREY, alpha=0.25)
        axes.legend(labelcolor=_GREY, framealpha=0)
    elif keys:
        axes.legend(
            handles=keys,
            labelcolor=_GREY,
            framealpha=0,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=len(keys),
            borderaxespad=0.2,
        )
    for spine in axes.spines.values():
        spine.set_color(_GREY)
    axes.set_facecolor("none")
    out = io.StringIO()
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": ["sans-serif"]}
    with mpl.rc_context(settings), warnings.catch_warnings():
        # Harmless: the browser renders glyphs missing from matplotlib's font, and the table beside a chart has the data
        # if the machine is slow or the legend takes all of the room.
        harmless = ("Glyph .* missing from", "Matplotlib currently does not support", "Creating legend with")
        for message in (*harmless, "constrained_layout not applied"):
            warnings.filterwarnings("ignore", message, UserWarning)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    # Screen readers announce the title only; the table beside a chart has the data.
    return f'<svg role="img" aria-label="{title}" ' + text[text.index("<svg") + len("<svg ") :]
