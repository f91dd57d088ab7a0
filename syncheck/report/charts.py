"""Charts for the HTML page, drawn by matplotlib as SVG with text that stays text."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from syncheck.errors import one_line
from syncheck.kinds import BN_STATISTICS
from syncheck.series import by_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from syncheck.records import Group, Report

# Readable on white and on black, as the page may be either.
_GREY = "#808080"
# Okabe and Ito's palette, told apart by most colour-blind readers.
_COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MOST_TENSORS = 60


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


def _has_statistics(group: Group) -> bool:
    """Whether running statistics were compared. A run without them, or with shards of them, has no place at 0."""
    return any(counts.compared for kind, counts in group.kinds.items() if kind in BN_STATISTICS)


def _gaps(group: Group) -> dict[str, float]:
    """Return the gap of each statistic that is not identical: NaN, which is not drawn, where it is not known."""
    apart = [diff for diff in group.tensors if diff.kind in BN_STATISTICS]
    return {diff.name: math.nan if diff.max_abs is None else float(diff.max_abs) for diff in apart}


def _by_tensor(last: dict[str, Group]) -> str:
    gaps = {run: _gaps(group) for run, group in last.items()}
    names = sorted({name for found in gaps.values() for name in found}, key=_natural)[:_MOST_TENSORS]
    # Height follows the rows, so that every name can be read.
    figure, axes = _figure(9, 1.2 + 0.22 * len(names))
    for i, (run, found) in enumerate(gaps.items()):
        values = [found.get(name, 0.0) for name in names]
        label = f"{_plain(run)} (gaps not known)" if all(map(math.isnan, values)) else _plain(run)
        axes.plot(values, range(len(names)), "o", color=_COLORS[i % len(_COLORS)], label=label, alpha=0.85)
    axes.set_yticks(range(len(names)), [_plain(name) for name in names], fontsize=8)
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
    axes.set_ylim(bottom=0)
    return _svg(figure, axes, "optimizer step", "Drift over steps", "steps")


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.replace(".", " . ").split()]


def _plain(text: str) -> str:
    # A dollar sign starts a formula in matplotlib.
    return one_line(text).replace("$", r"\$")


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure, axes: Axes, xlabel: str, title: str, salt: str) -> str:
    axes.set_xlabel(xlabel, color=_GREY)
    axes.set_title(title, color=_GREY)
    axes.tick_params(colors=_GREY)
    axes.grid(color=_GREY, alpha=0.25)
    axes.legend(labelcolor=_GREY, framealpha=0)
    for spine in axes.spines.values():
        spine.set_color(_GREY)
    axes.set_facecolor("none")
    out = io.StringIO()
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": ["sans-serif"]}
    with mpl.rc_context(settings):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
