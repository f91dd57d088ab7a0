"""Reports of event files: `syncheck report events.jsonl`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import find_all, list_fields, list_names
from support.monitored import Watched, flip_at

from syncheck.diagnose import syn220_bit_flip
from syncheck.errors import UsageError
from syncheck.findings import Finding
from syncheck.messages import Fact
from syncheck.options import FORMATS
from syncheck.report import finding_text, html, plain, text
from syncheck.report.events import describe_finding, read_events

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.checkpoints import Done

    from syncheck.messages import Message
    from syncheck.testing import Rank

    Run = Callable[..., Done]

START = {"event": "start", "time": "t", "step": 0, "every": 1, "on_desync": "warn", "ranks": [0, 1]}
FINDING = {
    "code": "SYN220", "slug": "bit-flip", "severity": "error", "allowed": False, "ranks": [1], "tensors": 2,
    "evidence": "one bit differs",
}  # fmt: skip


def check(at: int, *findings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the event of a check as version 0.1 wrote it."""
    verdict = "out_of_sync" if findings else "in_sync"
    event = {"event": "check", "time": "t", "step": at, "verdict": verdict, "tensors": 10, "compared": 9}
    return event | {"seconds": 0.1, "overhead": 0.1, "findings": list(findings)} | changes


def write(path: Path, *events: dict[str, Any], end: str = "") -> Path:
    """Write an event file. end: an incomplete last line."""
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events) + end, encoding="utf-8")
    return path


@pytest.mark.syncheck(ranks=3)
def test_the_checks_of_a_run_are_its_steps(syncheck_rank: Rank, tmp_path: Path) -> None:
    """The report has each check of a real run, with its tensors, and since when the finding exists."""
    path = tmp_path / "events.jsonl"
    Watched(plant=flip_at(3, rank=2)).run(8, on_desync="warn", events=path)
    if syncheck_rank.rank:
        return
    report = read_events([path])
    assert report.verdict == "out_of_sync"
    assert list_fields(report.groups, "step") == [2, 4, 6, 8]
    good, *_, last = report.groups
    assert (good.verdict, good.tensors, good.counts.different) == ("in_sync", (), 0)
    assert last.ranks == (0, 1, 2)
    (finding,) = last.findings
    assert finding.ranks == (2,)
    assert finding.history is not None
    assert (finding.history.agreed, finding.history.since) == (2, 4)
    assert set(list_names(find_all(last.tensors, out_of_sync=True))) == set(finding.tensors)
    assert last.counts.tensors == last.counts.identical + last.counts.different > 0
    assert all(diff.minority == (2,) and diff.max_abs for diff in last.tensors)
    assert '<article class="finding error"' in html.render(report, "0")
    assert "in sync until step 2, out of sync from step 4" in plain.render(text.draw_overview(report, 5))


def test_events_of_version_0_1(tmp_path: Path) -> None:
    """Old events have counts and findings only; their causes refer to the command that prints them."""
    report = read_events([write(tmp_path / "run.jsonl", START, check(1), check(2, FINDING))])
    first, last = report.groups
    assert (report.verdict, first.run, first.ranks) == ("out_of_sync", "run", (0, 1))
    assert (last.counts.different, last.counts.identical, last.counts.not_compared) == (2, 7, 1)
    assert (last.findings[0].code, last.findings[0].evidence) == ("SYN220", "one bit differs")


def test_a_fix_of_this_version_gets_back_its_code(tmp_path: Path) -> None:
    """A fix that a rule has is a sentence with code again; any other text stays a text."""
    known = syn220_bit_flip.Text.IN_A_JOB
    for fix, code in ((str(known()), known), ("edited: optimizer.step()", Fact.TEXT)):
        report = read_events([write(tmp_path / "run.jsonl", START, check(1), check(2, FINDING | {"fix": fix}))])
        assert report.groups[-1].findings[0].fix.code == code


def test_a_run_that_is_still_writing(tmp_path: Path) -> None:
    """An incomplete last line is skipped; a second run in the same file is a run of its own."""
    path = write(tmp_path / "run.jsonl", START, check(5), START, check(5, FINDING), end='{"event": "che')
    report = read_events([path])
    assert list_fields(report.groups, "run", "step") == [("run", 5), ("run from line 3", 5)]


