"""When a finding came about, in every format that tells it, and its curve on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from checkpoints import changed, network, save_pth
from hostile_report import HOSTILE
from large import group, tensor

import syncheck
from syncheck.records import History, HistoryPoint, Report, Trend
from syncheck.report import failure, github, html, junit, markdown, plain, terminal, text, when
from syncheck.report.sparkline import Sparkline

if TYPE_CHECKING:
    from pathlib import Path


def history(
    *gaps: float | None, agreed: int | None = None, trend: Trend | None = None, names: tuple[str, ...] = ("a.weight",)
) -> History:
    """Return a history of steps 100, 200, ...: 0.0 is in sync."""
    points = tuple(HistoryPoint((i + 1) * 100, int(gap != 0), gap) for i, gap in enumerate(gaps))
    since = next(point.step for point in points if point.differing)
    return History(points, since, agreed, names, (5,), trend)


def wide(marks: str) -> str:
    """Return marks as wide as there is room for."""
    return "".join(mark * 4 for mark in marks)


def report(told: History | None) -> Report:
    """Return a report of one finding with this history."""
    one = group(tensor("a.weight"), step=400)
    return Report("out_of_sync", (replace(one, findings=(replace(one.findings[0], history=told),)),))


MARKS = "\u00b7?\u2581\u2584\u2588"
LATE, EARLY = "in sync until step 100, out from step 200", "out of sync since the first step compared (100)"


@pytest.mark.parametrize(
    ("told", "since", "rest"),
    [
        (history(0.0, 1.2e-3, 0.4, agreed=100, trend="growing"), LATE, "; gap 0.0012 -> 0.4, growing"),
        (history(0.5, 0.5, trend="constant"), EARLY, "; gap 0.5 -> 0.5, constant"),
        (history(0.0, 0.25, agreed=100), LATE, "; gap 0.25"),
        (history(0.5, 0.0, 0.0, 0.25), EARLY, "; in sync again at steps 200, 300; gap 0.5 -> 0.25"),
        (history(0.0, None, None, agreed=100), LATE, ""),
        (history(None, 0.5), EARLY, "; gap not known -> 0.5"),
    ],
)
def test_the_sentence(told: History, since: str, rest: str) -> None:
    """It says since when, what was first and where, whether it went away in between, and how the gap went on."""
    finding = replace(report(None).groups[0].findings[0], history=told)
    assert when.sentence(finding) == f"{since}, first tensor a.weight on rank 5{rest}"
    assert when.short(finding) == since + (f", {told.trend}" if told.trend else "")
    many = replace(told, tensors=("a.weight", "b", "c"), ranks=(0, 1, 2, 4))
    first = ", first 3 tensors, among them a.weight, on ranks 0-2,4"
    assert when.sentence(replace(finding, history=many)) == f"{since}{first}{rest}"
    assert when.sentence(replace(finding, history=None)) == when.short(replace(finding, history=None)) == ""


def test_every_format_tells_it() -> None:
    """Text, terminal, markdown, HTML, JUnit, annotations and a failed assertion have it; without a history none has."""
    told = history(0.0, 0.0, 1.2e-3, 0.4, agreed=200, trend="growing")
    for drawn in (
        lambda shown: plain.render(text.comparison(shown, 0)),
        lambda shown: plain.render(text.overview(shown, 0)),
        lambda shown: terminal.render(text.overview(shown, 0), 200, color=False),
        markdown.render,
        lambda shown: html.render(shown, "0"),
        lambda shown: "".join(ET.fromstring(junit.render(shown)).itertext()),
        github.render,
        failure.message,
    ):
        assert "in sync until step 200, out from step 300" in drawn(report(told))
        assert "growing" in drawn(report(told))
        assert "in sync until" not in drawn(report(None))


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:20]))
def test_names_in_it_are_escaped(name: str) -> None:
    """A first tensor of any name is text in every format, and an assertion's message stays short."""
    shown = report(history(0.5, 0.5, names=(name,)))
    drawn = plain.render(text.overview(shown, 0))
    calm = plain.render(text.overview(report(history(0.5, 0.5)), 0))
    assert drawn.count("\n") == calm.count("\n")
    assert all(c.isprintable() or c == "\n" for c in drawn)
    assert len(failure.message(shown)) < 5_000
    ET.fromstring(junit.render(shown))


