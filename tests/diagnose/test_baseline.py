"""A baseline: known findings are accepted, new findings fail, and fixed findings are reported."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import changed, network, save, snapshot
from support.listings import list_fields, list_names

import syncheck
from syncheck import api, testing
from syncheck.diagnose import baseline
from syncheck.errors import UsageError
from syncheck.layout.grouping import group_replicas
from syncheck.messages import Fact
from syncheck.records import OutOfSync
from syncheck.report import words

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.diagnose.baseline import Known
    from syncheck.records import Report

STATISTICS = ("running_mean", "running_var")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Return a folder for checkpoints, separate from the baselines."""
    return tmp_path / "run"


def compare_two_ranks(run_folder: Path, *endings: str, by: float = 1.0, **options: Any) -> Report:
    """Compare two ranks; rank 1 differs in the tensors with the given name endings."""
    save(run_folder / "ddp_rank0.pth", network())
    save(run_folder / "ddp_rank1.pth", changed(network(), *endings, by=by))
    return syncheck.compare(run_folder, options=syncheck.Options(**options))


def make_baseline(report: Report) -> Known:
    """Return the baseline of a first update."""
    return baseline.update_baseline(report, frozenset())


def test_the_file_has_the_documented_content(run_folder: Path) -> None:
    """The file lists sorted names by run, code and kind, without sizes, ranks, paths or steps, in reproducible text."""
    known_findings = make_baseline(compare_two_ranks(run_folder, *STATISTICS))
    text = baseline.serialize(known_findings)
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
    file = run_folder.parent / "known.json"
    file.write_text(baseline.serialize(known_findings))
    assert file.read_text() == text == baseline.serialize(frozenset(sorted(known_findings, reverse=True)))
    assert baseline.read(str(file)) == known_findings


def test_names_of_all_kinds_survive(tmp_path: Path) -> None:
    """Names with surrogates or line breaks, and names equal to keys of the file, are read back unchanged."""
    names = ["\ud800", "a\nb", "accepted", "", "\u4e2d", '"', "x" * 5000]
    known_findings = frozenset(baseline.Entry(run, "SYN299", "parameter", name) for run, name in product(names, names))
    (tmp_path / "b.json").write_text(baseline.serialize(known_findings))
    assert baseline.read(str(tmp_path / "b.json")) == known_findings
    assert (tmp_path / "b.json").read_text(encoding="ascii").isascii()


def test_entries_do_not_depend_on_size_rank_or_step(run_folder: Path, tmp_path: Path) -> None:
    """Known statistics stay known with a larger difference, another odd rank, more ranks, a later step, or in another
    folder."""
    known_findings = make_baseline(compare_two_ranks(run_folder, *STATISTICS))
    assert (
        baseline.apply_baseline(compare_two_ranks(run_folder, *STATISTICS, by=7.0), known_findings).verdict == "in_sync"
    )
    later = tmp_path / "elsewhere" / "step_200"
    for rank in range(3):
        save(later / f"ddp_rank{rank}.pth", changed(network(), *STATISTICS, by=float(rank)))
    assert baseline.apply_baseline(syncheck.compare(later), known_findings).exit_code == 0


def test_another_code_kind_or_run_is_a_new_finding(run_folder: Path) -> None:
    """A known tensor is a new finding with another code, kind or run."""
    report = compare_two_ranks(run_folder, "fc.weight")
    (entry,) = make_baseline(report)
    for second in (entry._replace(code="SYN201"), entry._replace(kind="buffer"), entry._replace(run="other")):
        judged = baseline.apply_baseline(report, frozenset({second}))
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
def test_excluded_tensors_are_not_fixed(run_folder: Path, options: dict[str, Any]) -> None:
    """Known tensors excluded by options are not reported as fixed, and an update keeps their entries."""
    known_findings = make_baseline(compare_two_ranks(run_folder, *STATISTICS))
    report = baseline.apply_baseline(compare_two_ranks(run_folder, **options), known_findings)
    assert report.groups[0].fixed == ()
    assert baseline.update_baseline(report, known_findings) == known_findings


def test_skipped_rng_states_are_not_fixed(run_folder: Path) -> None:
    """Without --rng, a known RNG state is not compare_two_ranks, so it is not fixed, and an update keeps its entry."""
    for rank in range(2):
        save(run_folder / f"ddp_rank{rank}.safetensors", network() | {"rng_state": np.full(8, rank, np.uint8)})
    known_findings = make_baseline(syncheck.compare(run_folder, options=syncheck.Options(rng=True)))
    assert set(list_fields(known_findings, "kind")) == {"rng"}
    report = baseline.apply_baseline(syncheck.compare(run_folder), known_findings)
    assert (report.groups[0].fixed, baseline.update_baseline(report, known_findings)) == ((), known_findings)


