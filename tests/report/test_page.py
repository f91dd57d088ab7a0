"""The HTML page: as text, and with its script in a real browser."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.browser import opened
from support.large import group, names, report, tensor
from support.listings import find_texts, list_fields
from support.real_runs import FIXTURES, compare_real_runs

import syncheck
from syncheck.conversion.diff import diff
from syncheck.diagnose.series import by_run
from syncheck.records import Report
from syncheck.report import html, page_tables
from syncheck.report.page_data import make_data

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&amp;\u2028'\""
PICTURES = Path(__file__).parent / "snapshots"


def rows(page: str) -> list[list[str]]:
    """Return the cells of the table of tensors in a page."""
    body = page.partition('class="tensors"')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    return [
        [unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in re.findall(r"<tr[^>]*>(.*?)</tr>", body, re.DOTALL)
    ]


def write(folder: Path, shown: Report) -> Path:
    """Write a page."""
    path = folder / "page.html"
    path.write_text(html.render(shown, "0"), encoding="utf-8")
    return path


def test_without_javascript() -> None:
    """Without JavaScript the page has the verdict, the findings, and the worst 200 tensors."""
    page = html.render(report(1200), "0")
    output = rows(page)
    assert list_fields(output, 0) == names(1200)[: -1 - page_tables.MOST_ROWS : -1]
    assert {tuple(row[1:4]) for row in output} == {("parameter", "0-6 | 7", "12 of 262144")}
    assert "... and 1000 more" in page
    assert "<h1>OUT OF SYNC</h1>" in page
    assert '<article class="finding error" id="SYN212">' in page


def test_page_loads_nothing() -> None:
    """The page has no address, and a policy forbids loading."""
    page = html.render(report(700), "0").replace(html._read("echarts.js"), "")
    addresses = set(re.findall(r"https?:[^\s\"'<]*", page))
    assert addresses == set()
    assert not re.search(r"@import|url\((?!#)|<(img|link|iframe)", page)
    assert "default-src 'none'" in page
    # The library names addresses in messages and namespaces, and never loads one.
    library = html._read("echarts.js")
    assert not re.search(r"\bfetch\(|XMLHttpRequest|importScripts|\bimport\(|\beval\(|new Function", library)


def test_names_are_escaped() -> None:
    """A name that would end the script element stays inside the data, and is text elsewhere."""
    hostile = tensor(HOSTILE, max_abs=9.0)
    page = html.render(Report("out_of_sync", (group(hostile, *report(600).groups[0].tensors),)), "0")
    assert page.count("</script>") == page.count("<script") == 3
    assert "<img" not in page
    assert rows(page)[0][0] == HOSTILE.replace("\u2028", "\\u2028")


def test_about_lists_how_the_page_was_made() -> None:
    """Version, command and time are at the end of the page; the time is also in its header."""
    page = html.render(report(3), "1.2", [("written", "today"), ("command", "syncheck <b>"), ("options", "")])
    about = page.partition('id="about"')[2]
    labels = re.findall(r"<dt>(.*?)</dt><dd[^>]*>(.*?)</dd>", about)
    assert labels == [("syncheck", "1.2"), ("written", "today"), ("command", "syncheck &lt;b&gt;")]
    assert "today" in page.partition("</header>")[0]


def test_counts_are_those_of_a_step() -> None:
    """With several steps, the header counts the last step, and a table has the counts of each step."""
    runs = syncheck.compare(FIXTURES / "desync/stale_rank")
    page = html.render(runs, "0")
    assert "step 12: 67 tensors: 0 identical" in page.partition("</header>")[0]
    table = page.partition('id="steps"')[2].partition("</table>")[0]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row)[:5] for row in re.findall(r"<tr>(.*?)</tr>", table)[1:]]
    assert cells == [["11", "IN SYNC", "-", "67", "0"], ["12", "OUT OF SYNC", "SYN217", "0", "67"]]


def test_steps_of_several_runs_name_the_run() -> None:
    """The steps have columns for the run and the ranks only if these differ between the steps."""
    titles = re.compile(r'<th scope="col" class="\w*">(.*?)</th>')
    runs = html.render(compare_real_runs(), "0").partition('id="steps"')[2].partition("</table>")[0]
    steps = html.render(syncheck.compare(FIXTURES / "desync/stale_rank"), "0").partition('id="steps"')[2]
    assert titles.findall(runs)[:2] == ["run", "step"]
    assert titles.findall(steps)[:2] == ["step", "verdict"]


def test_drift_is_shown_for_batchnorm_in_several_runs_only() -> None:
    """The page has the drift of statistics only for a finding about them, and if there are several runs to compare."""
    pages = {
        "several runs": compare_real_runs(),
        "one run": syncheck.compare(FIXTURES / "desync/bn_no_broadcast"),
        "another finding": syncheck.compare(FIXTURES / "desync/stale_rank", FIXTURES / "in_sync/ddp_no_bn"),
    }
    have_drift = {name: 'id="drift"' in html.render(shown, "0") for name, shown in pages.items()}
    assert have_drift == {"several runs": True, "one run": False, "another finding": False}


def test_a_drift_of_one_run_has_no_second_curve() -> None:
    """Beside a run in sync, the drift of the other run is a table; the curve of its finding has the same numbers."""
    one_drifts = syncheck.compare(FIXTURES / "desync/bn_no_broadcast", FIXTURES / "in_sync/sync_bn")
    curves = {}
    for name, shown in (("one", one_drifts), ("two", compare_real_runs())):
        data = make_data(shown, by_run(shown.groups))
        assert data is not None
        assert 'id="drift"' in html.render(shown, "0")
        curves[name] = len(data["drift"])
    assert curves == {"one": 0, "two": 2}


def test_kinds_of_tensors() -> None:
    """A page has the counts of each kind of tensor; in sync, its header lists the kinds that were compared."""
    page = html.render(syncheck.compare(FIXTURES / "in_sync/sync_bn"), "0")
    header, _, sections = page.partition("</header>")
    assert "67 compared tensors: 23 parameter, 7 bn_mean, 7 bn_var, 7 bn_count, 23 optimizer." in header
    table = sections.partition("Tensors by kind")[2].partition("</table>")[0]
    assert re.findall(r"<td[^>]*>(.*?)</td>", table)[:3] == ["parameter", "23", "23"]


def test_code_in_a_fix_is_code() -> None:
    """The code of a fix is an element of its own, escaped, and names from files never are."""
    page = html.render(syncheck.compare(FIXTURES / "desync/bn_local_stats"), "0")
    fix = page.partition('<dd class="fix">')[2].partition("</dd>")[0]
    codes = [unescape(code) for code in re.findall(r"<code>(.*?)</code>", fix)]
    assert codes == [
        "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
        "for b in model.buffers(): dist.broadcast(b, 0)",
        "allow='SYN201'",
    ]


def rename_layers(folder: Path) -> tuple[Path, Path]:
    """Write two models of 12 layers with equal data, and the names of two libraries."""
    numpy = pytest.importorskip("safetensors.numpy")
    values = np.random.default_rng(0)
    kinds = ("attention.query", "attention.key", "mlp.up", "mlp.down", "norm")
    names = [f"model.layers.{layer}.{kind}.weight" for layer in range(12) for kind in kinds]
    tensors = {name: values.standard_normal((4, 4)) for name in names}
    renamed = {name.replace("model.layers", "blocks").replace("mlp", "ff"): tensors[name] for name in names}
    numpy.save_file(tensors, folder / "a.safetensors")
    numpy.save_file(renamed, folder / "b.safetensors")
    return folder / "a.safetensors", folder / "b.safetensors"


def test_an_undecided_verdict_has_its_reason_below(tmp_path: Path) -> None:
    """The heading of an undecided page is the verdict; the reason, a sentence, is a paragraph."""
    page = html.render(diff(*rename_layers(tmp_path)), "0")
    assert "<h1>COULD NOT TELL</h1>" in page
    header = re.findall(r'<p class="text">(.*?)</p>', page.partition("</header>")[0])
    assert find_texts(header, "inferred map")


def test_most_rules_of_a_map_are_folded(tmp_path: Path) -> None:
    """The first rules of an inferred map are visible, and the rest is folded, with its number."""
    page = html.render(diff(*rename_layers(tmp_path)), "0")
    visible, _, rest = page.partition("Tensors by kind")[0].partition("<details><summary>")
    title, _, folded = rest.partition("</summary>")
    assert (visible.count(" = "), folded.count(" = ")) == (3, 2)
    assert title.startswith("2 ")


@pytest.mark.slow
def test_the_size_of_a_page_is_bounded() -> None:
    """A page of 50,000 tensors of 8 ranks takes less than 2 MB, half of it at most for the charting library."""
    page = html.render(report(50_000), "0")
    assert len(page) < 2_000_000
    assert len(html._read("echarts.js")) < 1_000_000
    own_values = [html._read(name).count("\n") for name in ("page.js", "page.css")]
    assert sum(own_values) <= 800


@pytest.mark.slow
def test_filter_and_order_from_the_url(tmp_path: Path) -> None:
    """A URL opens 50,000 tensors filtered and sorted, without errors or requests."""
    path = write(tmp_path, report(50_000))
    with opened(path, "#filter=ATTN+layers.7.&sort=max+abs") as (page, messages):
        text = page.content()
        assert messages == []
    assert list_fields(rows(text), 0) == [n for n in names(50_000) if "attn" in n and ".layers.7." in n]
    assert "4 of 50000 tensors" in text
    assert 'aria-sort="ascending"' in text


@pytest.mark.slow
def test_hostile_names_in_a_browser(tmp_path: Path) -> None:
    """Names with markup are shown as text, in tables, lists and charts."""
    tensors = [tensor(f"{HOSTILE}{i}", max_abs=1.0 / (i + 1)) for i in range(600)]
    with opened(write(tmp_path, Report("out_of_sync", (group(*tensors),))), "#sort=tensor") as (page, messages):
        page.mouse.move(*center(page, ".chart"))
        text = page.content()
        assert messages == []
    assert "<img" not in text
    assert list_fields(rows(text), 0) == [f"{HOSTILE}{i}".replace("\u2028", "\\u2028") for i in range(200)]


def center(page: Any, selector: str) -> tuple[float, float]:
    """Return the middle of the first element in the window."""
    page.locator(selector).first.scroll_into_view_if_needed()
    box = page.locator(selector).first.bounding_box()
    return box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.4


@pytest.mark.slow
def test_sorting_filtering_and_paging(tmp_path: Path) -> None:
    """Typing filters, the first click sorts descending, the second ascending, and Next shows the next page."""
    with opened(write(tmp_path, report(1800))) as (page, messages):
        page.locator(".tensors input").fill("norm")
        head = page.locator(".tensors th button", has_text="max abs")
        head.click()
        head.click()
        page.locator(".tensors button", has_text="Next").click()
        text, url = page.content(), page.url
        assert messages == []
    assert list_fields(rows(text), 0) == find_texts(names(1800), "norm")[200:400]
    assert "600 of 1800 tensors, page 2 of 3" in text
    assert url.endswith("#filter1=norm&sort1=max+abs")


@pytest.mark.slow
def test_a_link_to_a_tensor(tmp_path: Path) -> None:
    """A link to a tensor opens its run at the page with its row, and marks the row; so does a click in the page."""
    ours, second = report(1800).groups[0], replace(report(900).groups[0], run="other")
    path = write(tmp_path, Report("out_of_sync", (ours, second)))
    expected = names(900)[7]
    with opened(path, f"#tensor2={expected}") as (page, messages):
        row = page.locator("#run2 tr.chosen")
        row.wait_for()
        assert row.locator("td").first.inner_text() == expected
        assert page.locator("#run2").get_attribute("open") is not None
        first = page.locator("#findings dd a[href^='#tensor1=']").first
        first.click()
        page.locator("#run1 tr.chosen").wait_for()
        assert page.locator("#run1 tr.chosen td").first.inner_text() == first.inner_text()
        assert messages == []


@pytest.mark.slow
def test_the_slider_shows_every_step(tmp_path: Path) -> None:
    """The slider changes table, charts and URL; keys move it, and a link restores the step."""
    path = write(tmp_path, syncheck.compare(FIXTURES / "desync/bn_no_broadcast", histograms=True))
    with opened(path) as (page, messages):
        slider = page.locator("input[type=range]")
        count = int(slider.get_attribute("max")) + 1
        observed, pictures = [], set()
        for _ in range(count):
            observed.append(page.locator("output").inner_text())
            pictures.add(page.locator(".chart").nth(1).screenshot())
            slider.press("ArrowLeft")
        assert len(set(observed)) == count > 2
        assert len(pictures) > 1
        assert "step1=2" in page.url
        assert messages == []
        last = page.locator("output").inner_text()
    with opened(path, "#step1=2") as (page, messages):
        assert page.locator("output").inner_text() == last
        assert messages == []


@pytest.mark.slow
def test_zoom_in_the_map_of_differences(tmp_path: Path) -> None:
    """A click on several tensors zooms, a click on one tensor opens its row, and buttons move and zoom back."""
    with opened(write(tmp_path, report(3600))) as (page, messages):
        status = page.locator(".charts [role=status]").first
        assert status.inner_text() == "3600 of 3600 tensors"
        chart = page.locator(".chart").first
        x = chart.bounding_box()["width"] - 60  # the last rank, which differs
        chart.click(position={"x": x, "y": 200})
        assert status.inner_text() == "60 of 3600 tensors"
        chart.click(position={"x": x, "y": 30})
        page.locator("tr.chosen").wait_for()
        for name, expected in (("Zoom out", None), ("Down", None), ("Up", None), ("All", "3600 of 3600 tensors")):
            page.get_by_role("button", name=name, exact=True).click()
            assert expected in (None, status.inner_text())
        page.get_by_role("button", name="Zoom in", exact=True).click()
        assert status.inner_text() == "1800 of 3600 tensors"
        assert messages == []


@pytest.mark.slow
@pytest.mark.parametrize(("count", "are_visible"), [(60, False), (61, True)])
def test_few_tensors_need_no_zoom(tmp_path: Path, count: int, *, are_visible: bool) -> None:
    """The buttons to zoom exist only if several tensors share a row."""
    with opened(write(tmp_path, report(count))) as (page, messages):
        assert page.get_by_role("button", name="Zoom in", exact=True).is_visible() == are_visible
        assert messages == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "heading", "scale"),
    [(8, "Where the differences are", "in units of its values"), (2, "Differences along the depth of the model", "")],
)
def test_replicas_have_a_map_and_two_have_bars(tmp_path: Path, ranks: int, heading: str, scale: str) -> None:
    """Several replicas have a map with a scale of its colors; two have bars, which need none."""
    with opened(write(tmp_path, report(3, ranks))) as (page, messages):
        assert page.locator(".charts h3").first.inner_text() == heading
        assert scale in page.locator(".scale").inner_text()
        assert bool(scale) == bool(page.locator(".scale").inner_text())
        assert messages == []


@pytest.mark.slow
def test_bars_open_the_row_of_their_tensor(tmp_path: Path) -> None:
    """A click on the bar of a tensor of two models marks its row; names with markup are text."""
    tensors = [tensor(f"{HOSTILE}{i}", 2, max_abs=0.5) for i in range(3)]
    shown = Report("out_of_sync", (group(*tensors, ranks=2),))
    with opened(write(tmp_path, shown)) as (page, messages):
        chart = page.locator(".chart").first
        box = chart.bounding_box()
        # The last bar.
        chart.click(position={"x": box["width"] * 0.6, "y": box["height"] - 24})
        page.locator("tr.chosen").wait_for()
        assert page.locator("tr.chosen td").first.inner_text().startswith("</script>")
        assert messages == []


@pytest.mark.slow
def test_only_commands_have_a_button_to_copy(tmp_path: Path) -> None:
    """Names in the sentence of a fix have no button; statements and commands have one without text."""
    with opened(write(tmp_path, syncheck.compare(FIXTURES / "desync/bn_no_broadcast"))) as (page, messages):
        codes = page.locator(".finding dd code")
        buttons = page.locator(".finding dd code + button.copy")
        copied = [button.get_attribute("title").removeprefix("Copy ") for button in buttons.all()]
        assert set(copied) == {code for code in codes.all_inner_texts() if " " in code}
        assert "syncheck explain SYN202" in copied
        assert "forward_sync_buffers" in codes.all_inner_texts()
        assert set(buttons.all_inner_texts()) == {""}
        assert messages == []


# The names of rows, the bounds and steps of the axis, and the width of the bars of the first chart.
LAYOUT = """() => {
    const {chart} = document.querySelector(".chart");
    const {xAxis: [x], yAxis: [y]} = chart.getOption();
    const {width} = chart.getModel().getComponent("grid").coordinateSystem.getRect();
    return {labels: y.data.map((name) => y.axisLabel.formatter(name)), max: x.max, interval: x.interval, width};
}"""
DEEP = "model.language_model.layers.{}.mlp.experts.{}.down_projection.weight"


@pytest.mark.slow
def test_a_narrow_chart_of_bars_has_room(tmp_path: Path) -> None:
    """At 400 pixels, bars have most of the width, the axis has even steps, and labels keep the numbers of layers."""
    names_of_layers = [DEEP.format(layer, layer * 7) for layer in range(9, 14)]
    tensors = [tensor(name, 2, max_abs=10.0 ** (2 - 2 * i)) for i, name in enumerate(names_of_layers)]
    with opened(write(tmp_path, Report("out_of_sync", (group(*tensors, ranks=2),))), width=400) as (page, messages):
        layout = page.evaluate(LAYOUT)
        assert messages == []
    assert layout["width"] > 280
    assert layout["max"] % layout["interval"] == 0
    assert [re.findall(r"\d+", label) for label in layout["labels"]] == [[str(i), str(i * 7)] for i in range(9, 14)]
    assert max(map(len, layout["labels"])) <= 54


@pytest.mark.slow
def test_a_narrow_map_has_names_in_two_lines(tmp_path: Path) -> None:
    """At 400 pixels, the names of a map keep the numbers of layers, in lines of at most 28 characters."""
    tensors = [tensor(DEEP.format(layer, layer * 7)) for layer in range(9, 14)]
    with opened(write(tmp_path, Report("out_of_sync", (group(*tensors),))), width=400) as (page, messages):
        labels = page.evaluate(LAYOUT)["labels"]
        assert messages == []
    assert [re.findall(r"\d+", label) for label in labels] == [[str(i), str(i * 7)] for i in range(9, 14)]
    assert max(len(line) for label in labels for line in label.split("\n")) <= 28


@pytest.mark.slow
def test_kinds_have_a_legend_that_wraps(tmp_path: Path) -> None:
    """The kinds of a chart of bars are named in the page, so that none is hidden in a narrow window."""
    stale = FIXTURES / "desync/stale_rank"
    shown = diff(stale / "step_11/rank_0.pth", stale / "step_12/rank_0.pth")
    with opened(write(tmp_path, shown), width=400) as (page, messages):
        kinds = page.locator(".scale").first.locator("> span").all_inner_texts()
        assert [kind.strip() for kind in kinds] == ["parameter", "bn_mean", "bn_var", "bn_count", "optimizer"]
        assert messages == []


@pytest.mark.slow
def test_a_table_of_names_is_folded(tmp_path: Path) -> None:
    """Two models with other names list five tensors first, and all after a click; equal names are not listed."""
    with opened(write(tmp_path, diff(*rename_layers(tmp_path), histograms=True))) as (page, messages):
        table = page.locator("#run1 .charts table")
        assert table.locator("tbody tr:visible").count() == 5
        page.locator("#run1 .charts button", has_text="55 more").click()
        assert table.locator("tbody tr:visible").count() == 60
        assert messages == []


@pytest.mark.slow
def test_shards_have_their_bounds_on_the_axes(tmp_path: Path) -> None:
    """The axes of the map of shards have the bounds of the parts, not steps that collide with the size."""
    conversions = FIXTURES / "conversions/llama_megatron_tp2_pp2"
    with opened(write(tmp_path, diff(conversions / "a", conversions / "b", histograms=True))) as (page, messages):
        bounds = page.evaluate("""() => [...document.querySelectorAll(".plane .chart")].map((box) =>
            box.chart.getOption().yAxis[0].axisLabel.customValues)""")
        assert bounds == [[0, 100], [0, 64, 128]]
        assert messages == []


@pytest.mark.slow
def test_tensors_of_a_module_share_a_row(tmp_path: Path) -> None:
    """A click on a row of a module shows its tensors; 12 modules of 12 tensors have 12 rows first."""
    with opened(write(tmp_path, report(144))) as (page, messages):
        chart = page.locator(".chart").first
        assert chart.bounding_box()["height"] == 90 + 18 * 12
        chart.click(position={"x": chart.bounding_box()["width"] - 60, "y": 100})
        assert page.locator(".charts [role=status]").first.inner_text() == "12 of 144 tensors"
        assert messages == []


@pytest.mark.slow
def test_a_wide_table_keeps_its_first_column(tmp_path: Path) -> None:
    """In a narrow window, the first column of a table stays while the other columns scroll."""
    with opened(write(tmp_path, report(3)), width=400) as (page, messages):
        table = page.locator(".tensors .wide")
        cells = table.locator("tbody tr").first.locator("td")
        before = cells.first.bounding_box()["x"], cells.nth(1).bounding_box()["x"]
        table.evaluate("each => (each.scrollLeft = 100)")
        after = cells.first.bounding_box()["x"], cells.nth(1).bounding_box()["x"]
        assert (before[0] - after[0], before[1] - after[1]) == (0, 100)
        assert messages == []


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return pages of every kind: several runs, two models out of sync and in sync, replicas in sync."""
    conversions = FIXTURES / "conversions/llama_megatron_tp2_pp2"
    created = {
        "runs": compare_real_runs(),
        "stale": syncheck.compare(FIXTURES / "desync/stale_rank", histograms=True),
        "models": diff(FIXTURES / "desync/stale_rank/step_11/rank_0.pth",
                       FIXTURES / "desync/stale_rank/step_12/rank_0.pth", histograms=True),
        "layouts": diff(conversions / "a", conversions / "b", histograms=True),
        "in-sync": syncheck.compare(FIXTURES / "in_sync/sync_bn"),
    }  # fmt: skip
    result = {}
    for name, first in created.items():
        result[name] = tmp_path_factory.mktemp(name) / "page.html"
        result[name].write_text(html.render(first, "VERSION", [("written", "now")]), encoding="utf-8")
    return result


