"""Marks of tests: for parameters, and those of the list of tests before a release."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

BEFORE_RELEASE = Path(__file__).parents[1] / "release.txt"
# Lines of this list that name no slow test of this session.
UNMATCHED: list[str] = []


def slow(*values: object) -> list[Any]:
    """Return parameters of which each makes a slow test. The test has other parameters, which are in the fast suite."""
    parameters = []
    for value in values:
        parameters.append(pytest.param(value, marks=pytest.mark.slow))

    return parameters


def read_patterns() -> dict[str, re.Pattern[str]]:
    """Return the lines of the list of tests before a release, and the pattern that matches the start of a test's id."""
    patterns = {}
    for line in BEFORE_RELEASE.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            patterns[line] = re.compile(re.escape(line).replace(r"\*", ".*"))

    return patterns


def mark_for_release(items: list[pytest.Item]) -> None:
    """Mark the tests of the list. `UNMATCHED` gets the lines that name no slow test among these items."""
    patterns = read_patterns()
    any_pattern = re.compile("|".join(pattern.pattern for pattern in patterns.values()))
    marked = []
    for item in items:
        if any_pattern.match(item.nodeid):
            item.add_marker(pytest.mark.release)
            if item.get_closest_marker("slow"):
                marked.append(item.nodeid)

    for line, pattern in patterns.items():
        if not any(map(pattern.match, marked)):
            UNMATCHED.append(line)


def mark_many_ranks(items: list[pytest.Item]) -> None:
    """Mark tests on four and more ranks as slow: the start of their processes alone takes seconds."""
    for item in items:
        marker = item.get_closest_marker("syncheck")
        ranks = None if marker is None else marker.kwargs.get("ranks")
        # Some tests have a list of sizes.
        if isinstance(ranks, int) and ranks >= 4:
            item.add_marker(pytest.mark.slow)