WORST = {
    "name": "w", "kind": "parameter", "dtype": "float32", "status": "different", "mismatched": 1, "numel": 2,
    "max_abs": 0.5, "max_rel": None, "max_ulp": None, "shape": [2], "index": [0], "minority": [1],
    "clusters": [[0], [1]], "replica_groups": [[0, 1]], "reason": None, "detail": None, "nonfinite": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "event",
    [
        check(1, verdict="fine"),
        check(1, step="one"),
        check(1, FINDING | {"severity": "loud"}),
        check(1, FINDING | {"ranks": ["x"]}),
        check(1, FINDING, worst=[WORST | {"max_abs": "big"}]),
        check(1, FINDING, worst=[WORST | {"clusters": [["x"]]}]),
        check(1, FINDING, worst=[WORST | {"clusters": None}]),
        check(1, FINDING, worst=[WORST | {"clusters": [1, 2]}]),
        check(1, FINDING, worst=[WORST | {"replica_groups": [1]}]),
        check(1, FINDING, worst=[WORST | {"minority": None}]),
        check(1, FINDING, worst=[WORST | {"status": "identical"}]),
        check(1, FINDING, worst=[{}]),
        check(1, FINDING, kinds={"parameter": 3}),
        *[check(number) for number in (float("inf"), float("nan"), -1, 10**400, 1.5, True)],
        check(1, tensors=float("inf")),
        check(1, FINDING | {"ranks": [float("inf")]}),
        check(1, FINDING, worst=[WORST | {"max_abs": 10**400}]),
        check(1, FINDING, worst=[WORST | {"max_rel": float("nan")}]),
        check(1, FINDING, worst=[WORST | {"shape": [float("-inf")]}]),
        START | {"ranks": [float("inf")]},
        START | {"step": float("nan")},
        {"event": "check"},
        {"step": 1},
    ],
)
def test_wrong_events_are_one_line(tmp_path: Path, cli: Run, event: dict[str, Any]) -> None:
    """A line that is no event of a monitor is an error with its number, and exit code 2."""
    path = write(tmp_path / "run.jsonl", START, event, check(2, FINDING, worst=[WORST]))
    done = cli("report", str(path))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "line 2" in done.err


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_checks_without_ranks_have_a_verdict(tmp_path: Path, cli: Run, name: str) -> None:
    """A check without a start before it has the exit code of its verdict in every format."""
    path = write(tmp_path / "run.jsonl", check(1, FINDING | {"ranks": []}))
    assert cli("report", str(path), "--format", name).code == 1


COUNTS = {"tensors": 10, "identical": 9, "equal": 0, "close": 0, "different": 0, "not_compared": 1}
ALLOWED = FINDING | {"allowed": True}


@pytest.mark.parametrize(
    "event",
    [
        check(1, FINDING, verdict="in_sync"),
        check(1, FINDING, verdict="undecided"),
        check(1, FINDING | {"severity": "info"}, verdict="in_sync"),
        check(1, ALLOWED),
        check(1, verdict="out_of_sync"),
        check(1, kinds={"parameter": COUNTS | {"identical": 8, "different": 1}}),
        check(1, kinds={"parameter": COUNTS | {"identical": 10, "different": -1}}),
        check(1, kinds={"parameter": COUNTS | {"identical": 8}}),
        check(1, kinds={"parameter": COUNTS}, tensors=12),
        check(1, compared=0),
        check(1, kinds={"parameter": COUNTS}, worst=[WORST]),
        {"event": "desync", "step": 0, "in_sync_at": None, "findings": [FINDING]},
        {"event": "end", "step": 0, "checks": 1, "verdict": "out_of_sync", "overhead": 0.1, "exception": None},
    ],
)
def test_events_that_contradict_themselves_have_no_verdict(tmp_path: Path, cli: Run, event: dict[str, Any]) -> None:
    """A verdict that does not follow from the findings and counts is an error with the line, and exit code 2."""
    done = cli("report", str(write(tmp_path / "run.jsonl", START, check(0), event)))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "line 3" in done.err