def test_a_missing_rank_is_not_fixed(run_folder: Path) -> None:
    """If the file of the odd rank is missing, its known finding is not reported as fixed, and an update keeps it."""
    for rank in range(3):
        state = changed(network(), *(("fc.weight",) if rank == 2 else ()))
        block = syncheck.metadata(run="ddp", run_id="a" * 8, rank=rank, world_size=3, step=1)
        save(run_folder / f"ddp_rank{rank}.pth", {"model": state, "syncheck": block})
    known_findings = make_baseline(syncheck.compare(run_folder))
    assert set(list_names(known_findings)) == {"fc.weight"}
    (run_folder / "ddp_rank2.pth").unlink()
    report = baseline.apply_baseline(syncheck.compare(run_folder), known_findings)
    assert (report.verdict, report.groups[0].fixed, baseline.update_baseline(report, known_findings)) == (
        "in_sync",
        (),
        known_findings,
    )


def test_a_removed_tensor_is_fixed(run_folder: Path) -> None:
    """If all tensors are compare_two_ranks, a known tensor removed from the model is reported as fixed."""
    known_findings = make_baseline(compare_two_ranks(run_folder, "fc.weight")) | {
        baseline.Entry("ddp", "SYN299", "parameter", "old.weight")
    }
    report = baseline.apply_baseline(compare_two_ranks(run_folder, "fc.weight"), known_findings)
    assert list_fields(report.groups[0].fixed, "names") == [("old.weight",)]


def test_entries_of_other_runs_are_kept(run_folder: Path) -> None:
    """An update for one run keeps the entries of other runs, and does not report them as fixed."""
    second = baseline.Entry("zero", "SYN299", "parameter", "fc.weight")
    report = baseline.apply_baseline(compare_two_ranks(run_folder, "fc.bias"), frozenset({second}))
    assert report.groups[0].fixed == ()
    assert set(list_fields(baseline.update_baseline(report, frozenset({second})), "run")) == {"ddp", "zero"}


def test_allowed_findings_are_not_written(run_folder: Path) -> None:
    """An allowed finding is not added to the baseline, and if known, it is not reported as fixed."""
    allowed = compare_two_ranks(run_folder, *STATISTICS, allow=("SYN201",))
    assert make_baseline(allowed) == frozenset()
    known_findings = make_baseline(compare_two_ranks(run_folder, *STATISTICS))
    report = baseline.apply_baseline(allowed, known_findings)
    assert list_fields(report.groups[0].findings, "allowed", "accepted") == [(True, False)]
    assert report.groups[0].fixed == ()


def test_steps_of_a_run_share_their_entries(tmp_path: Path) -> None:
    """A finding at any step is not fixed; an entry without a finding is reported as fixed once, at the last step."""
    for step, endings in ((1, ("fc.weight",)), (2, ())):
        save(tmp_path / f"step_{step}" / "ddp_rank0.pth", network())
        save(tmp_path / f"step_{step}" / "ddp_rank1.pth", changed(network(), *endings))
    report = syncheck.compare(tmp_path)
    known_findings = make_baseline(report)
    assert set(list_fields(known_findings, "run")) == {"ddp"}
    gone = baseline.Entry("ddp", "SYN220", "parameter", "fc.bias")
    judged = baseline.apply_baseline(report, known_findings | {gone})
    assert (judged.exit_code, [len(group.fixed) for group in judged.groups]) == (0, [0, 1])


def test_values_are_accepted_by_name(run_folder: Path) -> None:
    """An epoch that differs between ranks is known by its name, with any values."""

    def report(step: int) -> Report:
        for rank in range(2):
            save(run_folder / f"ddp_rank{rank}.pth", {"model": network(), "epoch": step * rank})
        return syncheck.compare(run_folder)

    known_findings = make_baseline(report(3))
    assert known_findings == {baseline.Entry("ddp", "SYN106", "value", "epoch")}
    assert baseline.apply_baseline(report(5), known_findings).exit_code == 0


def test_undecided_is_never_accepted(run_folder: Path) -> None:
    """With an unreadable file, the verdict is "undecided", nothing is fixed, and the baseline cannot be updated; an
    update without a comparison fails too."""
    known_findings = make_baseline(compare_two_ranks(run_folder, "fc.weight"))
    (run_folder / "ddp_rank2.pth").write_bytes(b"junk")
    report = baseline.apply_baseline(syncheck.compare(run_folder), known_findings)
    assert (report.verdict, report.exit_code, report.groups[0].fixed) == ("undecided", 2, ())
    with pytest.raises(UsageError, match=r"not updated: .*ddp_rank2.pth could not be read"):
        baseline.update_baseline(report, known_findings)
    save(run_folder / "ddp_rank1.pth", network())
    assert baseline.apply_baseline(syncheck.compare(run_folder), known_findings).groups[0].fixed == ()
    with pytest.raises(UsageError, match="not updated: nothing was compared"):
        baseline.update_baseline(syncheck.compare(run_folder / "ddp_rank0.pth"), known_findings)


