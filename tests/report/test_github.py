"""Workflow commands: levels, limits, and escaping of hostile names."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.checkpoints import changed, network, save_pth
from support.hostile_names import shorten
from support.hostile_report import HOSTILE, hostile
from support.listings import find_all, find_first, is_printable, join_fields, list_fields, list_names
from support.real_runs import compare_real_runs

import syncheck
from syncheck.messages import Undecided
from syncheck.records import Counts, Report
from syncheck.report import finding_text, github, words

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Group


PROPERTIES = (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%"))
DATA = (("%0D", "\r"), ("%0A", "\n"), ("%25", "%"))


def unescape(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    """Unescape a message or a property like the runner."""
    for escaped, plain in pairs:
        text = text.replace(escaped, plain)
    return text


def parse(line: str) -> tuple[str, dict[str, str], str] | None:
    """Parse a line of a log like the runner:
    https://github.com/actions/runner/blob/079cdb1d05fe0ec50f8c51de5a4fa51d0eb189b0/src/Runner.Common/ActionCommand.cs"""
    line = line.lstrip()
    end = line.find("::", 2)
    if not line.startswith("::") or end < 0:
        return None
    name, _, remainder = line[2:end].partition(" ")
    pairs = [pair.split("=", 1) for pair in remainder.strip().split(",") if pair]
    properties = {pair[0]: unescape(pair[1], PROPERTIES) for pair in pairs if len(pair) == 2 and pair[1]}
    return name, properties, unescape(line[end + 2 :], DATA)


def commands(text: str) -> list[tuple[str, dict[str, str], str]]:
    """Return the commands of a text, after which only the verdict and the counts follow."""
    lines = text.splitlines()
    parsed = [parse(line) for line in lines]
    assert [line for line, command in zip(lines, parsed, strict=True) if command is None] == lines[-2:]
    return [command for command in parsed if command is not None]


def copy_group(group: Group, number: int, run: str = "run") -> tuple[Group, ...]:
    """Return copies of a group as numbered runs."""
    return tuple(replace(group, name=f"run{i}", run=f"{run}{i}") for i in range(number))


def test_a_real_comparison() -> None:
    """Each finding is an error with code, file, tensors and fix; only the last step of a run has errors."""
    report = compare_real_runs()
    drawn = github.render(report)
    assert drawn.splitlines()[-2:] == ["OUT OF SYNC", words.counts_line(report)]
    growing, local = commands(drawn)
    assert (growing[0], local[0]) == ("error", "error")
    assert growing[1]["title"] == "SYN202 bn-drift-growing (error, likely) on ranks 0-1, ddp-nobufsync step 12"
    finding = find_first(join_fields(find_all(report.groups, step=12), "findings"), code="SYN202")
    assert f"\n{finding_text.summarize_history(finding)}\n" in growing[2]
    assert local[1]["title"].startswith("SYN201 bn-local-stats (warning, likely) on ranks 0-1, ")
    paths = list_fields(join_fields(report.groups, "replicas"), "path")
    assert local[1]["file"] in paths
    assert re.search(r"\n- layer3\.0\.bn1\.running_var: 16 of 16, max abs 0\.0379, max rel 4\.67%, max ulp ", local[2])
    (local_finding,) = find_all(report.findings, code="SYN201")
    assert f"\nFix: {local_finding.fix}\n" in local[2]


def test_in_sync_has_no_annotation(tmp_path: Path) -> None:
    """Replicas in sync have no annotation, an allowed finding is a warning, other findings are errors."""
    for rank in range(2):
        save_pth(tmp_path / f"rank{rank}.pth", changed(network(), "running_mean", by=rank))
    for allow, levels in ((("SYN201",), ["warning"]), ((), ["error"])):
        drawn = github.render(syncheck.compare(tmp_path, options=syncheck.Options(allow=allow)))
        assert list_fields(commands(drawn), 0) == levels
    save_pth(tmp_path / "rank1.pth", network())
    assert commands(github.render(syncheck.compare(tmp_path))) == []


def test_undecided_is_an_error(tmp_path: Path) -> None:
    """With exit code 2, an unreadable file has an error with its path, otherwise the reason of the verdict."""
    save_pth(tmp_path / "rank0.pth", network())
    (alone,) = commands(github.render(syncheck.compare(tmp_path)))
    assert alone[0] == "error"
    assert str(Undecided.ONE_FILE()) in alone[2]
    (tmp_path / "rank1.pth").write_text("no checkpoint")
    (unread,) = commands(github.render(syncheck.compare(tmp_path)))
    assert unread[0] == "error"
    assert unread[1]["file"] == str(tmp_path / "rank1.pth")
    assert commands(github.render(Report("undecided", ())))[0][0] == "error"


