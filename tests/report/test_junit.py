"""JUnit XML: results of cases, agreement with the exit code, and escaping of hostile names."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import changed, network, save_pth, save_safetensors
from support.groups import make_finding
from support.hostile_names import shorten
from support.hostile_report import HOSTILE, hostile
from support.listings import is_printable, list_codes, list_fields, list_names
from support.real_runs import REAL, compare_real_runs

import syncheck
from syncheck.records import Report, ValueDiff
from syncheck.report import junit
from syncheck.text import logged

if TYPE_CHECKING:
    from pathlib import Path


# Children and attributes by element, from the xsd in the docstring of `junit`. NEEDED: required attributes.
CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"testsuite", "properties", "testcase", "system-out", "system-err"},
    "properties": {"property"},
    "testcase": {"skipped", "error", "failure", "system-out", "system-err"},
}
NEEDED = {
    "testsuite": {"name", "tests", "failures", "errors"},
    "testcase": {"name"},
    "property": {"name", "value"},
}
ATTRIBUTES = {
    "testsuites": {"name", "time", "tests", "failures", "errors"},
    "testsuite": {"name", "tests", "failures", "errors", "skipped", "time", "timestamp", "hostname", "id", "file"},
    "testcase": {"name", "time", "classname", "group"},
    "property": {"name", "value"},
    "failure": {"type", "message"},
    "error": {"type", "message"},
    "skipped": {"type", "message"},
}


def parse(text: str) -> ET.Element:
    """Return the parsed document after checking it against the schema and its counts."""
    root = ET.fromstring(text.encode())
    assert root.tag == "testsuites"
    for element in root.iter():
        assert set(list_fields(element, "tag")) <= CHILDREN.get(element.tag, set()), element.tag
        assert NEEDED.get(element.tag, set()) <= set(element.attrib) <= ATTRIBUTES.get(element.tag, set())
    for element in [root, *root]:
        for name, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert element.get(name, str(len(list(element.iter(tag))))) == str(len(list(element.iter(tag))))
    return root


def results_by_case(root: ET.Element) -> dict[tuple[str, str], str]:
    """Return the result of each case by suite and name."""
    results = {}
    for suite in root:
        for case in suite.iter("testcase"):
            (ended,) = case
            results[suite.attrib["name"], case.attrib["name"]] = ended.tag.replace("system-out", "passed")
    assert len(results) == int(root.attrib["tests"])
    return results


def agree(report: Report, root: ET.Element) -> None:
    """Assert failures for exit code 1, only errors for 2, and neither for 0."""
    failures = int(root.attrib["failures"])
    errors = int(root.attrib["errors"])
    assert int(root.attrib["tests"]) > 0
    assert {0: not failures and not errors, 1: failures > 0, 2: errors > 0 and not failures}[report.exit_code]


def test_a_real_comparison() -> None:
    """Each kind of each group is a case, and the kinds that differ fail with code, finding and tensors."""
    report = compare_real_runs()
    root = parse(junit.render(report))
    agree(report, root)
    assert [suite.attrib["name"] for suite in root] == list_names(report.groups)
    ended = results_by_case(root)
    for group in report.groups:
        failed = {case for (suite, case), how in ended.items() if suite == group.name and how == "failure"}
        assert failed == ({"bn-stats"} if group.findings else set())
        assert ended[group.name, "parameters"] == "passed"
    (local,) = (group for group in report.groups if list_codes(group.findings) == ["SYN201"])
    (failure,) = root.findall(f"testsuite[@name='{local.name}']/testcase[@name='bn-stats']/failure")
    assert failure.attrib["type"] == "SYN201"
    assert failure.attrib["message"].startswith("SYN201 bn-local-stats (warning, likely) on ranks 0-1: ")
    assert str(local.findings[0].fix) in str(failure.text)
    worst = local.tensors[0].name
    assert worst in str(failure.text)
    (passed,) = root.findall(f"testsuite[@name='{local.name}']/testcase[@name='parameters']/system-out")
    assert "IN SYNC" in str(passed.text)
    assert "OUT OF SYNC" not in str(passed.text)


def test_an_unread_file_is_an_error(tmp_path: Path) -> None:
    """An unreadable file is a separate error beside the cases of other files, which pass."""
    for rank in range(2):
        save_pth(tmp_path / f"rank{rank}.pth", network())
    (tmp_path / "rank2.pth").write_text("no checkpoint")
    report = syncheck.compare(tmp_path)
    root = parse(junit.render(report))
    agree(report, root)
    assert report.exit_code == 2
    assert sorted(results_by_case(root).values()) == ["error", "passed", "passed"]
    (error,) = root.iter("error")
    assert error.attrib["type"] == "unreadable"
    assert "rank2.pth" in error.attrib["message"]


@pytest.mark.parametrize("others", [False, True])
def test_one_file_alone(tmp_path: Path, others: bool) -> None:
    """A file without a replica is an error and makes the exit code 2, even beside groups in sync."""
    save_pth(tmp_path / "alone" / "x.pth", network())
    if others:
        for rank in range(2):
            save_pth(tmp_path / "ddp" / f"rank{rank}.pth", network())
    report = syncheck.compare(tmp_path / "alone", *([tmp_path / "ddp"] if others else []))
    root = parse(junit.render(report))
    agree(report, root)
    (how,) = (how for (_, case), how in results_by_case(root).items() if case == "replicas")
    assert how == "error"


def test_cases_without_comparison_do_not_pass(tmp_path: Path) -> None:
    """RNG states, which are not compared, are skipped, and an error if there are no other tensors."""
    for rank in range(2):
        rng = {"rng": np.full(8, rank, np.int64)}
        save_pth(tmp_path / "with" / f"rank{rank}.pth", {**network(), **rng})
        save_pth(tmp_path / "only" / f"rank{rank}.pth", rng)
    for folder, how, code in (("with", "skipped", 0), ("only", "error", 2)):
        report = syncheck.compare(tmp_path / folder)
        root = parse(junit.render(report))
        agree(report, root)
        assert report.exit_code == code
        assert [end for (_, case), end in results_by_case(root).items() if case == "rng"] == [how]
    assert "(1 rng" in junit.render(report)


def test_an_empty_report_is_an_error() -> None:
    """A report without groups or files has one error, because CI systems accept documents without cases."""
    report = Report("undecided", ())
    root = parse(junit.render(report))
    agree(report, root)
    assert list(results_by_case(root).values()) == ["error"]


def test_options_that_exclude_all_tensors(tmp_path: Path) -> None:
    """A group without tensors after the options is an error."""
    for rank in range(2):
        save_pth(tmp_path / f"rank{rank}.pth", network())
    report = syncheck.compare(tmp_path, options=syncheck.Options(include=("nothing*",)))
    root = parse(junit.render(report))
    agree(report, root)
    assert list_fields(results_by_case(root), 1) == ["tensors"]


def test_missing_checksums(tmp_path: Path) -> None:
    """With quick, tensors without stored checksums are an error if nothing else was compared."""
    for rank in range(2):
        save_safetensors(tmp_path / f"rank{rank}.safetensors", network())
    report = syncheck.compare(tmp_path, options=syncheck.Options(quick=True))
    root = parse(junit.render(report))
    agree(report, root)
    assert set(results_by_case(root).values()) == {"error"}
    assert report.exit_code == 2


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("allow", [(), ("SYN201",), ("SYN201", "SYN202")])
@pytest.mark.parametrize("only", [(), ("params",), ("buffers",), ("optimizer",), ("rng",)])
@pytest.mark.parametrize("folders", [REAL, REAL[2:], REAL[:1]])
def test_results_agree_with_the_exit_code(
    folders: list[Path], only: tuple[str, ...], allow: tuple[str, ...], quick: bool, tmp_path: Path
) -> None:
    """For all options, failures and errors agree with the exit code."""
    (tmp_path / "broken.pth").write_text("no checkpoint")
    for paths in (folders, [*folders, tmp_path / "broken.pth"]):
        report = syncheck.compare(*paths, options=syncheck.Options(only=only, allow=allow, quick=quick))
        agree(report, parse(junit.render(report)))


def test_allowed_findings_pass(tmp_path: Path) -> None:
    """An allowed finding fails no case, and its case contains it."""
    for rank in range(2):
        save_pth(tmp_path / f"rank{rank}.pth", changed(network(), "running_mean", by=rank))
    report = syncheck.compare(tmp_path, options=syncheck.Options(allow=("SYN201",)))
    root = parse(junit.render(report))
    agree(report, root)
    assert set(results_by_case(root).values()) == {"passed"}
    (text,) = (out.text for out in root.iter("system-out") if "SYN201" in str(out.text))
    assert "SYN201 bn-local-stats (warning, consistent, allowed) on ranks 0-1" in str(text)


def test_findings_without_tensors_fail_cases() -> None:
    """A failing finding without tensors fails all cases; a finding on values fails the case of values."""
    group = hostile("calm").groups[0]
    finding = replace(group.findings[0], tensors=())
    values = make_finding("SYN106", "different-progress", "error", (0, 1), (), "e", "c", "f", values=("step",))
    step = ValueDiff("step", {0: 1, 1: 2}, counts=True)
    for findings, failed in (((finding,), 2), ((values,), 1), ((finding, values), 2)):
        report = Report("out_of_sync", (replace(group, findings=findings, values=(step,)),))
        root = parse(junit.render(report))
        agree(report, root)
        assert int(root.attrib["failures"]) == failed
        assert int(root.attrib["tests"]) == 2


@pytest.mark.parametrize("name", HOSTILE, ids=shorten)
def test_names_cannot_break_the_document(name: str) -> None:
    """For every hostile name the document is well-formed ASCII without control characters and has the same shape."""
    report = hostile(name)
    text = junit.render(report)
    assert text.isascii()
    root, calm = parse(text), parse(junit.render(hostile("calm")))
    shape = [(element.tag, *sorted(element.attrib)) for element in root.iter()]
    assert shape == [(element.tag, *sorted(element.attrib)) for element in calm.iter()]
    for element in root.iter():
        assert is_printable(element.text or "")
        assert all(c.isprintable() for value in element.attrib.values() for c in value)
    if len(name) < 100 and name.isprintable():
        assert name in root[0].attrib["name"]
        assert f"\n{logged(f'  {name}')}" in str(root.findtext("testsuite/testcase/failure")).split("differing")[1]


@pytest.mark.slow
def test_the_document_stays_small(tmp_path: Path) -> None:
    """With long names and thousands of tensors and findings in a group, the document is small."""
    group = hostile("x" * 100_000).groups[0]
    report = Report("out_of_sync", (replace(group, tensors=group.tensors * 5000, findings=group.findings * 5000),))
    text = junit.render(report)
    parse(text)
    assert len(text) < 100_000
    assert len(json.dumps(text)) > 1000