def test_runs_with_one_name_are_distinguished_by_folder(tmp_path: Path) -> None:
    """A known finding of a run is new for another run with the same name, also after both folders are moved."""
    for side, endings in (("old", ("fc.weight",)), ("new", ())):
        for rank in range(2):
            save(tmp_path / "here" / side / f"ddp_rank{rank}.pth", changed(network(), *endings if rank else ()))
    known_findings = make_baseline(syncheck.compare(tmp_path / "here"))
    assert set(list_fields(known_findings, "run")) == {"old/ddp"}
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert baseline.apply_baseline(syncheck.compare(tmp_path / "there"), known_findings).exit_code == 0
    save(tmp_path / "there" / "new" / "ddp_rank1.pth", changed(network(), "fc.weight"))
    assert baseline.apply_baseline(syncheck.compare(tmp_path / "there"), known_findings).exit_code == 1


def test_labels_have_no_run_id_and_no_step() -> None:
    """Labels distinguish launches in different folders, and contain no step or rank folder and no run id."""
    result = group_replicas(
        [
            snapshot(f"/scratch/{job}/step_{step}/ddp_rank{rank}.pth", run="ddp", run_id=job * 4, rank=rank, step=step)
            for job, step, rank in product(("a", "b"), (10, 20), (0, 1))
        ]
    )
    assert set(list_fields(result, "run_id", "label")) == {("aaaa", "a/ddp"), ("bbbb", "b/ddp")}
    plain = group_replicas(
        [
            snapshot(f"/scratch/{job}/step_{step}/files/ddp_rank{rank}.pth")
            for job, step, rank in product(("a", "b"), (10, 20), (0, 1))
        ]
    )
    assert list_fields(plain, "label") == ["a/ddp"] * 2 + ["b/ddp"] * 2
    again = group_replicas(
        [
            snapshot(f"ckpts/ddp_{job}_rank{rank}.pth", run="ddp", run_id=job * 4, rank=rank)
            for job, rank in product(("a", "b"), (0, 1))
        ]
    )
    assert list_fields(again, "run", "label") == [
        ("ckpts/ddp (aaaa)", "ddp"),
        ("ckpts/ddp (bbbb)", "ddp"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
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
def test_an_invalid_baseline_is_a_usage_error(
    run_folder: Path, tmp_path: Path, content: str | bytes, message: str
) -> None:
    """An invalid file is a one-line UsageError before the comparison, and an update does not overwrite the file."""
    file = tmp_path / "b.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = file.read_bytes()
    with pytest.raises(UsageError) as caught:
        compare_two_ranks(run_folder, baseline=str(file))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError):
        api.check_baseline(syncheck.Options(baseline=str(file)), update=True)
    assert file.read_bytes() == before


def test_a_missing_baseline(run_folder: Path, tmp_path: Path) -> None:
    """A missing file, a folder or an invalid path is an error; only an update may start without a file."""
    for path, message in (
        (tmp_path / "no.json", "no such baseline"),
        (tmp_path, "Is a directory"),
        ("a\0b", "null byte"),
    ):
        with pytest.raises(UsageError, match=message):
            compare_two_ranks(run_folder, baseline=str(path))
    api.check_baseline(syncheck.Options(baseline=str(tmp_path / "no.json")), update=True)
    with pytest.raises(UsageError, match=r"baseline=.*: cannot be written: the folder"):
        api.check_baseline(syncheck.Options(baseline=str(tmp_path / "no" / "b.json")), update=True)


def test_options_take_a_baseline(run_folder: Path, tmp_path: Path) -> None:
    """In Python, the baseline is an option. Objects in memory are another run than the checkpoints in it."""
    file = tmp_path / "b.json"
    file.write_text(baseline.serialize(make_baseline(compare_two_ranks(run_folder, "fc.weight"))))
    options = syncheck.Options(baseline=str(file))
    report = syncheck.compare(run_folder, options=options)
    assert (report.exit_code, report.groups[0].findings[0].accepted) == (0, True)
    assert words.verdict_line(report) == "IN SYNC, ignoring baseline findings (SYN299)"
    with pytest.raises(OutOfSync):
        testing.assert_in_sync(network(), changed(network(), "fc.weight"), options=options)
    both = replace(options, allow=("SYN299",))
    assert "allowed findings (SYN299)" in words.verdict_line(syncheck.compare(run_folder, options=both))
    with pytest.raises(UsageError, match="baseline=7: must be a path"):
        syncheck.Options(baseline=7)  # type: ignore[arg-type]
