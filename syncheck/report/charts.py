"""Charts for the HTML page, drawn by matplotlib as SVG with text that stays text."""

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
from syncheck.report.heat import modules, natural
from syncheck.report.histogram import POWERS, used
from syncheck.series import by_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from syncheck.records import Group, Histogram, Report
    from syncheck.report.curves import Curve
    from syncheck.report.heat import Heat

# Readable on white and on black, as the page may be either.
_GREY = "#808080"
# Okabe and Ito's palette, told apart by most colour-blind readers.
_COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_AGREES = (0.5, 0.5, 0.5, 0.12)
_MOST_TENSORS = 60
# matplotlib overflows near the largest float64; the table beside the chart has the number.
_LARGEST = 1e300


def drift(report: Report) -> list[str]:
    """Return the drift of each run's statistics by tensor and, where there are several steps, over the steps."""
    runs = by_run(report.groups)
    last = {run: groups[-1] for run, groups in runs.items() if _has_statistics(groups[-1])}
    drawn = []
    if any(gap >= 0 for group in last.values() for gap in _gaps(group).values()):
        drawn.append(_by_tensor(last))
    if any(len({p.step for p in report.drift if p.run == run}) > 1 for run in runs):
        drawn.append(_over_steps(report))
    return drawn


def over_steps(lines: Mapping[str, Curve]) -> str:
    """Return the gap of each finding over the steps of a run; where no number tells it, a cross stands at the foot."""
    figure, axes = _figure(9, 3.2)
    for i, (label, line) in enumerate(lines.items()):
        gaps = [math.nan if gap is None else min(gap, _LARGEST) for _, gap in line]
        color = _COLORS[i % len(_COLORS)]
        axes.plot([step for step, _ in line], gaps, "o-", color=color, label=_plain(label))
        untold = [step for step, gap in line if gap is None]
        if untold:
            axes.plot(untold, [0.0] * len(untold), "x", color=color, label="apart by no number", clip_on=False)
    known = [min(gap, _LARGEST) for line in lines.values() for _, gap in line if gap]
    if max(known, default=0) > 100 * min(known, default=0):
        # Over hundreds of decades matplotlib overflows, and nobody could tell two of them apart.
        least = max(10.0 ** math.floor(math.log10(min(known))), max(known) * 1e-30)
        axes.set_yscale("symlog", linthresh=least)
        axes.set_ylim(0, max(known) * 2)
    else:
        _from_zero(axes)
    axes.set_ylabel("largest gap", color=_GREY)
    # A step has no fractions.
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return _svg(figure, axes, "optimizer step", "Findings over steps", "findings")


def heatmap(found: Heat) -> str:
    """Return tensors x ranks, coloured by the logarithm of the gap; a rank that agrees has no colour."""
    known = [math.log10(cell) for row in found.cells for cell in row if 0 < cell < math.inf]
    low = math.floor(min(known, default=-3))
    high = max(math.ceil(max(known, default=-3)), low + 1)
    # Without viridis' dark end, which is lost on a dark page.
    colors = mpl.colormaps["viridis"].resampled(256)([i / 319 + 0.2 for i in range(256)])
    palette = ListedColormap(colors).with_extremes(bad=_AGREES, over=_COLORS[0])
    figure, axes = _figure(9, max(2.4, 1.6 + 0.2 * len(found.rows)))
    cells = [[math.nan if not cell else min(math.log10(cell), high + 1) for cell in row] for row in found.cells]
    # One pixel a cell in the file, whatever the size on the page.
    drawn = axes.imshow(cells, cmap=palette, vmin=low, vmax=high, aspect="auto", interpolation="none")
    axes.set_yticks(range(len(found.rows)), [_plain(_short(row)) for row in found.rows], fontsize=8)
    every = math.ceil(len(found.columns) / 16)
    axes.set_xticks(range(0, len(found.columns), every), found.columns[::every])
    for i, (above, below) in enumerate(pairwise(modules(found.rows))):
        if above != below:
            axes.axhline(i + 0.5, color=_GREY, linewidth=0.8)
    bar = figure.colorbar(drawn, ax=axes, fraction=0.03, pad=0.02)
    bar.set_ticks(MaxNLocator(8, integer=True))
    bar.formatter = FuncFormatter(lambda decade, _: f"$10^{{{decade:g}}}$")
    bar.ax.tick_params(colors=_GREY)
    bar.set_label("largest gap", color=_GREY)
    bar.outline.set_edgecolor(_GREY)
    keys = [Patch(color=_AGREES, label="agrees")]
    if any(cell == math.inf for row in found.cells for cell in row):
        keys.append(Patch(color=_COLORS[0], label="apart by no number"))
    return _svg(figure, axes, "rank", "Gap by tensor and rank", "heatmap", keys)