KINDS = ("runs", "stale", "models", "layouts", "in-sync")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "width"), [*product(KINDS, (400, 1280)), ("stale", 1920)])
def test_every_control(pages: dict[str, Path], kind: str, width: int) -> None:
    """Every control can be used without an error, and the page is never wider than the window."""
    context = {"permissions": ["clipboard-read", "clipboard-write"]} if width == 1280 else {}
    with opened(pages[kind], width=width, color_scheme="dark" if width == 400 else "light", **context) as (
        page,
        observed,
    ):
        while (closed := page.locator("details:not([open]) > summary:visible")).count():
            closed.first.click()
        for select in page.locator("select").all():
            for i in range(min(5, select.locator("option").count())):
                select.select_option(index=i)
            select.select_option(index=0)
        for slider in page.locator("input[type=range]").all():
            for key in ("Home", "End", "ArrowLeft"):
                slider.press(key)
        for field in page.locator("input[type=search]").all():
            field.fill("weight")
            field.fill("")
        for button in page.locator("button:visible:enabled").all():
            if button.is_visible() and button.is_enabled():
                button.click()
        for link in page.locator("a[href^='#']:visible").all()[:8]:
            link.click()
        for chart in page.locator(".chart").all():
            chart.hover()
        assert observed == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if width == 1280 and (copies := page.locator("dd code + button.copy")).count():
            copies.first.click()
            code = page.locator("dd code:has(+ button.copy)").first
            assert page.evaluate("navigator.clipboard.readText()") == code.inner_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_keyboard_and_labels(pages: dict[str, Path], kind: str) -> None:
    """Every control has a name for screen readers, charts have a description, and Tab reaches each control."""
    with opened(pages[kind]) as (page, _):
        unnamed = page.evaluate("""[...document.querySelectorAll("button, input, select, a, [role]")].filter(
            (each) => !(each.textContent.trim() || each.labels?.length || each.ariaLabel || each.role === "status")
        ).map((each) => each.outerHTML)""")
        assert unnamed == []
        expected = page.locator("button:visible:enabled, input:visible, select:visible").count()
        page.evaluate("document.activeElement.blur()")
        reached = set()
        for _ in range(expected + 400):
            page.keyboard.press("Tab")
            tag, position = page.evaluate(
                "[document.activeElement.tagName, [...document.querySelectorAll('*')].indexOf(document.activeElement)]"
            )
            if tag == "BODY":
                break
            if tag in ("BUTTON", "INPUT", "SELECT"):
                reached.add(position)
        assert len(reached) == expected


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", KINDS)
def test_pictures(pages: dict[str, Path], kind: str, scheme: str, tmp_path: Path) -> None:
    """The page looks as in the committed picture, scaled down so that fonts do not matter.

    After a change of the look, rewrite the pictures and look at them: SYNCHECK_SNAPSHOTS=write pytest -m slow ...
    """
    image = pytest.importorskip("PIL.Image")
    chops = pytest.importorskip("PIL.ImageChops")
    stat = pytest.importorskip("PIL.ImageStat")
    path = PICTURES / f"page-{kind}-{scheme}.png"
    expected = image.open(path).convert("RGB")
    difference = 255.0
    with opened(pages[kind], color_scheme=scheme) as (page, messages):
        # The charts need longer on a busy machine.
        for _ in range(20):
            page.wait_for_timeout(300)
            page.screenshot(path=tmp_path / "shot.png")
            shot = image.open(tmp_path / "shot.png").convert("RGB").resize((128, 90), image.Resampling.BOX)
            difference = max(stat.Stat(chops.difference(shot, expected)).mean)
            if difference < 6:
                break
        assert messages == []
    if os.environ.get("SYNCHECK_SNAPSHOTS") == "write":
        shot.save(path, optimize=True)
    else:
        assert difference < 6
    background = shot.getpixel((0, 0))
    assert (min(background) > 240) == (scheme == "light")


@pytest.mark.slow
def test_the_browser_reports_errors_and_requests(tmp_path: Path) -> None:
    """The tests above detect errors in scripts and requests against the policy on the console."""
    path = write(tmp_path, report(3))
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("</body>", "<img src='http://127.0.0.1:9/x.png'></body>"), encoding="utf-8")
    with opened(path) as (page, messages):
        assert find_texts(messages, "Content Security Policy")
        page.evaluate("setTimeout(() => undefined_name())")
        page.wait_for_timeout(100)
        assert find_texts(messages, "undefined_name")
