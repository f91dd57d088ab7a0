"""What a baseline has and no checkpoint shows any more, in each format, with names that do something elsewhere."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hostile_report import HOSTILE, hostile

from syncheck.records import Fixed
from syncheck.report import files, plain, text, words


def test_names_of_the_baseline_can_do_nothing() -> None:
    """Whatever a baseline's names are, they add one line of bounded length, one notice, and no element to a page."""
    group = hostile("calm").groups[0]
    report = replace(hostile("calm"), groups=(group,))
    for name in HOSTILE:
        fixed = replace(report, groups=(replace(group, label=name, fixed=(Fixed(name, (name,) * 9),)),))
        (line,) = words.fixed_lines(fixed.groups)
        assert line.startswith("fixed: ")
        assert len(line) < 800
        assert line.isprintable()
        for parts in (text.comparison, text.overview):
            assert line in plain.render(parts(fixed, 0)).splitlines() or "#" in name, name
        before, after = (files.render_format("github", one).splitlines() for one in (report, fixed))
        assert len(after) == len(before) + 1
        added = next(drawn for drawn in after if drawn not in before)
        assert added.startswith("::notice title=syncheck%3A findings")
        assert next(ET.fromstring(files.render_format("junit", fixed)).iter("property")) is not None
        assert len(files.render_format("markdown", fixed)) < 60_000


@pytest.mark.slow
def test_names_of_the_baseline_are_no_elements_of_a_page() -> None:
    """A page has a line more for each of them, and no element that a name would open."""
    report = hostile("calm")
    fixed = tuple(Fixed("SYN201", (name,)) for name in HOSTILE)
    page = files.render_format("html", replace(report, groups=(replace(report.groups[0], fixed=fixed),)))
    assert page.count("<p>fixed: ") == len(HOSTILE)
    report = replace(report, groups=report.groups[:1])
    assert len(re.findall("<script", page)) == len(re.findall("<script", files.render_format("html", report)))
