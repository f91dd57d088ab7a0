"""Resolved findings of a baseline in each format, with hostile names."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hostile_report import HOSTILE, hostile

from syncheck.records import Fixed
from syncheck.report import files, plain, text, words


def test_names_of_the_baseline_are_escaped() -> None:
    """A resolved finding adds one line of bounded length, and one notice on GitHub, for every hostile name."""
    group = hostile("calm").groups[0]
    report = replace(hostile("calm"), groups=(group,))
    for name in HOSTILE:
        fixed = replace(report, groups=(replace(group, label=name, fixed=(Fixed(name, (name,) * 9),)),))
        (line,) = words.fixed_lines(fixed.groups)
        assert len(line) < 800
        assert line.isprintable()
        for parts in (text.comparison, text.overview):
            assert line in plain.render(parts(fixed, 0)).splitlines() or "#" in name, name
        before, after = (files.render_format("github", one).splitlines() for one in (report, fixed))
        assert len(after) == len(before) + 1
        added = next(line for line in after if line not in before)
        assert added.startswith("::notice ")
        assert next(ET.fromstring(files.render_format("junit", fixed)).iter("property")) is not None
        assert len(files.render_format("markdown", fixed)) < 60_000


@pytest.mark.slow
def test_names_of_the_baseline_are_escaped_in_html() -> None:
    """The page contains one line per resolved finding, and no script from a name."""
    report = hostile("calm")
    fixed = tuple(Fixed("SYN201", (name,)) for name in HOSTILE)
    page = files.render_format("html", replace(report, groups=(replace(report.groups[0], fixed=fixed),)))
    assert page.count("<p>fixed: ") == len(HOSTILE)
    report = replace(report, groups=report.groups[:1])
    assert len(re.findall("<script", page)) == len(re.findall("<script", files.render_format("html", report)))
