"""The list of tests before a release: how its lines are read, and that none names a test that has been renamed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.marks import UNMATCHED, mark_for_release, read_lines

ROOT = Path(__file__).resolve().parents[1]


def test_each_line_names_a_test(request: pytest.FixtureRequest) -> None:
    """A line without a test would leave a renamed test to each run of `.ci/run`."""
    for module in ("torch", "lightning", "peft"):  # some of the tests cannot be collected without them
        pytest.importorskip(module)
    if not is_whole_suite(request.config):
        pytest.skip("only if all tests are collected")
    assert UNMATCHED == []


def is_whole_suite(config: pytest.Config) -> bool:
    """Return whether the tests of this session were selected by marks only."""
    paths = {Path(argument).resolve() for argument in config.args}
    return paths == {ROOT / "tests"} and not config.getoption("lf", default=False)


@pytest.mark.parametrize(
    ("line", "test", "other"),
    [
        ("a.py::test[b", "a.py::test[b-c]", "a.py::testb"),
        ("a.py::test[*-c]", "a.py::test[b-c]", "a.py::test[b-d]"),
        ("a.py::test[b+", "a.py::test[b+c]", "a.py::test[bb]"),
    ],
)
def test_brackets_and_signs_stand_for_themselves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, test: str, other: str
) -> None:
    """A line is the start of an id, in which only * is special."""
    (tmp_path / "list").write_text(f"# a comment\n\n{line}\n")
    monkeypatch.setattr("support.marks.BEFORE_RELEASE", tmp_path / "list")
    (read_line,) = read_lines()
    assert read_line.pattern.match(test)
    assert not read_line.pattern.match(other)


@pytest.mark.parametrize(("line", "listed"), [("a.py::test", [0, 1, 2, 3, 4]), ("1/3 a.py::test", [1, 2, 4])])
def test_some_tests_of_a_function_stay_outside_the_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, listed: list[int]
) -> None:
    """Listed tests are slow ones. A share at the start of a line leaves the first test, and others, as they are."""
    (tmp_path / "list").write_text(line)
    monkeypatch.setattr("support.marks.BEFORE_RELEASE", tmp_path / "list")
    marks: dict[int, list[str]] = {}
    items: list[Any] = []
    for number in range(5):
        add = marks.setdefault(number, []).append
        items.append(SimpleNamespace(nodeid=f"a.py::test[{number}]", add_marker=lambda mark, add=add: add(mark.name)))
    mark_for_release(items)
    assert [number for number in marks if marks[number] == ["slow", "release"]] == listed
    assert [number for number in marks if not marks[number]] == sorted({*range(5)} - {*listed})
