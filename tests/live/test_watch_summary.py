"""The last line of a watched run: in sync only if the whole run was watched."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.listings import list_fields

from syncheck.diagnose.syn107_settings_differ import Text
from syncheck.errors import UsageError
from syncheck.live.reporter import Reporter
from syncheck.live.watching.judge import Judgement
from syncheck.live.watching.session import Session
from syncheck.live.watching.settings import WatchSettings
from syncheck.live.watching.summary import Ending, Summary
from syncheck.live.witnesses.rules import make_finding
from syncheck.live.witnesses.witness import Suspicion
from syncheck.report.events import read_events

if TYPE_CHECKING:
    from collections.abc import Iterable
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
    ("ending", "start", "end"),
    [
        (
            {"last_comparison": 2},
            "trained parameters in sync: ",
            "; buffers and optimizer states last compared at step 2",
        ),
        ({"last_comparison": 2, "is_compared": True}, "in sync: ", "trained parameters equal at the end"),
    ],
)
def test_a_comparison_before_the_end_says_nothing_of_buffers_at_the_end(
    ending: dict[str, Any], start: str, end: str
) -> None:
    """The parameters were compared at the end, and all replicas some steps before."""
    lines: list[str] = []
    reporter: Any = SimpleNamespace(print_text=lambda text, _style: lines.append(text))
    summary = Summary(reporter, WatchSettings())
    summary.reports = [make_report("in_sync")]
    summary.print_end(Ending(Counter(steps=5, comparisons=9, ends=1), **ending))
    (last,) = lines
    assert last.startswith(start)
    assert last.endswith(end)


def test_ranks_that_exchange_nothing_are_told_how_to_train_together() -> None:
    """A script without a wrapper trains a model on each rank."""
    lines: list[str] = []
    reporter: Any = SimpleNamespace(print_text=lambda text, _style: lines.append(text))
    for is_separate in (False, True):
        ending = Ending(Counter(steps=5, ends=1), is_separate=is_separate)
        Summary(reporter, WatchSettings()).print_end(ending)
    assert ["DistributedDataParallel" in line for line in lines] == [False, True]


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


@pytest.mark.parametrize(
    ("telling", "ranks", "is_named"),
    [((0,), (0, 1, 2), True), ((0, 2), (0, 1, 2), True), ((0, 1, 2), (0, 1, 2), False), ((), (0, 1), False)],
)
def test_an_optimizer_of_some_ranks_only_is_the_reason(
    telling: tuple[int, ...], ranks: tuple[int, ...], is_named: bool
) -> None:
    """In an actor-learner program, one rank steps: nothing is judged, and the last line names the rank."""
    lines: list[str] = []
    reporter = Reporter(console=False)
    reporter.print_text = lambda text, _style="": lines.append(text)  # type: ignore[assignment, method-assign]
    ending = Ending(Counter(), unjudged=("step 1",), telling=telling, ranks=ranks, world_size=len(ranks))
    Summary(reporter, WatchSettings()).print_end(ending)
    (last,) = lines
    assert last.startswith("could not tell")
    assert last.endswith("stepped with an optimizer") == is_named


@pytest.mark.parametrize("has_failed", [True, False])
def test_the_exit_code_is_equal_on_all_ranks(has_failed: bool) -> None:
    """With `--strict`, a finding of the judge on rank 0 counts on rank 1, which prints nothing about it."""
    session = Session(WatchSettings(strict=True))
    clock = SimpleNamespace(ranks=(0, 1))
    session.watcher = SimpleNamespace(clocks=[clock])  # type: ignore[assignment]
    rows = {"done/0": [{"failed": has_failed}], "left/0": [{}], "left/1": [{}]}
    board = SimpleNamespace(post=lambda *_: None, read=lambda key: rows.get(key, []), list_served=set)
    session._leave(SimpleNamespace(board=board, rank=1, stop=lambda: None), wait=True)  # type: ignore[arg-type]
    session._has_ended = True
    assert session.choose_exit_code(0) == has_failed
    assert session.choose_exit_code(3) == 3


def make_layout(clock: str = "clock") -> Any:
    """Return the parameters that step with a clock."""
    return SimpleNamespace(key=f"{clock}/0", clock=SimpleNamespace(name=clock), names=["a"], parameters=[torch.ones(1)])


def make_report(verdict: str, *codes: str, not_finite: Any = None) -> Any:
    """Return a comparison of all replicas with findings that are about no tensor."""
    findings = []
    for code in codes:
        findings.append(make_finding(code, (1,), ()))
    groups = (SimpleNamespace(not_finite=not_finite),)
    return SimpleNamespace(verdict=verdict, findings=findings, tensors=(), groups=groups)


REPORTS = {
    "in_sync": make_report("in_sync"),
    "not finite": make_report("in_sync", not_finite=("a",)),
    "settings": make_report("out_of_sync", "SYN107"),
    "differs": make_report("out_of_sync", "SYN210"),
    "undecided": make_report("undecided"),
}


def end_with(events: Iterable[str]) -> str:
    """Return the last line of a run with comparisons, and with findings of witnesses at the steps between them."""
    lines: list[str] = []
    reporter = Reporter(console=False)
    reporter.print_text = lambda text, _style="": lines.append(text)  # type: ignore[assignment, method-assign]
    summary = Summary(reporter, WatchSettings())
    # The judge is behind: all comparisons have ended before it finds anything.
    for number, event in enumerate(events, 1):
        if event in REPORTS:
            summary.reports.append(REPORTS[event])
            summary.compared = {"clock": number}
    for number, event in enumerate(events, 1):
        code, _, clock = event.partition(" of ")
        if code.startswith("SYN"):
            layout = make_layout(clock or "clock")
            summary.add(Judgement(number, "reduction", Suspicion(code, (1,), (), names=("a",)), layout))
    summary.print_end(Ending(Counter(steps=9, comparisons=9, ends=1), is_compared=True))
    return lines[-1]


@pytest.mark.parametrize(
    ("events", "verdict"),
    [
        (("differs", "in_sync"), "in sync again"),
        (("in_sync", "SYN410", "differs", "in_sync"), "in sync again"),
        (("SYN411", "in_sync"), "in sync again"),
        (("SYN401", "differs", "in_sync"), "in sync again"),
        # Nothing was repaired.
        (("in_sync", "SYN410", "in_sync"), "in sync, with findings"),
        (("SYN107", "in_sync", "SYN107", "in_sync"), "in sync, with findings"),
        (("SYN401", "in_sync"), "in sync, with findings"),
        (("in_sync", "SYN401"), "in sync, with findings"),
        (("SYN107", "settings"), "in sync, with findings"),
        # NaN made the replicas equal.
        (("SYN410", "SYN411", "not finite"), "in sync, with findings, but the model is not finite"),
        # The replicas after the last fault were not compared.
        (("SYN410",), "OUT OF SYNC"),
        (("in_sync", "SYN410"), "OUT OF SYNC"),
        (("SYN410", "in_sync", "SYN410"), "OUT OF SYNC"),
        (("SYN107", "in_sync", "SYN107"), "OUT OF SYNC"),
        (("SYN107", "settings", "SYN107"), "OUT OF SYNC"),
        (("SYN410", "undecided"), "OUT OF SYNC"),
        (("SYN410", "differs"), "OUT OF SYNC"),
        # No comparison is of what steps with this clock.
        (("SYN410 of other", "in_sync"), "OUT OF SYNC"),
        # Settings that no step had yet.
        (("settings",), "OUT OF SYNC"),
        (("SYN410", "settings"), "OUT OF SYNC"),
    ],
)
def test_a_comparison_in_sync_after_the_last_finding(events: tuple[str, ...], verdict: str) -> None:
    """Only a comparison after the last finding shows replicas in sync; `again` is for differences that were seen."""
    assert end_with(events).partition(":")[0] == verdict


def test_equal_replicas_that_are_not_finite() -> None:
    """Without any finding, the last line still says that the model is not finite."""
    assert end_with(["not finite"]).startswith("in sync, but the model is not finite: ")


def end_with_settings(settings: WatchSettings, codes: tuple[str, ...], *reports: Any) -> tuple[Summary, str]:
    """Return a summary after findings of rank 1, which were followed by comparisons, and the last line."""
    lines: list[str] = []
    reporter = Reporter(console=False)
    reporter.print_text = lambda text, _style="": lines.append(text)  # type: ignore[assignment, method-assign]
    summary = Summary(reporter, settings)
    layout = make_layout()
    for number, code in enumerate(codes, 1):
        suspicion = Suspicion(code, (1,), (), names=("a",), clusters=((0, 2), (1,)))
        summary.add(Judgement(number, "reduction", suspicion, layout))
        # It was in sync with an allowed cause.
        summary.reports[:] = reports
    summary.reports[:] = reports
    summary.compared = {"clock": 99}
    summary.print_end(Ending(Counter(steps=9, comparisons=9), is_compared=True))
    return summary, lines[-1]


def make_allowed(code: str) -> Any:
    """Return a comparison in sync whose only difference, of a parameter of rank 1, has an allowed cause."""
    finding = make_finding(code, (1,), (), names=("a",), allow=frozenset({code}))
    diff = SimpleNamespace(out_of_sync=True, kind="parameter")
    groups = (SimpleNamespace(not_finite=None),)
    return SimpleNamespace(verdict="in_sync", findings=[finding], tensors=(diff,), groups=groups)


@pytest.mark.parametrize(
    ("allow", "codes", "report", "start"),
    [
        ("SYN107", ("SYN107", "SYN411"), "allowed", "in sync, ignoring allowed findings (SYN107)"),
        # Only the comparison finds the cause.
        ("SYN107", ("SYN411",), "allowed", "in sync, ignoring allowed findings (SYN107)"),
        # Another cause counts, and the parameters still differ.
        ("SYN107", ("SYN107", "SYN410", "SYN411"), "allowed", "OUT OF SYNC"),
        # The parameters differed before.
        ("SYN107", ("SYN411", "SYN107"), "undecided", "OUT OF SYNC"),
        ("SYN404", ("SYN107", "SYN411"), "allowed", "OUT OF SYNC"),
        # The comparison attributes the effect to a code that is not allowed.
        ("SYN410", ("SYN410", "SYN411"), "differs", "OUT OF SYNC"),
    ],
)
def test_effects_of_an_allowed_cause(allow: str, codes: tuple[str, ...], report: str, start: str) -> None:
    """Different parameters have no code of their own to allow, and never make a run in sync again."""
    compared = make_allowed("SYN107") if report == "allowed" else REPORTS[report]
    summary, line = end_with_settings(WatchSettings(allow=(allow,)), codes, compared)
    assert line.partition(":")[0] == start
    assert summary.has_failed == (start == "OUT OF SYNC")
    assert "equal at the end" not in line


@pytest.mark.parametrize(
    ("reports", "start"),
    [
        (("in_sync",), "in sync"),
        (("in_sync", "undecided"), "in sync when last compared"),
        (("undecided", "in_sync"), "in sync"),
    ],
)
def test_a_last_comparison_without_result_shows_nothing(reports: tuple[str, ...], start: str) -> None:
    """If the wrapper has ended before, the last comparison has no tensor, and the end was not compared."""
    _, line = end_with_settings(WatchSettings(), (), *map(REPORTS.get, reports))
    assert line.partition(":")[0] == start
    assert ("equal at the end" in line) == (start == "in sync")


def test_buffers_are_unknown_after_a_last_comparison_without_result() -> None:
    """The witnesses compare the trained parameters at the end, and nothing else."""
    lines: list[str] = []
    reporter: Any = SimpleNamespace(print_text=lambda text, _style: lines.append(text))
    summary = Summary(reporter, WatchSettings())
    summary.reports += [REPORTS["in_sync"], REPORTS["undecided"]]
    summary.print_end(Ending(Counter(steps=9, comparisons=9, ends=1), is_compared=True))
    assert lines[-1].startswith("trained parameters in sync: ")


@pytest.mark.parametrize(("field", "named"), [("include", "include"), ("exclude", "exclude"), ("only", "only")])
def test_the_last_line_names_the_filters(field: str, named: str) -> None:
    """What the options leave out may differ."""
    options: Any = {field: ("params",)}
    _, line = end_with_settings(WatchSettings(**options), (), REPORTS["in_sync"])
    assert f"limited by {named}" in line


def test_the_checks_of_a_monitor_are_counted() -> None:
    """A monitor with witnesses compares by itself, and tells the session."""
    lines: list[str] = []
    session = Session(WatchSettings(every=0))
    session.note_checks(4)
    session._reporter.print_text = lambda text, _style="": lines.append(text)  # type: ignore[assignment, method-assign]
    session._summary.print_end(Ending(Counter(steps=9, comparisons=9, ends=1)))
    assert "4 checks" in lines[-1]


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
