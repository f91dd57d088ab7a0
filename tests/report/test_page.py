"""The HTML page: as text, and with its script in a real browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from typing import TYPE_CHECKING

import pytest
from browser import opened
from large import group, names, report, tensor

from syncheck.records import Report
from syncheck.report import html

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&amp;\u2028'\""


def rows(page: str) -> list[list[str]]:
    """Return the cells of the table of tensors in a page."""
    body = page.partition('class="tensors"')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    return [
        [unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    ]


def data(page: str) -> dict[str, list[list[int | str]]]:
    """Return the rows that a page contains as JSON."""
    (text,) = re.findall(r'<script type="application/json">(.*?)</script>', page)
    return json.loads(text)


def test_every_tensor_is_in_the_page_once() -> None:
    """The first 500 rows are HTML and the rest is JSON with the same cells, worst first."""
    page = html.render(report(1200), "0")
    more = data(page)
    hidden = [[row[0], *(more["texts"][i] for i in row[1:])] for row in more["rows"]]
    shown = rows(page) + hidden
    assert (len(rows(page)), len(hidden)) == (500, 700)
    assert [row[0] for row in shown] == names(1200)[::-1]
    assert {tuple(row[1:4]) for row in shown} == {("parameter", "0-6 | 7", "12 of 262144")}
    assert "... and 700 more" in page


def test_page_loads_nothing() -> None:
    """The page contains no URLs except the namespaces of SVG, and its policy forbids loading."""
    page = html.render(report(700), "0")
    without_names = re.sub(r' xmlns(:\w+)?="[^"]*"', "", page)
    without_names = re.sub(r"<metadata>.*?</metadata>", "", without_names, flags=re.DOTALL)
    assert re.findall(r"(?:https?:)?//\w[^\s\"'<]*", re.sub(r"(?m)//.*$", "", without_names)) == []
    assert re.findall(r"https?:[^\s\"']*", without_names) == []
    assert not re.search(r"@import|url\((?!#)", without_names)
    assert "default-src 'none'" in page


def test_names_are_escaped_in_json() -> None:
    """A name that would end the script element stays inside the data, unchanged after decoding."""
    hostile = tensor(HOSTILE, max_abs=1e-9)
    page = html.render(Report("out_of_sync", (group(*report(600).groups[0].tensors, hostile),)), "0")
    assert page.count("</script>") == page.count("<script") == 2
    assert "<img" not in page
    assert data(page)["rows"][-1][0] == HOSTILE.replace("\u2028", "\\u2028")


@pytest.mark.slow
def test_the_size_of_a_page_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """50,000 tensors of 8 ranks take less than 6 MB, and rows beyond the limit of the page are counted."""
    page = html.render(report(50_000), "0")
    assert len(page) < 6_000_000
    assert len(data(page)["rows"]) == 49_500
    monkeypatch.setattr(html, "MOST_DATA", 1000)
    first, second = report(1200).groups[0], replace(report(1200).groups[0], run="other")
    page = html.render(Report("out_of_sync", (first, second)), "0")
    assert page.count("200 more tensors are not on this page") == 2


def page_of(folder: Path, shown: Report, driver: str = "") -> Path:
    """Write a page. driver: a script that acts like a user, for which the policy is removed."""
    text = html.render(shown, "0")
    if driver:
        text = re.sub(r"<meta http-equiv=[^>]*>", "", text).replace("</body>", f"<script>{driver}</script></body>")
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.slow
def test_filter_and_order_from_the_url(tmp_path: Path) -> None:
    """A URL opens 50,000 tensors filtered and sorted, without errors or requests."""
    page, console = opened(page_of(tmp_path, report(50_000)), tmp_path / "b", "#filter=ATTN+layers.7.&sort=max+abs")
    assert console == []
    assert [row[0] for row in rows(page)] == [n for n in names(50_000) if "attn" in n and ".layers.7." in n]
    assert "4 of 50000 tensors" in page
    assert 'aria-sort="ascending"' in page
    assert "need JavaScript" not in page


@pytest.mark.slow
def test_hostile_names_in_a_browser(tmp_path: Path) -> None:
    """Names with markup are shown as text, from the rows of the page and from its data."""
    tensors = [tensor(f"{HOSTILE}{i}", max_abs=1.0 / (i + 1)) for i in range(600)]
    page, console = opened(page_of(tmp_path, Report("out_of_sync", (group(*tensors),))), tmp_path / "b", "#sort=tensor")
    assert console == []
    assert "<img" not in page
    assert [row[0] for row in rows(page)] == [f"{HOSTILE}{i}".replace("\u2028", "\\u2028") for i in range(200)]


@pytest.mark.slow
def test_sorting_filtering_and_paging(tmp_path: Path) -> None:
    """Typing filters, the first click sorts descending, the second ascending, and Next shows the next page."""
    driver = """
      const input = document.querySelector('.tensors input');
      input.value = 'norm'; input.dispatchEvent(new Event('input'));
      const heads = [...document.querySelectorAll('.tensors th button')];
      const head = heads.find((button) => button.textContent === 'max abs');
      head.click(); head.click();
      [...document.querySelectorAll('.controls button')].find((button) => button.textContent === 'Next').click();
      document.title = location.hash;
    """
    page, console = opened(page_of(tmp_path, report(1800), driver), tmp_path / "b")
    assert console == []
    assert [row[0] for row in rows(page)] == [n for n in names(1800) if "norm" in n][200:400]
    assert "600 of 1800 tensors, page 2 of 3" in page
    assert "<title>#filter1=norm&amp;sort1=max+abs</title>" in page


@pytest.mark.slow
def test_the_browser_reports_errors_and_requests(tmp_path: Path) -> None:
    """The tests above detect errors in scripts and requests against the policy on the console."""
    _, console = opened(page_of(tmp_path, report(3), "undefined_name()"), tmp_path / "b")
    assert any("undefined_name" in line for line in console)
    page = page_of(tmp_path, report(3))
    page.write_text(page.read_text().replace("</body>", "<img src='http://127.0.0.1:9/x.png'></body>"))
    _, console = opened(page, tmp_path / "b")
    assert any("Content Security Policy" in line for line in console)
