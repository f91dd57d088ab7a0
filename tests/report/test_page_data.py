"""The data of a report page: differences by tensor and rank, curves over steps, histograms, and stored tensors."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from support.large import group, report, tensor
from support.listings import list_fields

from syncheck.diagnose.series import by_run
from syncheck.findings import Stored
from syncheck.records import Group, Histogram, History, HistoryPoint, Report
from syncheck.report import html
from syncheck.report.page_data import MOST_COLUMNS, UNKNOWN, bin_label, encode, make_curves, make_data


def data_of(*groups: Group) -> dict[str, Any]:
    """Return the data of a page, as its script decodes it."""
    result = Report("out_of_sync", groups)
    page = html.render(result, "0")
    (text,) = re.findall(r'<script type="application/gzip" id="data">(.*?)</script>', page)
    decoded: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(text)))
    assert encode(decoded) == text == encode(make_data(result, by_run(groups)) or {})
    return decoded


def cells(run: dict[str, Any], step: int = -1) -> dict[str, tuple[float, list[int]]]:
    """Return the difference and the columns of each tensor of a step."""
    return {run["names"][row[0]]: (row[-2], run["sets"][row[-1]]) for row in run["steps"][step]["rows"]}


def test_differences_belong_to_the_ranks_outside_the_majority() -> None:
    """A difference belongs to the ranks outside the majority, or to all without a majority; layers by number."""
    outlier = tensor("layer.10.weight", 4)
    tied = tensor("layer.2.weight", 4, clusters=((0, 1), (2, 3)), minority=(), max_abs=0.125)
    shard = tensor("layer.3.weight", 4, status="not_compared", reason="sharded", max_abs=None, minority=())
    (run,) = data_of(group(outlier, shard, tied, ranks=4))["runs"]
    assert run["names"] == ["layer.2.weight", "layer.3.weight", "layer.10.weight"]
    assert run["columns"] == ["0-1", "2", "3"]
    assert cells(run) == {
        "layer.10.weight": (0.25, [2]), "layer.2.weight": (0.125, [0, 1, 2]), "layer.3.weight": (0, [0, 1, 2]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("in_file", "on_page"),
    [
        # A format that sorts names as texts.
        (["m.10.b", "m.2.a", "m.2.b", "norm"], ["m.2.a", "m.2.b", "m.10.b", "norm"]),
        # The order of a module is kept, whatever the names of its parts.
        (["stem.w", "conv1.w", "bn1.w", "conv2.w", "a.0.w"], ["stem.w", "conv1.w", "bn1.w", "conv2.w", "a.0.w"]),
        # Layers within layers, and files whose layers interleave.
        (["e.1.x.10.w", "e.1.x.9.w", "head", "e.0.x.1.w"], ["e.0.x.1.w", "e.1.x.9.w", "e.1.x.10.w", "head"]),
        (["m.1", "m.shared", "m.0"], ["m.0", "m.1", "m.shared"]),
        ([f"m.{'9' * 5000}", "m.1"], ["m.1", f"m.{'9' * 5000}"]),
    ],
)
def test_layers_are_in_the_order_of_their_numbers(in_file: list[str], on_page: list[str]) -> None:
    """A chart along the depth of a model has layer 2 before layer 10; other names keep the order of the file."""
    (run,) = data_of(group(*[tensor(name, 2) for name in in_file], ranks=2))["runs"]
    assert run["names"] == on_page


@pytest.mark.parametrize(
    "changes",
    [
        {"max_abs": None, "mismatched": None, "reason": "digest"},
        {"nonfinite": {0: 0, 1: 3}},
        {"status": "not_compared", "reason": "missing", "max_abs": None},
    ],
)
def test_differences_without_a_number(changes: dict[str, object]) -> None:
    """A tensor compared by digest, with NaN on one rank, or missing on one rank differs without a number."""
    (run,) = data_of(group(tensor("a", 3, **changes), tensor("b", 3), ranks=3))["runs"]
    assert run["columns"] == ["0-1", "2"]
    assert cells(run)["a"] == (UNKNOWN, [1])


def test_equal_values_are_no_difference() -> None:
    """Values that are equal but not bitwise equal have the difference 0, which is not drawn."""
    (run,) = data_of(group(tensor("a", 2, status="equal", max_abs=0.0), ranks=2))["runs"]
    assert cells(run)["a"][0] == 0


def test_ranks_that_agree_share_a_column() -> None:
    """Ranks that agree in every tensor share a column; one tensor in which they differ divides it."""
    nodes = tensor("a", clusters=((0, 1, 2, 3), (4, 5, 6, 7)), minority=())
    (run,) = data_of(group(nodes, nodes))["runs"]
    assert (run["axis"], run["columns"], cells(run)["a"][1]) == ("ranks", ["0-3", "4-7"], [0, 1])
    (run,) = data_of(group(nodes, tensor("b")))["runs"]
    assert (run["columns"], cells(run)["b"][1]) == (["0-3", "4-6", "7"], [2])


def test_two_replicas_share_one_column() -> None:
    """A difference of two replicas is between both, so it has no rank."""
    (run,) = data_of(group(tensor("a", 2), ranks=2))["runs"]
    assert (run["axis"], run["columns"], cells(run)) == ("", ["difference"], {"a": (0.25, [0])})


def test_many_different_ranks_share_columns() -> None:
    """1,024 ranks that all differ share 64 columns; if only the last differs, there are two."""
    everyone = tuple((rank,) for rank in range(1024))
    (run,) = data_of(group(tensor("a", 1024, clusters=everyone, minority=()), ranks=1024))["runs"]
    assert (len(run["columns"]), run["columns"][-1]) == (MOST_COLUMNS, "1008-1023")
    (run,) = data_of(report(30, ranks=1024).groups[0])["runs"]
    assert run["columns"] == ["0-1022", "1023"]
    assert {tuple(position) for _, position in cells(run).values()} == {(1,)}


def test_each_step_has_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step has its own rows, and rows beyond the limit of the page are counted."""
    first = replace(report(5).groups[0], step=1)
    second = replace(report(40).groups[0], step=2)
    (run,) = data_of(first, second)["runs"]
    assert [(step["step"], len(step["rows"]), step["omitted"]) for step in run["steps"]] == [(1, 5, 0), (2, 40, 0)]
    monkeypatch.setattr("syncheck.report.page_data.MOST_ROWS", 20)
    (run,) = data_of(first, second)["runs"]
    assert [(len(step["rows"]), step["omitted"]) for step in run["steps"]] == [(5, 0), (10, 30)]
    assert max(list_fields(cells(run).values(), 0)) == 4e-5


