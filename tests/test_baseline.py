"""A baseline: what is known is accepted, what is new is not, what is gone is told, and nothing else counts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import changed, network, save, snapshot

import syncheck
from syncheck import baseline, testing
from syncheck.errors import OutOfSync, UsageError
from syncheck.layout.grouping import group_replicas
from syncheck.messages import Fact
from syncheck.report import words

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.baseline import Known
    from syncheck.records import Report

STATISTICS = ("running_mean", "running_var")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder beside that of the baselines."""
    return tmp_path / "run"


def compared(place: Path, *endings: str, by: float = 1.0, **options: Any) -> Report:
    """Compare two ranks, the second of which differs in the tensors whose names end so."""
    save(place / "ddp_rank0.pth", network())
    save(place / "ddp_rank1.pth", changed(network(), *endings, by=by))
    return syncheck.compare(place, options=syncheck.Options(**options))


def of(report: Report) -> Known:
    """Return the baseline that a first update writes."""
    return baseline.update_baseline(report, frozenset())


def test_what_is_written_is_what_the_docs_say(place: Path) -> None:
    """By run, code and kind the names, sorted, and neither gap, rank, path nor step; the same text each time."""
    known = of(compared(place, *STATISTICS))
    text = baseline.serialize(known)
    assert json.loads(text) == {
        "syncheck_baseline": 1,
        "accepted": {
            "ddp": {
                "SYN201": {
                    "bn_mean": ["layer0.bn.running_mean", "layer1.bn.running_mean"],
                    "bn_var": ["layer0.bn.running_var", "layer1.bn.running_var"],
                }
            }
        },
    }
    file = place.parent / "known.json"
    baseline.write(str(file), known)
    assert file.read_text() == text == baseline.serialize(frozenset(sorted(known, reverse=True)))
    assert baseline.read(str(file)) == known


def test_names_of_all_kinds_survive(tmp_path: Path) -> None:
    """Names that no encoding has, that break lines or look like our own keys come back as they were."""
    names = ["\ud800", "a\nb", "accepted", "", "\u4e2d", '"', "x" * 5000]
    known = frozenset(baseline.Entry(run, "SYN299", "parameter", name) for run in names for name in names)
    baseline.write(str(tmp_path / "b.json"), known)
    assert baseline.read(str(tmp_path / "b.json")) == known
    assert (tmp_path / "b.json").read_text(encoding="ascii").isascii()


def test_other_gaps_ranks_and_steps_are_the_same_finding(place: Path, tmp_path: Path) -> None:
    """The same statistics apart by another gap, among three ranks of which another one is odd, at a later step, in
    another folder and launch, are known."""
    known = of(compared(place, *STATISTICS))
    assert baseline.apply_baseline(compared(place, *STATISTICS, by=7.0), known).verdict == "in_sync"
    later = tmp_path / "elsewhere" / "step_200"
    for rank in range(3):
        save(later / f"ddp_rank{rank}.pth", changed(network(), *STATISTICS, by=float(rank == 0)))
    assert baseline.apply_baseline(syncheck.compare(later), known).exit_code == 0


def test_another_code_or_kind_is_a_new_finding(place: Path) -> None:
    """The same tensor under another code, or as another kind, is not what was accepted."""
    report = compared(place, "fc.weight")
    (entry,) = of(report)
    for other in (entry._replace(code="SYN201"), entry._replace(kind="buffer"), entry._replace(run="other")):
        judged = baseline.apply_baseline(report, frozenset({other}))
        assert judged.exit_code == 1
        assert judged.groups[0].findings[0].new == ("fc.weight",)
    (finding,) = baseline.apply_baseline(report, frozenset()).groups[0].findings
    assert finding.facts[0] == Fact.NOT_IN_BASELINE(names=("fc.weight",))
    assert baseline.apply_baseline(report, frozenset({entry})).exit_code == 0


@pytest.mark.parametrize(
    "options",
    [{"only": ("params",)}, {"exclude": ("*running*",)}, {"include": ("fc.*",)}],
    ids=["only", "exclude", "include"],
)
def test_what_the_options_leave_out_is_not_fixed(place: Path, options: dict[str, Any]) -> None:
    """Statistics that this run did not look at are neither told as fixed nor taken out by an update."""
    known = of(compared(place, *STATISTICS))
    report = baseline.apply_baseline(compared(place, **options), known)
    assert report.groups[0].fixed == ()
    assert baseline.update_baseline(report, known) == known


def test_what_could_not_be_compared_is_not_fixed(place: Path) -> None:
    """A random state that --rng found apart is passed over without it, and then neither told nor taken out."""
    for rank in range(2):
        save(place / f"ddp_rank{rank}.safetensors", network() | {"rng_state": np.full(8, rank, np.uint8)})
    known = of(syncheck.compare(place, options=syncheck.Options(rng=True)))
    assert {entry.kind for entry in known} == {"rng"}
    report = baseline.apply_baseline(syncheck.compare(place), known)
    assert (report.groups[0].fixed, baseline.update_baseline(report, known)) == ((), known)


