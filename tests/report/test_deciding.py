"""What would decide between the causes of a finding in files, and advice that several findings have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import changed, network, save

import syncheck
from syncheck.diagnose.rules import list_rules
from syncheck.findings import Finding
from syncheck.records import Group, Report
from syncheck.report import deciding, failure, github, html, markdown, plain, text
from syncheck.report.deciding import Decision, list_decisions

FIXTURES = Path(__file__).parents[2] / "fixtures" / "desync"


def make_group(*findings: Finding, form: str = "torch-zip") -> Group:
    """Return a group of two files, or of two ranks in memory, with findings."""
    report = syncheck.compare(str(FIXTURES / "bn_local_stats" / "*.pth"))
    replicas = []
    for replica in report.groups[0].replicas:
        replicas.append(replace(replica, format=form))
    return replace(report.groups[0], replicas=tuple(replicas), findings=findings)


def make_finding(code: str, *alternatives: str, certainty: str = "consistent", allowed: bool = False) -> Finding:
    """Return a finding of a code."""
    cause, fix = Decision.RECORD_RUN(codes=("cause",)), Decision.RECORD_RUN(codes=("fix",))
    return Finding(
        code, "slug", "error", (1,), ("w",), (), cause, fix,
        certainty=certainty, alternatives=alternatives, allowed=allowed,
    )  # fmt: skip


def list_named(finding: Finding, group: Group) -> list[tuple[str, tuple[str, ...]]]:
    """Return the names of the decisions, each with its codes."""
    return [(decision.code.name, decision.parameters["codes"]) for decision in list_decisions(finding, group)]


@pytest.mark.parametrize(
    ("finding", "decisions"),
    [
        (make_finding("SYN211", "SYN213"), [("WATCH", ("SYN211", "SYN213"))]),
        (make_finding("SYN299", "SYN214"), [("WATCH", ("SYN214",))]),
        (make_finding("SYN214", "SYN215"), [("WATCH", ("SYN214",)), ("SAVE_AT_START", ("SYN215",))]),
        (make_finding("SYN211", "SYN108"), [("WATCH", ("SYN211",)), ("RECORD_RUN", ("SYN108",))]),
        (make_finding("SYN221", "SYN225"), []),
        (make_finding("SYN211", "SYN213", certainty="likely"), []),
        (make_finding("SYN211", "SYN213", allowed=True), []),
    ],
)
def test_decisions(finding: Finding, decisions: list[tuple[str, tuple[str, ...]]]) -> None:
    """A cause that files do not prove has the check that would; a cause that is likely or allowed has none."""
    assert list_named(finding, make_group(finding)) == decisions


@pytest.mark.parametrize(("synced", "decisions"), [(None, [("RECORD_WRAPPER", ("SYN202",))]), (True, [])])
def test_the_wrapper_decides_unless_it_is_recorded(synced: bool | None, decisions: list[Any]) -> None:
    """Statistics that may be unsynchronized have the advice to record the wrapper, unless the metadata records it."""
    finding = make_finding("SYN201", "SYN202")
    group = make_group(finding)
    metadata = replace(group.evidence.metadata, buffers_synced=synced)
    group = replace(group, evidence=replace(group.evidence, metadata=metadata))
    assert list_named(finding, group) == decisions


def test_a_running_job_needs_no_other_check() -> None:
    """Ranks in memory are in a monitor or in `syncheck watch` already."""
    finding = make_finding("SYN211", "SYN213")
    assert not list_named(finding, make_group(finding, form="memory"))


def test_each_code_has_one_decision() -> None:
    """The table has codes of rules only, and each of them once."""
    codes: list[str] = []
    for _, deciding_codes in deciding._TABLE:
        codes += deciding_codes
    assert len(codes) == len(set(codes))
    assert set(codes) <= {rule.code for rule in list_rules()}


def test_every_surface_has_the_decision() -> None:
    """Terminal, Markdown, GitHub and page print it; a sparse SGD run with plain momentum names `syncheck watch`."""
    finding = make_finding("SYN211", "SYN213")
    report = Report("out_of_sync", (make_group(finding),))
    texts = [plain.render(text.draw_comparison(report, 3)), failure.message(report), github.render(report)]
    texts += [markdown.render(report), html.render(report, "0", [])]
    for rendered in texts:
        assert "torchrun --nproc-per-node 2 -m syncheck watch train.py" in rendered


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        (("SYN214",), "whether it is SYN214"),
        (("SYN212", "SYN211"), "whether it is SYN212 or SYN211"),
        (("SYN213", "SYN214", "SYN211"), "whether it is SYN213, SYN214 or SYN211"),
    ],
)
@pytest.mark.parametrize("decision", [Decision.WATCH, Decision.SAVE_AT_START])
def test_the_codes_to_decide_between_are_one_clause(decision: Decision, codes: tuple[str, ...], words: str) -> None:
    """One code, two and three are joined with "or"."""
    assert str(decision(codes=codes)).endswith(words)


def test_equal_advice_is_printed_once(tmp_path: Path) -> None:
    """Several groups with one finding print its fix once, then a reference; single groups print it."""
    for run in "abc":
        save(tmp_path / f"{run}_rank0.pth", network())
        save(tmp_path / f"{run}_rank1.pth", changed(network(), "running_mean"))
    report = syncheck.compare(tmp_path)
    fix = str(report.groups[0].findings[0].fix)
    printed = plain.render(text.draw_comparison(report, 3))
    assert printed.count(fix) == 1
    assert printed.count("as for SYN201 of ") == 2
    assert plain.render(text.draw_overview(report, 3)).count(fix) == 1
    single = plain.render(text.draw_comparison(replace(report, groups=report.groups[1:2]), 3))
    assert single.count(fix) == 1
    assert "as for" not in single


def test_other_advice_is_printed_in_full() -> None:
    """Two findings with different fixes, and one finding with the fix of another code, are told apart."""
    first, second = make_finding("SYN211"), make_finding("SYN213")
    other = replace(second, fix=Decision.WATCH(codes=("SYN301",)))
    report = Report("out_of_sync", (make_group(first, second, other),))
    printed = plain.render(text.draw_comparison(report, 3))
    assert printed.count("fix   save") == 1
    assert printed.count("fix   as for SYN211 of ") == 1
    assert printed.count("fix   run ") == 1
