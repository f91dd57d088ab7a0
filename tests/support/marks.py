"""Marks of tests: for parameters, and those of the list of tests before a release."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

BEFORE_RELEASE = Path(__file__).parents[1] / "release.txt"
# Lines of this list that name no test of this session.
UNMATCHED: list[str] = []


def slow(*values: object) -> list[Any]:
    """Return parameters of which each makes a slow test. The test has other parameters, which are in the fast suite."""
    parameters = []
    for value in values:
        parameters.append(pytest.param(value, marks=pytest.mark.slow))

    return parameters


# `1/3 START`: one of three tests stays outside the list, the first, the fourth and so on.
_FORM = re.compile(r"(?:1/(\d+) )?(.*)")


class Line(NamedTuple):
    """A line of the list of tests before a release."""

    text: str
    module: str
    pattern: re.Pattern[str]
    """Matches the start of a test's id."""
    kept: int
    """One of so many matching tests stays outside the list; 0 for none."""


def read_lines() -> list[Line]:
    """Return the lines of the list of tests before a release."""
    lines = []
    for text in BEFORE_RELEASE.read_text(encoding="utf-8").splitlines():
        if not text or text.startswith("#"):
            continue
        share, start = _FORM.fullmatch(text).groups()  # type: ignore[union-attr]  # matches any text
        lines.append(Line(text, _module(start), re.compile(re.escape(start).replace(r"\*", ".*")), int(share or 0)))

    return lines


def _module(test: str) -> str:
    return test.partition("::")[0]


def mark_for_release(items: list[pytest.Item]) -> None:
    """Mark the tests of the list, which are slow ones too. `UNMATCHED` gets the lines that name no test."""
    items_of: dict[str, list[pytest.Item]] = {}
    for item in items:
        items_of.setdefault(_module(item.nodeid), []).append(item)
    for line in read_lines():
        matching = [item for item in items_of.get(line.module, ()) if line.pattern.match(item.nodeid)]
        if not matching:
            UNMATCHED.append(line.text)
        for number, item in enumerate(matching):
            if line.kept == 0 or number % line.kept:
                item.add_marker(pytest.mark.slow)
                item.add_marker(pytest.mark.release)


def mark_many_ranks(items: list[pytest.Item]) -> None:
    """Mark tests on four and more ranks as slow: the start of their processes alone takes seconds."""
    for item in items:
        marker = item.get_closest_marker("syncheck")
        ranks = None if marker is None else marker.kwargs.get("ranks")
        # Some tests have a list of sizes.
        if isinstance(ranks, int) and ranks >= 4:
            item.add_marker(pytest.mark.slow)
