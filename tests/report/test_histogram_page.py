"""Histograms on the HTML page: as text, and selected in a browser."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from browser import opened
from large import group, tensor

from syncheck.records import Histogram, Report
from syncheck.report import html
from syncheck.report.chart_data import bin_label

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import TensorDiff

NAMES = ("a.weight", "<b>&\"'", "c" * 300)


def bins(**counts: int) -> tuple[int, ...]:
    """Return counts by index of the bin: b9=3."""
    return tuple(counts.get(f"b{index}", 0) for index in range(20))


def differing(name: str, gap: float, histogram: Histogram | None) -> TensorDiff:
    """Return a tensor with a histogram."""
    return replace(tensor(name, max_abs=gap), histogram=histogram)


def report(others: int = 0) -> Report:
    """Return a report of three tensors with histograms, worst first, and further tensors without histograms."""
    histograms = (
        Histogram(262132, bins(b11=8, b12=4), 0),
        Histogram(0, bins(b9=262144), 0),
        Histogram(1000, bins(b0=1, b19=1), 2),
    )
    diffs = [differing(name, 3.0 - i, one) for i, (name, one) in enumerate(zip(NAMES, histograms, strict=True))]
    return Report("out_of_sync", (group(*diffs, *(tensor(f"x{i}", max_abs=1e-9) for i in range(others))),))


def list_visible(page: str) -> list[bool]:
    """Return whether each histogram in the chart is visible."""
    return ["chosen" in kinds for kinds in re.findall(r'<g class="(histogram[^"]*)"', page)]


def test_the_page_without_a_script() -> None:
    """Without JavaScript the histogram of the worst tensor is visible, and a table has the data of all."""
    page = html.render(report(), "0")
    assert list_visible(page) == [True, False, False]
    assert '<p class="selected">a.weight: differing elements: 12 of 262144; max abs: 3</p>' in page
    assert "g.histogram:not(.chosen) { display: none; }" in page
    table = page.partition("Show the data of 3 tensors")[2].partition("</details>")[0]
    heads = re.findall(r"<th [^>]*>(.*?)</th>", table)
    assert heads[:5] == ["tensor", "differing", "max abs", "equal", "&lt; 1e-12"]
    assert heads[-3:] == ["1e5 to 1e6", "&gt;= 1e6", "not finite"]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)[1:]]
    assert [row[3] for row in cells] == ["262132", "0", "1000"]
    assert cells[0][heads.index("1e-2 to 1e-1")] == "8"
    assert cells[1][0] == "&lt;b&gt;&amp;&quot;&#x27;"
    assert [row[-1] for row in cells] == ["0", "0", "2"]
    assert html._SAMPLED_CAPTION in page


def test_labels_of_bins() -> None:
    """The outermost bins have one bound, other bins two adjacent powers of ten."""
    assert [bin_label(index) for index in (0, 1, 18, 19)] == ["< 1e-12", "1e-12 to 1e-11", "1e5 to 1e6", ">= 1e6"]


def test_a_report_without_histograms_has_no_chart() -> None:
    """A report without histograms has no histogram chart."""
    diffs = [replace(diff, histogram=None) for diff in report().groups[0].tensors]
    page = html.render(Report("out_of_sync", (group(*diffs),)), "0")
    assert list_visible(page) == []


@pytest.mark.parametrize(
    "one", [Histogram(5, bins(), 1), Histogram(0, bins(b0=1), 0), Histogram(0, bins(b19=1), 0), Histogram(7, bins(), 0)]
)
def test_any_histogram_can_be_drawn(one: Histogram) -> None:
    """Histograms of the outermost bins, of equal elements only, or of elements that are not finite are drawn."""
    page = html.render(Report("out_of_sync", (group(differing("a", 1.0, one)),)), "0")
    assert list_visible(page) == [True]


@pytest.mark.slow
def test_selecting_a_tensor(tmp_path: Path) -> None:
    """The list contains the tensors with a histogram; the selected histogram is visible, and the URL has its tensor."""
    driver = """
      const choice = document.querySelector('.histograms select');
      choice.value = '1'; choice.dispatchEvent(new Event('change'));
      document.title = location.hash;
    """
    text = re.sub(r"<meta http-equiv=[^>]*>", "", html.render(report(50_000), "0"))
    path = tmp_path / "page.html"
    path.write_text(text.replace("</body>", f"<script>{driver}</script></body>"), encoding="utf-8")
    page, console = opened(path, tmp_path / "b")
    assert console == []
    assert list_visible(page) == [False, True, False]
    assert '<p class="selected">&lt;b&gt;&amp;"\': differing elements: 12 of 262144; max abs: 2</p>' in page
    assert "<title>#histogram1=%3Cb%3E%26%22%27</title>" in page
    options = page.partition('class="histograms"')[2].partition("</select>")[0]
    assert re.findall(r"<option[^>]*>(.*?)</option>", options) == ["a.weight", "&lt;b&gt;&amp;\"'", NAMES[2]]


@pytest.mark.slow
def test_a_link_restores_the_selection(tmp_path: Path) -> None:
    """The URL selects the tensor of each group without errors or requests; an unknown name selects the worst."""
    twice = report().groups[0]
    path = tmp_path / "page.html"
    path.write_text(html.render(Report("out_of_sync", (twice, replace(twice, run="other"))), "0"), encoding="utf-8")
    page, console = opened(path, tmp_path / "b", "#histogram2=" + NAMES[2])
    assert console == []
    assert list_visible(page) == [True, False, False, False, False, True]
    page, console = opened(path, tmp_path / "b", "#histogram=none")
    assert console == []
    assert list_visible(page) == [True, False, False] * 2


@pytest.mark.slow
def test_the_table_of_tensors_is_still_bounded() -> None:
    """Histograms add a few kilobytes to the page of 50,000 tensors."""
    assert len(html.render(report(50_000), "0")) < 6_100_000
    assert html.MOST_DATA > 50_000
