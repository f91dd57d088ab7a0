"""The list of tests before a release names slow tests only, and no test that has been renamed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.marks import UNMATCHED, read_patterns

ROOT = Path(__file__).resolve().parents[1]


def test_each_line_names_a_slow_test(request: pytest.FixtureRequest) -> None:
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
    ((_, pattern),) = read_patterns().items()
    assert pattern.match(test)
    assert not pattern.match(other)