def test_with_a_file_missing_nothing_is_fixed(place: Path) -> None:
    """Without the file of the odd rank, which the metadata says took part, its finding is not told as fixed."""
    for rank in range(3):
        state = changed(network(), *(("fc.weight",) if rank == 2 else ()))
        block = syncheck.metadata(run="ddp", run_id="a" * 8, rank=rank, world_size=3, step=1)
        save(place / f"ddp_rank{rank}.pth", {"model": state, "syncheck": block})
    known = of(syncheck.compare(place))
    assert {entry.name for entry in known} == {"fc.weight"}
    (place / "ddp_rank2.pth").unlink()
    report = baseline.apply_baseline(syncheck.compare(place), known)
    assert (report.verdict, report.groups[0].fixed, baseline.update_baseline(report, known)) == ("in_sync", (), known)


def test_a_tensor_that_is_no_more_is_fixed(place: Path) -> None:
    """A layer that was taken out of the model is gone from the baseline too, where all was looked at."""
    known = of(compared(place, "fc.weight")) | {baseline.Entry("ddp", "SYN299", "parameter", "old.weight")}
    report = baseline.apply_baseline(compared(place, "fc.weight"), known)
    assert [fixed.names for fixed in report.groups[0].fixed] == [("old.weight",)]


def test_runs_that_were_not_looked_at_stay(place: Path) -> None:
    """An update of one run keeps what is known of another, which is not fixed either."""
    other = baseline.Entry("zero", "SYN299", "parameter", "fc.weight")
    report = baseline.apply_baseline(compared(place, "fc.bias"), frozenset({other}))
    assert report.groups[0].fixed == ()
    assert {entry.run for entry in baseline.update_baseline(report, frozenset({other}))} == {"ddp", "zero"}


def test_what_is_allowed_and_what_informs_is_not_written(place: Path) -> None:
    """An allowed finding does not enter the baseline, and one that is in it already is not told as fixed."""
    allowed = compared(place, *STATISTICS, allow=("SYN201",))
    assert of(allowed) == frozenset()
    known = of(compared(place, *STATISTICS))
    report = baseline.apply_baseline(allowed, known)
    assert [(finding.allowed, finding.accepted) for finding in report.groups[0].findings] == [(True, False)]
    assert report.groups[0].fixed == ()


def test_steps_of_a_run_share_their_entries(tmp_path: Path) -> None:
    """What one step shows and the next one does not is not fixed; what no step shows is told once, at the last one."""
    for step, endings in ((1, ("fc.weight",)), (2, ())):
        save(tmp_path / f"step_{step}" / "ddp_rank0.pth", network())
        save(tmp_path / f"step_{step}" / "ddp_rank1.pth", changed(network(), *endings))
    report = syncheck.compare(tmp_path)
    known = of(report)
    assert {entry.run for entry in known} == {"ddp"}
    gone = baseline.Entry("ddp", "SYN220", "parameter", "fc.bias")
    judged = baseline.apply_baseline(report, known | {gone})
    assert (judged.exit_code, [len(group.fixed) for group in judged.groups]) == (0, [0, 1])


def test_values_are_accepted_by_name(place: Path) -> None:
    """A step counter that differs between the ranks is known by its name, whatever its values are."""

    def report(step: int) -> Report:
        for rank in range(2):
            save(place / f"ddp_rank{rank}.pth", {"model": network(), "epoch": step * rank})
        return syncheck.compare(place)

    known = of(report(3))
    assert known == {baseline.Entry("ddp", "SYN106", "value", "epoch")}
    assert baseline.apply_baseline(report(5), known).exit_code == 0


def test_could_not_tell_is_never_accepted(place: Path) -> None:
    """With a file that cannot be read nothing is written nor told as fixed, and the answer is not "in sync"; nor is
    anything written where nothing was compared."""
    known = of(compared(place, "fc.weight"))
    (place / "ddp_rank2.pth").write_bytes(b"junk")
    report = baseline.apply_baseline(syncheck.compare(place), known)
    assert (report.verdict, report.exit_code, report.groups[0].fixed) == ("undecided", 2, ())
    with pytest.raises(UsageError, match=r"not updated: .*ddp_rank2.pth could not be read"):
        baseline.update_baseline(report, known)
    save(place / "ddp_rank1.pth", network())
    assert baseline.apply_baseline(syncheck.compare(place), known).groups[0].fixed == ()
    with pytest.raises(UsageError, match="not updated: nothing was compared"):
        baseline.update_baseline(syncheck.compare(place / "ddp_rank0.pth"), known)


def test_runs_of_one_name_are_told_apart_wherever_they_lie(tmp_path: Path) -> None:
    """Of two runs of one name one has the finding: the other one's is new, and moving both changes nothing."""
    for side, endings in (("old", ("fc.weight",)), ("new", ())):
        for rank in range(2):
            save(tmp_path / "here" / side / f"ddp_rank{rank}.pth", changed(network(), *endings if rank else ()))
    known = of(syncheck.compare(tmp_path / "here"))
    assert {entry.run for entry in known} == {"old/ddp"}
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert baseline.apply_baseline(syncheck.compare(tmp_path / "there"), known).exit_code == 0
    save(tmp_path / "there" / "new" / "ddp_rank1.pth", changed(network(), "fc.weight"))
    assert baseline.apply_baseline(syncheck.compare(tmp_path / "there"), known).exit_code == 1


