"""The list of tests before a release names slow tests only, and no test that has been renamed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.marks import read_patterns

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_each_line_names_a_slow_test() -> None:
    """A line without a test would leave a renamed test to each run of `.ci/run`."""
    for module in ("torch", "lightning", "peft"):  # some of the tests cannot be collected without them
        pytest.importorskip(module)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow", "-p", "no:cacheprovider", "tests"]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=True).stdout
    unmatched = []
    for line, pattern in read_patterns().items():
        if not any(map(pattern.match, collected.splitlines())):
            unmatched.append(line)
    assert unmatched == []


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
