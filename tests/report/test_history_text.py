"""The history of a finding in every format, and its curve on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.checkpoints import changed, network, save_pth
from support.hostile_names import shorten
from support.hostile_report import HOSTILE
from support.large import group, tensor
from support.listings import is_printable, measure_width
from support.states import omit_prefixes

import syncheck
from syncheck.records import History, HistoryPoint, Report, Trend
from syncheck.report import failure, github, html, junit, markdown, plain, terminal, text
from syncheck.report.finding_text import describe_history, summarize_history
from syncheck.report.parts import Sparkline

if TYPE_CHECKING:
    from pathlib import Path


def make_history(
    *gaps: float | None, agreed: int | None = None, trend: Trend | None = None, names: tuple[str, ...] = ("a.weight",)
) -> History:
    """Return a history of steps 100, 200, ... with these differences; 0.0 is in sync."""
    points = tuple(HistoryPoint((i + 1) * 100, int(gap != 0), gap) for i, gap in enumerate(gaps))
    since = next(point.step for point in points if point.differing)
    return History(points, since, agreed, names, (5,), trend)


def wide(marks: str) -> str:
    """Return marks at their largest width."""
    return "".join(mark * 4 for mark in marks)


def report(history: History | None) -> Report:
    """Return a report of one finding with this history."""
    first = group(tensor("a.weight"), step=400)
    return Report("out_of_sync", (replace(first, findings=(replace(first.findings[0], history=history),)),))


MARKS = "\u00b7?\u2581\u2584\u2588"
LATE, EARLY = "in sync until step 100, out of sync from step 200", "out of sync since the first step compared (100)"


@pytest.mark.parametrize(
    ("history", "since", "rest"),
    [
        (
            make_history(0.0, 1.2e-3, 0.4, agreed=100, trend="growing"),
            LATE,
            "; max abs difference 0.0012 -> 0.4, growing",
        ),
        (make_history(0.5, 0.5, trend="constant"), EARLY, "; max abs difference 0.5 -> 0.5, constant"),
        (make_history(0.0, 0.25, agreed=100), LATE, "; max abs difference 0.25"),
        (make_history(0.5, 0.0, 0.0, 0.25), EARLY, "; in sync again at steps 200, 300; max abs difference 0.5 -> 0.25"),
        (make_history(0.0, None, None, agreed=100), LATE, ""),
        (make_history(None, 0.5), EARLY, "; max abs difference unknown -> 0.5"),
    ],
)
def test_description_of_a_history(history: History, since: str, rest: str) -> None:
    """The description contains the first step, tensor and ranks, later steps in sync, and the differences."""
    finding = replace(report(None).groups[0].findings[0], history=history)
    assert describe_history(finding) == f"{since}, first in a.weight on rank 5{rest}"
    assert summarize_history(finding) == since + (f", {history.trend}" if history.trend else "")
    many = replace(history, tensors=("a.weight", "b", "c"), ranks=(0, 1, 2, 4))
    first = ", first in 3 tensors including a.weight on ranks 0-2,4"
    assert describe_history(replace(finding, history=many)) == f"{since}{first}{rest}"
    assert describe_history(replace(finding, history=None)) == summarize_history(replace(finding, history=None)) == ""


def test_every_format_contains_the_history() -> None:
    """Text, terminal, Markdown, HTML, JUnit, annotations and failed assertions contain an existing history."""
    history = make_history(0.0, 0.0, 1.2e-3, 0.4, agreed=200, trend="growing")
    for drawn in (
        lambda shown: plain.render(text.draw_comparison(shown, 0)),
        lambda shown: plain.render(text.draw_overview(shown, 0)),
        lambda shown: terminal.render(text.draw_overview(shown, 0), 200, color=False),
        markdown.render,
        lambda shown: html.render(shown, "0"),
        lambda shown: "".join(ET.fromstring(junit.render(shown)).itertext()),
        github.render,
        failure.message,
    ):
        assert "in sync until step 200, out of sync from step 300" in drawn(report(history))
        assert "growing" in drawn(report(history))
        assert "in sync until" not in drawn(report(None))


@pytest.mark.parametrize("name", HOSTILE, ids=shorten)
def test_names_in_a_history_are_escaped(name: str) -> None:
    """A hostile name of the first tensor adds no lines or control characters, and failures stay short."""
    output = report(make_history(0.5, 0.5, names=(name,)))
    drawn = plain.render(text.draw_overview(output, 0))
    calm = plain.render(text.draw_overview(report(make_history(0.5, 0.5)), 0))
    assert drawn.count("\n") == calm.count("\n")
    assert is_printable(drawn)
    assert len(failure.message(output)) < 5_000
    ET.fromstring(junit.render(output))


def test_names_in_a_history_are_escaped_in_html() -> None:
    """A name with HTML markup becomes text."""
    page = html.render(report(make_history(0.5, 0.5, names=("<img src=x>",))), "0")
    assert "first in &lt;img src=x&gt; on rank 5" in page
    assert "<img" not in page


def test_marks_of_a_curve() -> None:
    """In sync, unknown and eight levels have separate marks; a range of decades has a logarithmic scale."""
    line = Sparkline((0.0, None, 0.125, 0.5, 1.0), "step 1: 0", "5: 1")
    assert line.render(80) == f"step 1: 0 |{wide(MARKS)}| 5: 1"
    assert line.render(25, ascii_only=True) == "step 1: 0 |_?.=@| 5: 1"
    assert Sparkline((1e-9, 1e-5, 0.1), "a", "b").render(22, ascii_only=True) == "a |..++@@| b, log scale"
    assert Sparkline((0.0, 0.0), "a", "b").render(40, ascii_only=True) == "a |________| b"
    assert Sparkline((5e-324, 1.7e308), "a", "b").render(40, ascii_only=True).startswith("a |....@@@@|")


@pytest.mark.parametrize("width", [30, 80, 200])
def test_a_long_curve_fits(width: int) -> None:
    """With more steps than columns, a peak at one of 10,000 steps stays visible."""
    gaps = [0.0] * 10_000
    gaps[4321] = 1.0
    drawn = Sparkline(tuple(gaps), "step 1: 0", "10000: 0").render(width, ascii_only=True)
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
def test_curve_in_a_pseudo_terminal(tmp_path: Path, columns: int, locale: str, marks: str) -> None:
    """`syncheck report` draws the curve at each width, and in ASCII in the C locale."""
    _run(tmp_path / "ckpts", {1: 0.0, 2: 1e-4, 3: 0.01, 9: 0.5})
    retained = omit_prefixes(os.environ, "LC_")
    command = f"stty columns {columns}; {sys.executable} -m syncheck report"
    done = subprocess.run(
        ["script", "-qec", command, "/dev/null"],
        cwd=tmp_path,
        env=retained | {"LANG": locale, "TERM": "xterm", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 1
    drawn = done.stdout.decode("ascii" if locale == "C" else "utf-8")
    assert f"step 1: 0 |{wide(marks)}| 9: 0.5, log scale" in drawn
    assert measure_width(drawn.splitlines()) <= columns
    assert "in sync until step 1, out of sync from step 2, first in fc.weight on ranks 0-1" in " ".join(drawn.split())