def test_labels_have_no_run_id_and_no_step() -> None:
    """Launches of one run in two folders are told apart by these, with steps and ranks in the folders left open."""
    found = group_replicas(
        [
            snapshot(f"/scratch/{job}/step_{step}/ddp_rank{rank}.pth", run="ddp", run_id=job * 4, rank=rank, step=step)
            for job in ("a", "b")
            for step in (10, 20)
            for rank in (0, 1)
        ]
    )
    assert {(replicas.run_id, replicas.label) for replicas in found} == {("aaaa", "a/ddp"), ("bbbb", "b/ddp")}
    plain = group_replicas(
        [
            snapshot(f"/scratch/{job}/step_{step}/files/ddp_rank{rank}.pth")
            for job in ("a", "b")
            for step in (10, 20)
            for rank in (0, 1)
        ]
    )
    assert [replicas.label for replicas in plain] == ["a/ddp"] * 2 + ["b/ddp"] * 2
    again = group_replicas(
        [
            snapshot(f"ckpts/ddp_{job}_rank{rank}.pth", run="ddp", run_id=job * 4, rank=rank)
            for job in ("a", "b")
            for rank in (0, 1)
        ]
    )
    assert [(replicas.run, replicas.label) for replicas in again] == [
        ("ckpts/ddp (aaaa)", "ddp"),
        ("ckpts/ddp (bbbb)", "ddp"),
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not a baseline: not JSON"),
        ("<<<<<<< HEAD\n{}", "not a baseline: not JSON"),
        ("[" * 100_000, "not a baseline: not JSON"),
        (b"\xff\xfe", "not a baseline: not JSON"),
        ("[]", "not a baseline: it has no syncheck_baseline"),
        ('{"schema": 1, "verdict": "in_sync"}', "not a baseline: it has no syncheck_baseline"),
        ('{"syncheck_baseline": 2, "accepted": {}}', "a baseline of version 2; this syncheck reads version 1"),
        ('{"syncheck_baseline": true, "accepted": {}}', "a baseline of version True"),
        ('{"syncheck_baseline": 1}', "needs syncheck_baseline and accepted, found ['syncheck_baseline']"),
        ('{"syncheck_baseline": 1, "accepted": {}, "more": 1}', "needs syncheck_baseline and accepted, found"),
        ('{"syncheck_baseline": 1, "accepted": ["ddp"]}', "accepted: must be an object, found ['ddp']"),
        ('{"syncheck_baseline": 1, "accepted": {"ddp": "SYN201"}}', "'ddp': must be an object, found 'SYN201'"),
        ('{"syncheck_baseline": 1, "accepted": {"ddp": {"SYN201": []}}}', "'ddp', 'SYN201': must be an object"),
        (
            '{"syncheck_baseline": 1, "accepted": {"ddp": {"SYN201": {"bn_var": [1]}}}}',
            "'bn_var': must be a list of",
        ),
    ],
)
def test_what_is_no_baseline_is_wrong_usage(place: Path, tmp_path: Path, content: str | bytes, says: str) -> None:
    """Each file that is none is one line that says so, before anything is compared, and no update writes over it."""
    file = tmp_path / "b.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = file.read_bytes()
    with pytest.raises(UsageError) as caught:
        compared(place, baseline=str(file))
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError):
        baseline.read_for_update(str(file))
    assert file.read_bytes() == before


def test_a_baseline_that_is_not_there(place: Path, tmp_path: Path) -> None:
    """A missing file, a folder or an impossible path is told, and never taken for an empty baseline."""
    for path, says in (
        (tmp_path / "no.json", "no such baseline"),
        (tmp_path, "Is a directory"),
        ("a\0b", "null byte"),
    ):
        with pytest.raises(UsageError, match=says):
            compared(place, baseline=str(path))
    assert baseline.read_for_update(str(tmp_path / "no.json")) == frozenset()
    with pytest.raises(UsageError, match=r"baseline .*: cannot be written: the folder"):
        baseline.read_for_update(str(tmp_path / "no" / "b.json"))


def test_options_take_a_baseline(place: Path, tmp_path: Path) -> None:
    """In Python the file is a field of the options; what is in memory is compared without it."""
    file = tmp_path / "b.json"
    baseline.write(str(file), of(compared(place, "fc.weight")))
    options = syncheck.Options(baseline=str(file))
    report = syncheck.compare(place, options=options)
    assert (report.exit_code, report.groups[0].findings[0].accepted) == (0, True)
    assert words.verdict_line(report) == "IN SYNC, ignoring baseline findings (SYN299)"
    with pytest.raises(OutOfSync):
        testing.assert_in_sync(network(), changed(network(), "fc.weight"), options=options)
    both = replace(options, allow=("SYN299",))
    assert "allowed findings (SYN299)" in words.verdict_line(syncheck.compare(place, options=both))
    with pytest.raises(UsageError, match="baseline=7: must be a path"):
        syncheck.Options(baseline=7)  # type: ignore[arg-type]
