"""The output of a monitor on one rank: lines, events, scalars. Output errors never stop a training."""

from __future__ import annotations

import json
import logging
import re
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from support.agreement import all_pass, each_rank
from support.groups import make_finding, make_group
from support.listings import find_texts, list_fields, read_json_lines
from support.monitored import Watched, flip_at, printer

from syncheck.live.reporter import CheckRecord, Reporter
from syncheck.records import Counts, Report

if TYPE_CHECKING:
    from syncheck.testing import Rank


class Writer:
    """Records scalars, like TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: dict[str, dict[int, float]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.setdefault(tag, {})[step] = value


class Broken:
    """Raises in every method."""

    is_terminal = False
    asked = 0

    def add_scalar(self, *_: Any) -> None:
        self.asked += 1
        raise OSError("no space left")

    def print(self, *_: Any, **__: Any) -> None:
        self.asked += 1
        raise BrokenPipeError


@pytest.mark.syncheck(ranks=3)
def test_events_are_lines_of_json(syncheck_rank: Rank, tmp_path: Path) -> None:
    """Rank 0 appends one JSON object per line: start, each check with its findings, new desyncs, end."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "of an earlier run"}\n')
    Watched(plant=flip_at(3, rank=2)).run(5, on_desync="warn", events=path)
    _, *events = read_json_lines(path)
    if syncheck_rank.rank:
        assert events == []
        return
    assert list_fields(events, "event") == ["start", "check", "check", "desync", "check", "end"]
    start, good, bad, desync, last, end = events
    assert (start["every"], start["on_desync"], start["ranks"]) == (2, "warn", [0, 1, 2])
    assert (good["step"], good["verdict"], good["findings"]) == (2, "in_sync", [])
    assert (bad["step"], bad["verdict"], bad["compared"]) == (4, "out_of_sync", bad["tensors"])
    (finding,) = bad["findings"]
    assert (finding["code"], finding["slug"], finding["ranks"], finding["tensors"]) == ("SYN220", "bit-flip", [2], 1)
    assert "fc.weight" in finding["evidence"]
    assert (desync["step"], desync["in_sync_at"], desync["findings"]) == (4, 2, [finding])
    assert (last["step"], last["verdict"]) == (5, "out_of_sync")
    assert (end["step"], end["checks"], end["verdict"], end["exception"]) == (5, 3, "out_of_sync", None)
    assert all(event["time"].endswith("+00:00") for event in events)
    assert all(event["seconds"] > 0 and 0 <= event["overhead"] <= 1 for event in (good, bad, last))


@pytest.mark.syncheck(ranks=2)
def test_events_are_written_at_once(syncheck_rank: Rank, tmp_path: Path) -> None:
    """A check's event is on disk when the check returns, and an exception's name when the context ends."""
    path = tmp_path / "events.jsonl"
    watched = Watched()
    observed = []

    def fail() -> None:
        with watched.start(events=str(path)):
            watched.step(1)
            watched.step(2)
            observed.extend(path.read_text().splitlines() if path.exists() else [])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    if syncheck_rank.rank == 0:
        assert [json.loads(line)["event"] for line in observed] == ["start", "check"]
        assert json.loads(path.read_text().splitlines()[-1])["exception"] == "ZeroDivisionError"
    else:
        assert not path.exists()


@pytest.mark.syncheck(ranks=2)
def test_the_end_event_names_the_exception(syncheck_rank: Rank, tmp_path: Path) -> None:
    """If the check at the end of the context raises, the last event has the exception's name."""
    path = tmp_path / "events.jsonl"
    outcomes = each_rank(Watched(plant=flip_at(1, rank=0)).run, 1, events=path)
    assert list_fields(outcomes, "error") == ["OutOfSync"] * 2
    if syncheck_rank.rank == 0:
        events = read_json_lines(path)
        assert list_fields(events, "event") == ["start", "check", "desync", "end"]
        assert events[-1]["exception"] == "OutOfSync"


@pytest.mark.syncheck(ranks=2)
def test_scalars_go_to_the_writer_of_one_rank(syncheck_rank: Rank) -> None:
    """The writer gets verdict, number of tensors and largest difference of each check, on rank 0 only."""
    writer = Writer()
    Watched(plant=flip_at(3, rank=1)).run(4, on_desync="warn", writer=writer)
    if syncheck_rank.rank:
        assert writer.scalars == {}
        return
    assert writer.scalars["syncheck/out_of_sync"] == {2: 0, 4: 1}
    assert writer.scalars["syncheck/different"] == {2: 0, 4: 1}
    gaps = writer.scalars["syncheck/max_abs"]
    assert gaps[2] == 0 < gaps[4]
    assert set(writer.scalars["syncheck/seconds"]) == set(writer.scalars["syncheck/overhead"]) == {2, 4}


@pytest.mark.syncheck(ranks=2)
def test_findings_are_detailed_once(syncheck_rank: Rank) -> None:
    """The first check that finds a fault prints details and the fix, the next checks one line."""
    console, out = printer()
    Watched(plant=flip_at(3, rank=1)).run(6, on_desync="warn", console=console)
    lines = out.getvalue().splitlines()
    if syncheck_rank.rank:
        assert lines == []
        return
    starts = find_texts(lines, start="syncheck: step ")
    assert starts[0].startswith("syncheck: step 2: in sync; 16 of 16 tensors compared on 2 ranks, ")
    assert starts[1].startswith("syncheck: step 4: OUT OF SYNC (in sync at step 2): SYN220 bit-flip on ")
    assert starts[2].startswith("syncheck: step 6: OUT OF SYNC (still, since step 4): SYN220 bit-flip on ")
    assert all(" ms, overhead " in line for line in starts)
    assert len(starts) == 3
    assert [line.split()[0] for line in lines if line.startswith("  ")] == ["SYN220", "what", "why", "fix", "more"]


