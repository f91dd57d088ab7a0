"""Data of the heatmap and of the curves over steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from large import group, report, tensor

from syncheck.records import Group, History, HistoryPoint
from syncheck.report import charts
from syncheck.report.chart_data import MOST_COLUMNS, MOST_ROWS, distinct_modules, make_curves, make_heatmap


def test_differences_are_drawn_on_ranks_outside_the_majority() -> None:
    """A difference is drawn on ranks outside the majority, or on all ranks without a majority; shards are not drawn."""
    odd = tensor("layer.10.weight", 4)
    tied = tensor("layer.2.weight", 4, clusters=((0, 1), (2, 3)), minority=(), max_abs=0.125)
    shard = tensor("layer.3.weight", 4, status="not_compared", reason="sharded", max_abs=None, minority=())
    heatmap = make_heatmap(group(odd, tied, shard, ranks=4))
    assert heatmap is not None
    assert heatmap.rows == ("layer.2.weight", "layer.10.weight")
    assert heatmap.columns == ("0", "1", "2", "3")
    assert heatmap.cells == ((0.125,) * 4, (0.0, 0.0, 0.0, 0.25))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_abs": None, "mismatched": None, "reason": "digest"},
        {"nonfinite": {0: 0, 1: 3}},
        {"status": "not_compared", "reason": "missing", "max_abs": None},
    ],
)
def test_unknown_differences_have_a_separate_color(changes: dict[str, object]) -> None:
    """A tensor compared by digest, with NaN on one rank, or missing on one rank has a separate color."""
    heatmap = make_heatmap(group(tensor("a", 2, **changes), ranks=2))
    assert heatmap is not None
    assert heatmap.cells == ((0.0, math.inf),)
    assert charts._NOT_NUMERIC in charts.draw_heatmap(heatmap)
    (known,) = [make_heatmap(group(tensor("a", 2), ranks=2))]
    assert known is not None
    assert charts._NOT_NUMERIC not in charts.draw_heatmap(known)


def test_equal_values_are_not_drawn() -> None:
    """Values that are equal but not bitwise equal are not drawn."""
    assert make_heatmap(group(tensor("a", 2, status="equal", max_abs=0.0), ranks=2)) is None


@pytest.mark.parametrize(("tensors", "ranks"), [(61, 2), (700, 65), (50_000, 8), (300, 1024)])
def test_heatmaps_are_bounded(tensors: int, ranks: int) -> None:
    """Many tensors are grouped by modules or ranges of layers, many ranks by ranges, and no tensor is lost."""
    heatmap = make_heatmap(report(tensors, ranks).groups[0])
    assert heatmap is not None
    assert 6 <= len(heatmap.rows) <= MOST_ROWS
    assert len(heatmap.columns) <= MOST_COLUMNS
    # A row of one tensor has its name, a row of several tensors their number.
    assert sum(int(row.rpartition("(")[2].rstrip(")")) if "(" in row else 1 for row in heatmap.rows) == tensors
    assert max(max(row) for row in heatmap.cells) == 1e-6 * tensors
    assert all(row[-1] > 0 and not any(row[:-1]) for row in heatmap.cells)
    assert len(charts.draw_heatmap(heatmap)) < 100_000


def test_rows_are_grouped_at_the_first_different_module() -> None:
    """Names are grouped at the first level that differs; a tensor of the root module is a separate group."""
    assert distinct_modules(["net.a.w", "net.a.b", "net.c.w"]) == ["net.a", "net.a", "net.c"]
    assert distinct_modules(["a.0.w", "b.0.w", "scale"]) == ["a", "b", "scale"]
    assert distinct_modules(["a.w", "a.b"]) == ["a", "a"]


def test_names_without_modules_keep_the_largest_differences() -> None:
    """With more flat names than rows, the tensors with the largest differences are drawn, and the rest is counted."""
    flat = [tensor(f"w{i}", 2, max_abs=float(i + 1)) for i in range(100)]
    heatmap = make_heatmap(group(*flat, ranks=2))
    assert heatmap is not None
    assert (len(heatmap.rows), heatmap.rows_omitted) == (MOST_ROWS, 100 - MOST_ROWS)
    assert {row[1] for row in heatmap.cells} == {float(i + 1) for i in range(40, 100)}


def make_history_group(history: History | None) -> Group:
    """Return a group with a finding that has this history."""
    one = group(tensor("a", 2), ranks=2, step=400)
    return replace(one, findings=(replace(one.findings[0], history=history),))


@pytest.mark.parametrize("differences", [(5e-324, 1.7e308), (0.1, 0.1), (1.0, 1.0)])
def test_any_difference_can_be_drawn(differences: tuple[float, float]) -> None:
    """Both charts draw the smallest and the largest float64, and equal differences."""
    points = tuple(HistoryPoint(step, 1, difference) for step, difference in enumerate(differences))
    last = make_history_group(History(points, 0, None, ("a",), (1,)))
    heatmap = make_heatmap(
        group(*[tensor(f"a{i}", 2, max_abs=difference) for i, difference in enumerate(differences)], ranks=2)
    )
    assert heatmap is not None
    assert "<image" in charts.draw_heatmap(heatmap)
    assert "SYN212 on rank 1" in charts.draw_curves(make_curves(last))


def test_curves_are_the_histories_of_the_findings() -> None:
    """A curve has the difference at every step, 0.0 in sync, None if unknown; no history gives no curve."""
    differences = {100: 0.0, 200: 0.0, 300: None, 400: 0.5}
    points = tuple(HistoryPoint(step, int(difference != 0), difference) for step, difference in differences.items())
    assert make_curves(make_history_group(History(points, 300, 200, ("a",), (1,)))) == {
        "SYN212 on rank 1": tuple(differences.items())
    }
    assert make_curves(make_history_group(None)) == {}
