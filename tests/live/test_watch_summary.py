"""The last line of a watched run: in sync only if the whole run was watched."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import list_fields

from syncheck.diagnose.syn107_settings_differ import Text
from syncheck.errors import UsageError
from syncheck.live.reporter import Reporter
from syncheck.live.watching.judge import Judgement
from syncheck.live.watching.settings import WatchSettings
from syncheck.live.watching.summary import Ending, Summary
from syncheck.live.witnesses.witness import Suspicion
from syncheck.report.events import read_events

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("steps", "comparisons", "is_complete", "normally", "verdict"),
    [
        (5, 9, True, True, "trained parameters in sync"),
        (5, 9, True, False, "in sync so far"),
        (5, 0, True, False, "could not tell"),
        (5, 9, False, True, "could not tell"),
        (0, 0, True, True, "could not tell"),
        (0, 0, True, False, "could not tell"),
        (5, 0, True, True, "could not tell"),
    ],
    ids=[
        "watched",
        "ended by a signal",
        "shards, ended by a signal",
        "watching ended early",
        "no step",
        "ended before a step",
        "shards",
    ],
)
def test_only_a_watched_run_is_in_sync(
    steps: int, comparisons: int, is_complete: bool, normally: bool, verdict: str
) -> None:
    """If watching ended before the run, or saw no step, nobody knows whether the ranks are in sync."""
    lines: list[str] = []
    reporter: Any = SimpleNamespace(print_text=lambda text, _style: lines.append(text))
    judged = Counter(steps=steps, comparisons=comparisons, ends=comparisons)
    ending = Ending(judged, is_complete=is_complete, normally=normally)
    Summary(reporter, WatchSettings()).print_end(ending)
    assert [line.partition(":")[0] for line in lines] == [verdict]


@pytest.mark.parametrize(
    ("normally", "fails", "verdict"),
    [
        (True, False, "could not tell for reduction 4, "),
        (False, False, "in sync so far: "),
        (True, True, "OUT OF SYNC"),
    ],
)
def test_steps_without_judgement_are_named(normally: bool, fails: bool, verdict: str) -> None:
    """A step whose records did not come in time may have a fault: the run is not in sync, and the line names it."""
    lines: list[str] = []
    reporter = Reporter(console=False)
    reporter.print_text = lambda text, _style="": lines.append(text)  # type: ignore[assignment, method-assign]
    judged = Counter(steps=3, comparisons=3, ends=1)
    summary = Summary(reporter, WatchSettings())
    if fails:
        summary.add(Judgement(3, "reduction", Suspicion("SYN410", (1,), ())))
    summary.print_end(Ending(judged, unjudged=("reduction 4",), normally=normally, is_compared=True))
    (last,) = lines
    assert last.startswith(verdict)
    assert "reduction 4" in last


IN_SYNC: Any = SimpleNamespace(verdict="in_sync", findings=())


@pytest.mark.parametrize(
    ("events", "verdict"),
    [
        (("in_sync", "SYN410", "in_sync"), "in sync again"),
        (("in_sync", "SYN410"), "OUT OF SYNC"),
        (("SYN410", "in_sync", "SYN410"), "OUT OF SYNC"),
        (("SYN401", "in_sync"), "in sync, with findings"),
        (("SYN410",), "OUT OF SYNC"),
    ],
)
def test_a_comparison_in_sync_after_the_last_finding(events: tuple[str, ...], verdict: str) -> None:
    """Replicas are in sync again if a comparison found them in sync after the last finding of a witness."""
    lines: list[str] = []
    reporter = Reporter(console=False)
    reporter.print_text = lambda text, _style="": lines.append(text)  # type: ignore[assignment, method-assign]
    summary = Summary(reporter, WatchSettings())
    for number, event in enumerate(events, 1):
        if event == "in_sync":
            summary.reports.append(IN_SYNC)
        else:
            summary.add(Judgement(number, "reduction", Suspicion(event, (1,), ())))
    summary.print_end(Ending(Counter(steps=9, comparisons=9, ends=1), is_compared=True))
    assert lines[-1].partition(":")[0] == verdict


def test_after_an_error_the_last_comparison_counts() -> None:
    """Nobody knows the parameters after it, although the gradients were equal up to the error."""
    lines: list[str] = []
    reporter: Any = SimpleNamespace(print_text=lambda text, _style: lines.append(text))
    ending = Ending(Counter(steps=7, comparisons=7), normally=False, last_comparison=2)
    Summary(reporter, WatchSettings()).print_end(ending)
    assert lines[-1].startswith("in sync when last compared")
    assert "step 2" in lines[-1]


START = {"event": "start", "time": "t", "step": 0, "ranks": [0, 1]}
CHECK = {
    "event": "check", "time": "t", "step": 20, "verdict": "in_sync", "tensors": 3, "compared": 3, "findings": [],
}  # fmt: skip


def write_witnessed(path: Path, *events: dict[str, Any], code: str = "SYN410", allow: tuple[str, ...] = ()) -> None:
    """Write an event file in which the witnesses of a watched run find a fault twice, after other events."""
    path.write_text("".join(f"{json.dumps(event)}\n" for event in (START, *events)), encoding="utf-8")
    summary = Summary(Reporter(console=False, events=path), WatchSettings(allow=allow))
    for number in (7, 9):
        summary.add(Judgement(number, "reduction", Suspicion(code, (1,), ())))


@pytest.mark.parametrize(
    ("events", "code", "allow", "verdict"),
    [
        ((CHECK,), "SYN410", (), "out_of_sync"),
        ((), "SYN410", (), "out_of_sync"),
        ((CHECK,), "SYN404", (), "in_sync"),
        ((CHECK,), "SYN410", ("SYN410",), "in_sync"),
        ((), "SYN404", (), "undecided"),
    ],
    ids=["after a check", "without a check", "information", "allowed", "information without a check"],
)
def test_report_of_witnessed_events(
    tmp_path: Path, events: tuple[dict[str, Any], ...], code: str, allow: tuple[str, ...], verdict: str
) -> None:
    """A report of event files has what the witnesses found, once and with its first place, and their verdict."""
    path = tmp_path / "events.jsonl"
    write_witnessed(path, *events, code=code, allow=allow)
    report = read_events([path])
    (finding,) = report.findings
    assert (report.verdict, finding.code, finding.ranks) == (verdict, code, (1,))
    assert "reduction 7" in finding.evidence


def test_kinds_of_settings_have_causes_of_their_own(tmp_path: Path) -> None:
    """Two kinds of settings that differ are two findings, also in the report; the steps count once."""
    path = tmp_path / "events.jsonl"
    path.write_text(f"{json.dumps(START)}\n", encoding="utf-8")
    lines: list[str] = []
    reporter = Reporter(console=False, events=path)
    reporter.print_text = lambda text, _style="": lines.append(text)  # type: ignore[assignment, method-assign]
    summary = Summary(reporter, WatchSettings())
    for number in (7, 9):
        for kind in ("", "_MODES"):
            summary.add(Judgement(number, "reduction", Suspicion("SYN107", (1,), (), variant=kind)))
    summary.print_end(Ending(Counter(steps=9, comparisons=9)))
    assert lines[-1].count("SYN107") == 1
    assert "at 2 steps" in lines[-1]
    findings = read_events([path]).findings
    assert list(map(str, list_fields(findings, "cause"))) == [Text.CAUSE.value, Text.CAUSE_MODES.value]


def test_softened_event_of_a_witness(tmp_path: Path) -> None:
    """A finding that was edited to be information is refused."""
    path = tmp_path / "events.jsonl"
    write_witnessed(path, CHECK, code="SYN214")
    path.write_text(path.read_text(encoding="utf-8").replace('"severity": "error"', '"severity": "info"'))
    with pytest.raises(UsageError, match="line 3: severity info contradicts the code SYN214"):
        read_events([path])