def histograms(found: Sequence[Histogram]) -> str:
    """Return a drawing of shares of elements by gap, in which one histogram at a time is shown: the first, then chosen.

    They have one scale, so that two tensors can be told apart by looking from one to the other.
    """
    bins = used(found)
    figure, axes = _figure(9, 3.2)
    shares = [[100 * count / one.elements for count in _columns(one, bins)] for one in found]
    least = 10.0 ** math.floor(math.log10(min(share for row in shares for share in row if share)))
    last = len(bins)
    # A column for what is equal, a gap, one for each decade, a gap, and one for what is not finite.
    edges = [-2.0, -1.0, *(float(i) for i in range(last + 1)), last + 1.0, last + 2.0]
    for i, (equal, *gaps, odd) in enumerate(shares):
        values = [max(share, least / 2) for share in (equal, 0.0, *gaps, 0.0, odd)]
        axes.stairs(values, edges, baseline=least / 2, fill=True, color=_COLORS[1], gid=f"histogram-{i}")
    axes.set_yscale("log")
    axes.set_ylim(least / 2, 150)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g}%"))
    axes.yaxis.set_minor_locator(NullLocator())
    places, labels = [-1.5], ["equal"]
    for at in range(last + 1):
        # Bin b lies between the powers b - 1 and b; the outermost have no end.
        power = bins[0] + at - 1
        if 0 <= power < len(POWERS):
            places.append(float(at))
            labels.append(f"$10^{{{POWERS[power]}}}$")
    if any(one.not_finite for one in found):
        places.append(last + 1.5)
        labels.append("not finite")
    axes.set_xticks(places, labels)
    axes.set_xlim(-2.2, edges[-1] + 0.2 if places[-1] > last + 1 else last + 0.2)
    axes.set_ylabel("elements", color=_GREY)
    axes.grid(color=_GREY, alpha=0.25)
    axes.set_axisbelow(True)
    drawn = _svg(figure, axes, "gap between ranks", "Elements by their gap", "histograms", ())
    for i in range(len(found)):
        drawn = drawn.replace(f'id="histogram-{i}"', f'class="histogram{" chosen" * (i == 0)}"')
    return drawn


def _columns(one: Histogram, bins: range) -> list[int]:
    return [one.equal, *(one.counts[i] for i in bins), one.not_finite]


def _has_statistics(group: Group) -> bool:
    """Whether running statistics were compared. A run without them, or with shards of them, has no place at 0."""
    return any(counts.compared for kind, counts in group.kinds.items() if kind in BN_STATISTICS)


def _gaps(group: Group) -> dict[str, float]:
    """Return the gap of each statistic that is not identical: NaN, which is not drawn, where it is not known."""
    apart = [diff for diff in group.tensors if diff.kind in BN_STATISTICS]
    return {diff.name: math.nan if diff.max_abs is None else float(diff.max_abs) for diff in apart}


def _by_tensor(last: dict[str, Group]) -> str:
    gaps = {run: _gaps(group) for run, group in last.items()}
    names = sorted({name for found in gaps.values() for name in found}, key=natural)[:_MOST_TENSORS]
    # Height follows the rows, so that every name can be read.
    figure, axes = _figure(9, 1.2 + 0.22 * len(names))
    for i, (run, found) in enumerate(gaps.items()):
        values = [found.get(name, 0.0) for name in names]
        label = f"{_plain(run)} (gaps not known)" if all(map(math.isnan, values)) else _plain(run)
        axes.plot(values, range(len(names)), "o", color=_COLORS[i % len(_COLORS)], label=label, alpha=0.85)
    axes.set_yticks(range(len(names)), [_plain(_short(name)) for name in names], fontsize=8)
    axes.invert_yaxis()
    # Log for the drifts, linear around 0.0 so that a closed gap has its place.
    drawn = [value for found in gaps.values() for value in found.values() if value > 0]
    decade = 10.0 ** math.floor(math.log10(min(drawn, default=1e-12)))
    axes.set_xscale("symlog", linthresh=decade, linscale=0.4)
    axes.set_xlim(-0.1 * decade, max(drawn, default=decade) * 1.6)
    return _svg(
        figure, axes, "largest gap between ranks (0 = equal to the last bit)", "Drift by tensor, last step", "tensor"
    )


def _over_steps(report: Report) -> str:
    figure, axes = _figure(9, 3.6)
    for i, run in enumerate(dict.fromkeys(point.run for point in report.drift)):
        points = [(p.step, p.max_abs) for p in report.drift if p.run == run and p.step is not None]
        steps, gaps = [step for step, _ in points], [gap for _, gap in points]
        axes.plot(steps, gaps, "o-", color=_COLORS[i % len(_COLORS)], label=_plain(run))
    axes.set_ylabel("largest gap", color=_GREY)
    _from_zero(axes)
    return _svg(figure, axes, "optimizer step", "Drift over steps", "steps")


def _from_zero(axes: Axes) -> None:
    """Leave room above the lines, so that the legend covers none of them."""
    axes.margins(y=0.25)
    axes.set_ylim(bottom=0)


def _plain(text: str) -> str:
    # A dollar sign starts a formula in matplotlib.
    return one_line(text).replace("$", r"\$")


def _short(name: str) -> str:
    """Keep a name's end, which tells neighbours apart; a name as wide as the page leaves no room to draw."""
    name = one_line(name)
    return name if len(name) <= 60 else f"...{name[-57:]}"


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure, axes: Axes, xlabel: str, title: str, salt: str, keys: Sequence[Patch] | None = None) -> str:
    """Write a chart. keys: what the legend, then above the drawing, explains in place of the lines; () for none."""
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
        # Of scripts that matplotlib's own font lacks: text stays text, and who reads the page has fonts of his own.
        warnings.filterwarnings("ignore", "Glyph .* missing from|Matplotlib currently does not support", UserWarning)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    # Not read out letter by letter; the table beside a chart has its facts.
    return f'<svg role="img" aria-label="{title}" ' + text[text.index("<svg") + len("<svg ") :]