@pytest.mark.syncheck(ranks=2)
def test_new_findings_beside_known_ones(syncheck_rank: Rank) -> None:
    """A second fault in another tensor is printed in detail although the first persists."""

    def plant(step: int, model: Any) -> None:
        flip_at(1, rank=1)(step, model)
        if step == 3 and dist.get_rank() == 1:
            model.head.bias.data.add_(0.5)

    console, out = printer()
    Watched(plant=plant).run(4, on_desync="warn", console=console)
    if syncheck_rank.rank == 0:
        second = out.getvalue().partition("step 4: ")[2]
        assert second.startswith("OUT OF SYNC (since step 2, new: SYN299): ")
        assert "head.bias" in second


def test_a_finding_with_more_tensors_is_not_called_new() -> None:
    """If the same finding has one more tensor, the line says so, and the tensors are printed again."""
    known = make_finding("SYN299", "unexplained-difference", "error", (1,), ("a", "b"), "", "", "")
    other = make_finding("SYN220", "bit-flip", "error", (1,), ("c",), "", "", "")
    group = make_group("model", None, "out_of_sync", (), Counts(3), findings=(known, other))
    for new, grown, expected in (
        ((), (), "still, since step 2"),
        ((known,), (known,), "still, since step 2, in more tensors or values: SYN299"),
        ((other,), (), "since step 2, new: SYN220"),
        ((known, other), (known,), "since step 2, new: SYN220, in more tensors or values: SYN299"),
    ):
        console, out = printer()
        report = Report("out_of_sync", (group,))
        record = CheckRecord(4, report, seconds=0.1, overhead=0.0, last_good=None, since=2, new=new, grown=grown)
        Reporter(console).report_check(record, details=True)
        first, *details = out.getvalue().splitlines()
        assert first.startswith(f"syncheck: step 4: OUT OF SYNC ({expected}): ")
        assert len([row for row in details if row.startswith("  SYN")]) == len(new)


@pytest.mark.syncheck(ranks=2)
def test_a_terminal_gets_colors_and_wrapped_lines(syncheck_rank: Rank) -> None:
    """On a terminal lines are wrapped, and the verdict is colored."""
    console, out = printer(force_terminal=True, width=60, color_system="standard")
    Watched(plant=flip_at(1, rank=1)).run(2, on_desync="warn", console=console)
    if syncheck_rank.rank == 0:
        assert "\x1b[1;31mOUT OF SYNC\x1b[0m" in out.getvalue()
        lines = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
        assert len(lines) > 5
        assert all(len(line) <= 60 for line in lines)


@pytest.mark.syncheck(ranks=2)
def test_by_default_rank_0_prints_to_stderr(syncheck_rank: Rank) -> None:
    """Without a console rank 0 prints a line to stderr and other ranks nothing; with False no rank prints."""
    for console, expected in ((None, int(syncheck_rank.rank == 0)), (False, 0)):
        heard = StringIO()
        with redirect_stderr(heard):
            Watched().run(2, console=console)
        assert heard.getvalue().count("syncheck: step 2: in sync") == expected


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("what", ["full", "nowhere", "writer", "console"])
def test_output_errors_are_reported_once(syncheck_rank: Rank, what: str, tmp_path: Path) -> None:
    """A full disk, a missing folder and a failing writer give one warning on rank 0; the training continues.

    If the console fails, for example because of a closed pipe, nothing is printed.
    """
    broken = Broken()
    paths = {"full": Path("/dev/full"), "nowhere": tmp_path / "no" / "events.jsonl"}
    console, out = printer()
    options: dict[str, Any] = {"events": paths[what]} if what in paths else {what: broken}
    report = all_pass(each_rank(Watched().run, 6, **{"console": console, **options}))
    assert report.verdict == "in_sync"
    warnings = find_texts(out.getvalue().splitlines(), "warning")
    assert len(warnings) == int(syncheck_rank.rank == 0 and what != "console")
    assert all(line.endswith("; this output is disabled") for line in warnings)
    assert broken.asked == (what not in paths and syncheck_rank.rank == 0)


@pytest.mark.syncheck(ranks=2)
def test_nothing_compared_warns_once(syncheck_rank: Rank) -> None:
    """If no tensor is compared, the monitor warns once and does not raise."""
    console, out = printer()
    report = all_pass(each_rank(Watched().run, 6, console=console, exclude="*"))
    assert report.verdict == "undecided"
    assert out.getvalue().count("warning: step 2: could not tell: no tensor was compared") == (syncheck_rank.rank == 0)
    assert out.getvalue().count("warning") == (syncheck_rank.rank == 0)


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("configured", [False, True], ids=["no logging", "logging"])
def test_a_repair_is_printed_once(syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch, configured: bool) -> None:
    """A repair, of the selected tensors, is printed once on stderr with details; log handlers get the message too."""
    rows: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: rows.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler] if configured else [])
    watched = Watched(norm=True, plant=flip_at(1, rank=2))  # BatchNorm's statistics have no majority
    with redirect_stderr(StringIO()) as out:
        report = all_pass(each_rank(watched.run, 4, on_desync="resync", only="params", console=None))
    assert report.verdict == "in_sync"
    assert watched.returned[2] is not None
    assert watched.returned[2].verdict == "out_of_sync"
    leads = syncheck_rank.rank == 0
    assert out.getvalue().count("proved in sync") == leads
    assert out.getvalue().count("  copied: fc.weight") == leads
    assert len(rows) == (leads and configured)
    assert logging.getLogger("syncheck").handlers == []
