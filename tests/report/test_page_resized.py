"""A page whose window changes its width after loading: charts follow, and nothing is wider than the window."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.browser import opened

import syncheck
from syncheck import diff
from syncheck.report import html

FIXTURES = Path(__file__).parents[2] / "fixtures"
SHARDS = FIXTURES / "conversions/llama_megatron_tp2_pp2"
WIDTHS = """() => [...document.querySelectorAll(".chart")].filter((box) => box.chart).map((box) => [
    box.chart.getWidth() - box.clientWidth, box.querySelector("canvas").getBoundingClientRect().right <= innerWidth])"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicas", "steps", "shards"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_follow_the_window(tmp_path: Path, kind: str, scheme: str) -> None:
    """Narrowed to 400 pixels and widened again, each chart is as wide as its place, also one that was hidden."""
    if kind == "shards":
        report = diff(SHARDS / "a", SHARDS / "b", histograms=True)
    else:
        folder = {"replicas": "bn_local_stats", "steps": "bn_lag_over_steps"}[kind]
        report = syncheck.compare(FIXTURES / "desync" / folder, histograms=True)
    path = tmp_path / "page.html"
    path.write_text(html.render(report, "0"), encoding="utf-8")
    with opened(path, color_scheme=scheme) as (page, messages):
        for width in (400, 1280, 640):
            page.set_viewport_size({"width": width, "height": 900})
            while (closed := page.locator("details:not([open]) > summary:visible")).count():
                closed.first.click()
            # A chart waits until the size stays.
            page.wait_for_function(f"() => ({WIDTHS})().every(([excess, fits]) => excess === 0 && fits)")
            assert page.evaluate(WIDTHS)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert messages == []