def test_information_and_undecided_groups() -> None:
    """An informational finding is a notice; an undecided group beside groups in sync is a warning."""
    group = hostile("calm").groups[0]
    in_sync = replace(group, verdict="in_sync", findings=(replace(group.findings[0], code="SYN104", severity="info"),))
    undecided = replace(group, name="other", run="other", verdict="undecided", findings=())
    parsed = commands(github.render(Report("in_sync", (in_sync, undecided))))
    assert list_fields(parsed, 0) == ["warning", "notice"]
    assert parsed[0][2] == "other"


@pytest.mark.parametrize("many", [10, 11, 25, 3000])
def test_no_more_than_github_shows(many: int) -> None:
    """Each level has at most ten annotations, and the last annotation contains the number of further annotations."""
    group = hostile("calm").groups[0]
    groups = copy_group(group, many)
    allowed = copy_group(replace(group, findings=(replace(group.findings[0], allowed=True),)), many, "allowed")
    parsed = commands(github.render(Report("out_of_sync", groups + allowed)))
    assert list_fields(parsed, 0) == ["error"] * 10 + ["warning"] * 10
    for last in (parsed[9], parsed[19]):
        hidden = re.fullmatch(r"syncheck: (\d+) more", last[1]["title"])
        assert (int(hidden[1]) if hidden else 1) == many - 9


def test_errors_come_first() -> None:
    """If there are more findings than GitHub shows, the most severe are shown."""
    group = hostile("calm").groups[0]
    mild = copy_group(group, 20)
    severe = replace(group.findings[0], code="SYN211", severity="error")
    parsed = commands(github.render(Report("out_of_sync", (*mild, replace(group, run="last", findings=(severe,))))))
    assert parsed[0][1]["title"].startswith("SYN211 ")


@pytest.mark.parametrize("name", HOSTILE, ids=shorten)
def test_names_cannot_add_commands(name: str) -> None:
    """With every hostile name the runner parses the same commands with the same properties."""
    drawn = github.render(hostile(name))
    assert is_printable(drawn)
    parsed, calm = commands(drawn), commands(github.render(hostile("calm")))
    assert list_fields(parsed, 0) == list_fields(calm, 0)
    for command, expected in zip(parsed, calm, strict=True):
        assert set(command[1]) in ({*expected[1]}, {*expected[1]} - {"file"})
        assert ("file" in command[1]) or not name.strip()
        assert command[2].count("\n") <= expected[2].count("\n")
    if name.isprintable() and name.strip() and len(name) < 100:
        assert {command[1]["file"] for command in parsed} == {name}
        assert all(name in command[2] for command in parsed)


def test_the_parser_detects_commands() -> None:
    """The parser in this module detects a command that is not escaped."""
    assert commands("::error title=a::b\n::add-mask::c\nIN SYNC\ncounts")[1] == ("add-mask", {}, "c")
    assert parse("::error title=a,file=b::c") == ("error", {"title": "a", "file": "b"}, "c")


@pytest.mark.slow
def test_the_output_stays_small() -> None:
    """Long names and thousands of tensors, groups and unreadable files give less than 300 kB."""
    first = hostile("%" * 10_000)
    tensors = first.groups[0].tensors * 5000
    ranks = tuple(range(0, 4096, 2))
    finding = replace(first.groups[0].findings[0], ranks=ranks, tensors=tuple(list_names(tensors)))
    groups = tuple(
        replace(
            first.groups[0], run=f"{i}", tensors=tensors[: 10_000 // (i + 1)], findings=(finding,) * 8, counts=Counts()
        )
        for i in range(200)
    )
    drawn = github.render(replace(first, groups=groups, unreadable=first.unreadable * 5000))
    commands(drawn)
    assert len(drawn) < 300_000


def test_folders_are_not_files(tmp_path: Path) -> None:
    """Folders that were not compared with each other have a title of their own; only other files are "some files"."""
    titles = {}
    for name in ("plain", "notes"):
        for run in ("run_a", "run_b"):
            (tmp_path / name / run).mkdir(parents=True)
            for rank in (0, 1):
                save_pth(tmp_path / name / run / f"rank_{rank}.pth", network())
        if name == "notes":
            (tmp_path / name / "run_a" / "model.part").write_text("text")
        report = syncheck.compare(tmp_path / name / "run_a", tmp_path / name / "run_b")
        assert report.exit_code == 0
        titles[name] = [command[1]["title"] for command in commands(github.render(report))]
    folders = "syncheck: folders were not compared with each other"
    assert titles == {"plain": [folders], "notes": [folders, "syncheck: some files were not compared"]}
