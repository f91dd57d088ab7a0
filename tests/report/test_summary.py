"""The last block of a text report: verdict, findings, counts and omissions, on a terminal of 80 x 24."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.listings import measure_width

import syncheck
from syncheck import records
from syncheck.report import plain, summary, tables, terminal, text

if TYPE_CHECKING:
    from syncheck.records import Finding, Report

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


def read_summary(report: Report, *, width: int = 80, verbose: bool = False) -> list[str]:
    """Return the lines of the summary of a report."""
    return plain.render(summary.summarize(report, width=width, verbose=verbose)).splitlines()


def draw(report: Report, limit: int = 10, *, verbose: bool = False) -> str:
    """Return a report as `syncheck compare` prints it."""
    return plain.render(text.draw_comparison(report, limit, verbose=verbose))


@pytest.fixture(scope="module")
def report() -> Report:
    """Return two groups: SYN217 on rank 2 at step 12, in sync at step 11."""
    return syncheck.compare(FIXTURES / "desync/stale_rank")


@pytest.fixture(scope="module")
def stale(report: Report) -> Finding:
    """Return the finding of the report."""
    return report.groups[1].findings[0]


def test_the_summary_is_the_last_block(report: Report) -> None:
    """A text ends with verdict, failing groups, one line per finding, and counts."""
    lines = draw(report).splitlines()
    verdict, groups, finding, counts = lines[-4:]
    assert (verdict, lines[-5]) == ("OUT OF SYNC", "")
    assert groups.startswith("1 of 2 groups out of sync, the first: ")
    assert finding.startswith("  SYN217  rank 2  67 tensors  proved  A rank holds")
    assert counts.startswith("134 tensors: 67 identical")


def test_only_groups_out_of_sync_have_details(report: Report) -> None:
    """A group in sync is one line beside a group out of sync, and has its files with verbose."""
    brief, verbose = draw(report), draw(report, verbose=True)
    assert "step_11/rank_0.pth" not in brief
    assert "step 11, 3 replicas: IN SYNC" in brief
    assert "step_11/rank_0.pth" in verbose
    assert brief.count("step_12/rank_0.pth") == verbose.count("step_12/rank_0.pth") == 1


@pytest.mark.parametrize("name", ["desync/bn_local_stats", "in_sync/ddp_no_bn"])
def test_one_group_prints_its_verdict_once(name: str) -> None:
    """The verdict of the only group is in the summary only, of `compare` and of `report`."""
    single = syncheck.compare(FIXTURES / name)
    assert draw(single).count("SYNC") == 1
    assert plain.render(text.draw_overview(single, 3)).count("SYNC") == 1


def test_findings_come_before_files_and_tables_last(report: Report) -> None:
    """The details of a group have the order finding, files, kinds, tensors."""
    drawn = draw(report)
    positions = [drawn.index(word) for word in ("SYN217", "step_12/rank_0.pth", "  kind  ", "  tensor  ", "\nOUT OF")]
    assert positions == sorted(positions)


@pytest.mark.parametrize("width", [80, 200])
def test_thirty_findings_fit(report: Report, stale: Finding, width: int) -> None:
    """The summary of 30 findings fits on the screen, and verbose lists all of them."""
    findings = tuple(replace(stale, code=f"SYN{number}") for number in range(100, 130))
    group = replace(report.groups[1], findings=findings)
    crowded = replace(report, groups=(group, report.groups[0]), skipped=3, skipped_paths=("a", "b", "c"))
    parts = summary.summarize(crowded, width=width)
    drawn = terminal.render(parts, width, color=False).splitlines()
    assert len(drawn) < 24
    assert measure_width(drawn) <= width
    assert "  ... and 22 more findings; -v lists all" in drawn
    assert len(read_summary(crowded, verbose=True)) == len(findings) + 4


def test_a_finding_of_several_groups_has_one_line() -> None:
    """The same finding at three steps is one line with the number of groups."""
    lines = read_summary(syncheck.compare(FIXTURES / "desync/bn_no_broadcast"))
    assert [line.split("  ")[1:4] for line in lines[2:-1]] == [["SYN202", "ranks 0, 1", "42 tensors in 3 groups"]]


def test_findings_of_two_models() -> None:
    """A finding of two models names both in place of ranks, and a cut after a sentence has three dots."""
    folders = FIXTURES / "desync/bn_local_stats", FIXTURES / "desync/stale_rank/step_12"
    lines = read_summary(syncheck.diff(folders[0] / "ddp_rank0.pth", folders[1] / "rank_0.pth"))
    assert lines[1].startswith("  SYN102  A and B  58 tensors  proved  ")
    assert lines[2].endswith("No rule explains this difference...")


def test_ignored_findings_are_marked(report: Report, stale: Finding) -> None:
    """Allowed findings and information are marked, and follow the failing findings."""
    information = replace(stale, code="SYN104", severity="info")
    findings = (information, replace(stale, code="SYN215", allowed=True), stale)
    lines = read_summary(replace(report, groups=(replace(report.groups[1], findings=findings),)))
    assert [line.split()[0] for line in lines[1:-1]] == ["SYN217", "SYN215", "SYN104"]
    assert ("proved, allowed" in lines[2], "proved (info)" in lines[3]) == (True, True)


def test_hostile_names_do_not_reach_the_screen(report: Report) -> None:
    """A long name of a group is cut, and its control characters are escaped."""
    group = replace(report.groups[1], name="\x1b[2J" + "n" * 500)
    lines = read_summary(replace(report, groups=(group, group)))
    assert measure_width(lines) <= 80
    assert "\x1b" not in "".join(lines)


def test_tensors_are_sorted_for_a_reader(report: Report) -> None:
    """Parameters come first, then buffers and the optimizer, with the largest difference of each kind first."""
    diffs = tables.sort_by_kind(report.groups[1].tensors)
    kinds = list(dict.fromkeys(diff.kind for diff in diffs))
    assert (kinds[0], kinds[-1], "bn_count" in kinds[2:4]) == ("parameter", "optimizer", True)
    sizes = [diff.max_abs for diff in diffs if diff.kind == "parameter"]
    assert sizes == sorted(sizes, reverse=True)


def test_ulp_are_listed_if_they_are_few(report: Report) -> None:
    """A column of ULP appears for rounding differences and with verbose; else the scale of the tensor is enough."""
    assert ("max/rms" in draw(report), "max ulp" in draw(report)) == (True, False)
    assert "max ulp" in draw(report, verbose=True)
    rounded = syncheck.compare(FIXTURES / "desync/rounding_only")
    assert "max ulp" in draw(rounded)


def test_the_scale_is_the_root_mean_square(report: Report) -> None:
    """The difference is divided by the norm per element of the majority; an unknown norm gives a dash."""
    evidence = records.Evidence(norms={0: 4.0, 1: 400.0})
    diff = replace(report.tensors[0], numel=16, max_abs=0.5, evidence=evidence, clusters=((0,), (1,)))
    assert tables.scale_cell(diff) == "0.5"
    assert tables.scale_cell(replace(diff, evidence=None)) == "-"
    assert tables.scale_cell(replace(diff, max_abs=None)) == "-"