def make_history_group(history: History | None) -> Group:
    """Return a group with a finding that has this history."""
    first = group(tensor("a", 2), ranks=2, step=400)
    return replace(first, findings=(replace(first.findings[0], history=history),))


def test_curves_are_the_histories_of_the_findings() -> None:
    """A curve has the difference at every step, 0.0 in sync, None if unknown; no history gives no curve."""
    differences = {100: 0.0, 200: 0.0, 300: None, 400: 0.5}
    points = tuple(HistoryPoint(step, int(difference != 0), difference) for step, difference in differences.items())
    with_history = make_history_group(History(points, 300, 200, ("a",), (1,)))
    assert make_curves(with_history) == {"SYN212 on rank 1": tuple(differences.items())}
    (run,) = data_of(with_history)["runs"]
    assert run["curves"] == {"SYN212 on rank 1": [[100, 0.0], [200, 0.0], [300, None], [400, 0.5]]}
    assert make_curves(make_history_group(None)) == {}
    # The sentences of the finding have both points.
    assert make_curves(make_history_group(History(points[2:], 300, None, ("a",), (1,)))) == {}


def test_findings_with_equal_curves_share_one() -> None:
    """Two findings with the same differences at each step have one curve, with both titles."""
    points = tuple(HistoryPoint(step, 1, 0.5) for step in (1, 2, 3))
    first = make_history_group(History(points, 1, None, ("a",), (1,)))
    second = replace(first.findings[0], code="SYN299")
    both = replace(first, findings=(*first.findings, second))
    assert list(make_curves(both)) == ["SYN212 on rank 1, SYN299 on rank 1"]


def bins(**counts: int) -> tuple[int, ...]:
    """Return counts by index of the bin: b9=3."""
    return tuple(counts.get(f"b{index}", 0) for index in range(20))


def test_histograms_use_the_bins_with_elements() -> None:
    """The bins go from the first to the last with an element in any histogram, worst tensor first."""
    histograms = (Histogram(262132, bins(b11=8, b12=4), 0), Histogram(0, bins(b9=262144), 0), Histogram(5, bins(), 2))
    diffs = [replace(tensor(f"w{i}", max_abs=3.0 - i), histogram=first) for i, first in enumerate(histograms)]
    (run,) = data_of(group(*diffs, tensor("without", max_abs=1e-9)))["runs"]
    assert run["histograms"] == {
        "bins": ["equal", "1e-4 to 1e-3", "1e-3 to 1e-2", "1e-2 to 1e-1", "1e-1 to 1e0", "not finite"],
        "rows": [["w0", 262132, 0, 0, 8, 4, 0], ["w1", 0, 262144, 0, 0, 0, 0], ["w2", 5, 0, 0, 0, 0, 2]],
    }
    page = html.render(Report("out_of_sync", (group(*diffs),)), "0")
    assert "Large tensors are sampled" in page
    assert [bin_label(index) for index in (0, 1, 18, 19)] == ["< 1e-12", "1e-12 to 1e-11", "1e5 to 1e6", ">= 1e6"]


def test_stored_tensors_are_planes_of_boxes() -> None:
    """A stored tensor is drawn along the dimensions that divide it; parts at an unknown position are counted."""
    halves = tuple(((0, 0, 4 * i), (2, 3, 4), f"rank {i}") for i in range(2))
    stored_values = {
        "w": (Stored("w", "float32", (2, 3, 8), halves), None),
        "b": (Stored("b", "float32", (8,), ((None, None, "rank 0"),)), Stored("c", "float32", (8,))),
    }
    single = group(tensor("w", 2), ranks=2)
    pair = replace(
        single,
        replicas=tuple(replace(replica, label=label) for replica, label in zip(single.replicas, "AB", strict=True)),
        evidence=replace(single.evidence, stored=stored_values),
    )
    (run,) = data_of(pair)["runs"]
    assert (run["columns"], cells(run)) == (["difference"], {"w": (0.25, [0])})
    first, second = run["stored"]
    assert (first["name"], first["sides"][1]) == ("w", None)
    side = first["sides"][0]
    assert (side["plane"], side["dims"], side["worst"]) == ([2, 8], [0, 2], None)
    assert side["boxes"] == [[0, 0, 2, 4, "rank 0"], [0, 4, 2, 4, "rank 1"]]
    assert (second["sides"][0]["unknown"], second["sides"][1]["name"]) == (1, "c")


def test_a_page_without_differences_has_no_charts() -> None:
    """In sync, the page contains no data and no charting library."""
    ok = Report("in_sync", (replace(group(ranks=2), findings=(), verdict="in_sync"),))
    assert make_data(ok, by_run(ok.groups)) is None
    page = html.render(ok, "0")
    assert ('id="data"' in page, "Apache ECharts" in page) == (False, False)