def test_in_sync_again_only_if_that_check_was_in_sync(tmp_path: Path) -> None:
    """A check with another code for the same tensors, or for others, was not in sync again."""
    first, second = FINDING | {"names": ["w"]}, FINDING | {"code": "SYN213", "names": ["w"]}
    checks = [check(0), check(1, first, worst=[WORST]), check(2, second, worst=[WORST]), check(3), check(4, first)]
    (finding,) = read_events([write(tmp_path / "run.jsonl", START, *checks)]).groups[-1].findings
    assert finding.history is not None
    assert list_fields(finding.history.points, "differing") == [0, 1, 1, 0, 1]
    text_of = finding_text.describe_history(finding)
    assert "in sync again at step 3" in text_of
    assert "step 2" not in text_of
    unrelated = FINDING | {"code": "SYN213", "names": ["v"]}
    rows = [WORST | {"name": "v"}]
    kinds = {"parameter": COUNTS | {"identical": 8, "different": 1}}
    checks = [check(0), check(1, first), check(2, unrelated, worst=rows, kinds=kinds), check(3, first)]
    (finding,) = read_events([write(tmp_path / "run.jsonl", START, *checks)]).groups[-1].findings
    assert "in sync again" not in finding_text.describe_history(finding)


@pytest.mark.parametrize("content", [b"", b"not json\n{}", b"\xff\xfe", b"[" * 100_000 + b"\n{}\n"])
def test_files_without_events(tmp_path: Path, content: bytes) -> None:
    """A file that holds no events raises an error."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"run\.jsonl"):
        read_events([path])


def test_from_the_command_line(tmp_path: Path, cli: Run) -> None:
    """`syncheck report events.jsonl -o live.html` prints and writes the report; a missing file is an error."""
    path = write(tmp_path / "run.jsonl", START, check(1), check(2, FINDING | {"names": ["w"]}, worst=[WORST]))
    done = cli("report", str(path), "-o", "live.html", "-o", "live.json")
    assert done.code == 1
    assert [line.partition(",")[0] for line in done.err.splitlines()] == [
        "syncheck: wrote live.html",
        "syncheck: wrote live.json",
    ]
    assert "SYN220" in done.out
    assert "SYN220" in (tmp_path / "live.html").read_text(encoding="utf-8")
    document = json.loads((tmp_path / "live.json").read_text(encoding="utf-8"))
    assert list_fields(document["groups"], "step") == [1, 2]
    assert cli("report", str(tmp_path / "none.jsonl")).code == 2


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("only", ["--only-buffers"]),
        ("allow", ["--allow", "SYN220"]),
        ("rtol", ["--rtol", "1e-3", "--atol", "0"]),
        ("quick", ["--quick"]),
    ],
)
def test_options_of_a_comparison_are_refused(tmp_path: Path, cli: Run, name: str, option: list[str]) -> None:
    """Events were compared in the run, so an option that selects or accepts differences is an error in one line."""
    path = write(tmp_path / "run.jsonl", START, check(1))
    done = cli("report", str(path), *option)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert f"error: --{name}" in done.err


def test_project_options_of_a_comparison_are_not_applied(tmp_path: Path, cli: Run) -> None:
    """Options for checkpoints in pyproject.toml stay without effect on events."""
    (tmp_path / "pyproject.toml").write_text('[tool.syncheck]\nallow = ["SYN220"]\n', encoding="utf-8")
    done = cli("report", str(write(tmp_path / "run.jsonl", START, check(1), check(2, FINDING))))
    assert (done.code, "options from" in done.err) == (1, False)


@pytest.mark.parametrize(("count", "named", "facts"), [(23, 23, []), (72, 40, [Fact.NAMED(count=40, total=72)])])
def test_names_that_an_event_does_not_have_are_counted(
    tmp_path: Path, count: int, named: int, facts: list[Message]
) -> None:
    """A report of events has the tensors of the finding, as that of the comparison; of many, it states how many."""
    names = tuple(f"layer{number}.weight" for number in range(count))
    text_fact = Fact.TEXT(text="they differ")
    written = Finding("SYN220", "bit-flip", "error", (1,), names, (text_fact,), text_fact, text_fact)
    event = check(1, describe_finding(written, {}), tensors=count, compared=count)
    (finding,) = read_events([write(tmp_path / "run.jsonl", START, event)]).findings
    assert (finding.tensors, list(finding.facts)) == (names[:named], [text_fact, *facts])