def test_names_in_it_are_escaped_on_the_page() -> None:
    """A first tensor named like markup is text on the page."""
    page = html.render(report(history(0.5, 0.5, names=("<img src=x>",))), "0")
    assert "first tensor &lt;img src=x&gt; on rank 5" in page
    assert "<img" not in page


def test_the_curve() -> None:
    """In sync, not known and eight heights have marks; over decades it is drawn by logarithms and says so."""
    line = Sparkline((0.0, None, 0.125, 0.5, 1.0), "step 1: 0", "5: 1")
    assert line.drawn(80) == f"step 1: 0 |{wide(MARKS)}| 5: 1"
    assert line.drawn(25, ascii_only=True) == "step 1: 0 |_?.=@| 5: 1"
    assert Sparkline((1e-9, 1e-5, 0.1), "a", "b").drawn(22, ascii_only=True) == "a |..++@@| b, log scale"
    assert Sparkline((0.0, 0.0), "a", "b").drawn(40, ascii_only=True) == "a |________| b"
    assert Sparkline((5e-324, 1.7e308), "a", "b").drawn(40, ascii_only=True).startswith("a |....@@@@|")


@pytest.mark.parametrize("width", [30, 80, 200])
def test_a_long_curve_fits(width: int) -> None:
    """Of more steps than columns, each mark is the largest of its steps: a peak of one step in 10,000 is seen."""
    gaps = [0.0] * 10_000
    gaps[4321] = 1.0
    drawn = Sparkline(tuple(gaps), "step 1: 0", "10000: 0").drawn(width, ascii_only=True)
    assert len(drawn) <= width
    marks = drawn.split("|")[1]
    assert marks.count("@") == 1
    assert abs(marks.index("@") / len(marks) - 0.4321) < 0.15


def _run(folder: Path, gaps: dict[int, float]) -> None:
    for step, gap in gaps.items():
        for rank in range(2):
            state = changed(network(), "fc.weight", by=gap * rank) if gap else network()
            block = syncheck.metadata(run="ddp", rank=rank, world_size=2, step=step, run_id="ddp")
            save_pth(folder / f"history/ddp/step_{step}/rank_{rank}.pth", {"model": state, "syncheck": block})


@pytest.mark.parametrize(
    ("columns", "locale", "marks"),
    [
        (80, "C.UTF-8", "\u00b7\u2581\u2585\u2588"),
        (200, "C.UTF-8", "\u00b7\u2581\u2585\u2588"),
        (80, "C", "_.+@"),
    ],
)
def test_on_a_real_terminal(tmp_path: Path, columns: int, locale: str, marks: str) -> None:
    """`syncheck report` draws it in a pseudo-terminal at each width; in the C locale all of it is ASCII."""
    _run(tmp_path / "ckpts", {1: 0.0, 2: 1e-4, 3: 0.01, 9: 0.5})
    kept = {name: of for name, of in os.environ.items() if not name.startswith("LC_")}
    command = f"stty columns {columns}; {sys.executable} -m syncheck report"
    done = subprocess.run(
        ["script", "-qec", command, "/dev/null"],
        cwd=tmp_path,
        env=kept | {"LANG": locale, "TERM": "xterm", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 1
    drawn = done.stdout.decode("ascii" if locale == "C" else "utf-8")
    assert f"step 1: 0 |{wide(marks)}| 9: 0.5, log scale" in drawn
    assert max(map(len, drawn.splitlines())) <= columns
    assert "in sync until step 1, out from step 2, first tensor fc.weight on ranks 0-1" in " ".join(drawn.split())
