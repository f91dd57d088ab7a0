"""A report as JUnit XML, which CI systems show as tests: one suite per group, one case per kind of tensor.

The cases are the test items of the pytest plugin (`items.ITEMS`). Results of a case:

- `failure`: a finding makes the run out of sync. The type is the code of the finding.
- `error`: syncheck could not tell, and the exit code is 2: an unreadable file, or nothing was compared.
- `skipped`: nothing was compared for this case, and other cases decide.
- passed: otherwise.

Therefore the report has failures if and only if the exit code is 1, and errors without failures if and only if it is 2.
Elements and attributes follow
https://github.com/jenkinsci/xunit-plugin/blob/031e285ef3b60dee7aaf36e9096d7dcd95ffae83/src/main/resources/org/jenkinsci/plugins/xunit/types/model/xsd/junit-10.xsd
without times, because no tests ran.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

from syncheck.report import failure, items, words
from syncheck.report.selections import find_failing
from syncheck.text import logged, one_line, shorten

if TYPE_CHECKING:
    from syncheck.records import Group, Report

_MOST = 500  # characters of an attribute


def render(report: Report) -> str:
    """Return the document in ASCII, which is valid in every encoding."""
    root = ET.Element("testsuites", name="syncheck")
    for group in report.groups:
        _add_group(_add_suite(root, group.name), group, report)

    _add_unreadable(root, report)
    _add_uncompared(root, report)
    if not report.groups and not report.unreadable:
        case = _add_case(_add_suite(root, "syncheck"), "syncheck", items.NOTHING)
        _add_result(case, "error", "undecided", words.verdict_line(report))

    for suite in root:
        _set_counts(suite)
        # The schema has no such attribute of the root.
        suite.set("skipped", _count_elements(suite, "skipped"))

    _set_counts(root)
    ET.indent(root)
    # Characters beyond ASCII become character references.
    body = ET.tostring(root, encoding="us-ascii", xml_declaration=False).decode("ascii")
    # Escape CI commands like `text.logged`, but with a reference that XML parsers decode.
    body = re.sub(r"##(?=\w*\[)", "#&#35;", body)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{body}\n'


def _add_unreadable(root: ET.Element, report: Report) -> None:
    """Add a suite for the files that could not be read."""
    if not report.unreadable:
        return
    suite = _add_suite(root, "unreadable files")
    for file in report.unreadable:
        case = _add_case(suite, file.path, items.READABLE)
        _add_result(case, "error", "unreadable", f"could not tell: {file.path}: {file.reason}")


def _add_uncompared(root: ET.Element, report: Report) -> None:
    """Add a suite for the links and other files that were not compared."""
    if not report.aliases and not report.skipped_paths:
        return

    suite = _add_suite(root, "files that were not compared")
    for alias in report.aliases:
        case = _add_case(suite, alias.path, "alias")
        _add_result(case, "skipped", "alias", f"a link to {alias.of}, which was compared instead")

    if report.skipped_paths:
        case = _add_case(suite, "syncheck", "skipped")
        _add_result(case, "skipped", "skipped", "; ".join(words.skipped_lines(report)))


def _add_suite(root: ET.Element, name: str) -> ET.Element:
    return ET.SubElement(root, "testsuite", name=shorten(name, _MOST))


def _add_case(suite: ET.Element, subject: str, name: str) -> ET.Element:
    """Add a case without a result. subject: the file or group that it tests."""
    attributes = {"classname": shorten(subject, _MOST), "name": shorten(name, _MOST)}
    return ET.SubElement(suite, "testcase", attributes)


def _set_counts(element: ET.Element) -> None:
    element.set("tests", _count_elements(element, "testcase"))
    element.set("failures", _count_elements(element, "failure"))
    element.set("errors", _count_elements(element, "error"))


def _count_elements(element: ET.Element, tag: str) -> str:
    return str(len(element.findall(f".//{tag}")))


def _add_group(suite: ET.Element, group: Group, report: Report) -> None:
    _add_properties(suite, group)
    if group.verdict == "alone":
        case = _add_case(suite, group.name, items.ALONE)
        reason = f"no replica to compare with: {group.replicas[0].path}"
        # For exit code 2 the case must be an error, because CI systems show skipped cases as success.
        tag = "error" if report.verdict == "undecided" else "skipped"
        _add_result(case, tag, "alone", reason, "\n".join(words.note_lines(group)))
        return

    # The order of the kinds is the order of the model.
    siblings = list(dict.fromkeys(items.item_of(kind) for kind in group.kinds))
    if any(value.counts for value in group.values):
        siblings.append(items.VALUES)

    is_decisive = report.verdict == group.verdict == "undecided"
    siblings = siblings or [items.NOTHING]
    for item in siblings:
        part, reason = items.judge_item(group, item, siblings)
        case = _add_case(suite, group.name, item)
        _add_judgement(case, part, reason, is_decisive=is_decisive)


def _add_properties(suite: ET.Element, group: Group) -> None:
    values = {"verdict": group.verdict, "run": group.run}
    if not group.is_pair:
        values["replicas"] = str(len(group.replicas))
    if group.step is not None:
        values["step"] = str(group.step)

    # The counts that decide the verdict.
    values["tensors"] = str(group.counts.tensors)
    values["different"] = str(group.counts.different)
    values["not_compared"] = str(group.counts.not_compared)
    if group.left_out:
        values["left_out"] = str(group.left_out)
    if group.fixed:
        values["fixed"] = "; ".join(words.fixed_lines([group]))

    properties = ET.SubElement(suite, "properties")
    for name, value in values.items():
        attributes = {"name": f"syncheck_{name}", "value": shorten(value, _MOST)}
        ET.SubElement(properties, "property", attributes)


def _add_judgement(case: ET.Element, part: Group, reason: str, *, is_decisive: bool) -> None:
    """Add the result of a case. is_decisive: whether the report is undecided because of this group."""
    text = failure.group_text(part)
    if part.verdict == "out_of_sync":
        failing = find_failing(part.findings)
        _add_result(case, "failure", failing[0].code, items.headline(failing), text)
    elif reason:
        # See `_add_group`.
        tag = "error" if is_decisive else "skipped"
        _add_result(case, tag, "undecided", f"could not tell: {reason}", text)
    else:
        ET.SubElement(case, "system-out").text = _clean(text)


def _add_result(case: ET.Element, tag: str, kind: str, message: str, body: str = "") -> None:
    result = ET.SubElement(case, tag, type=kind, message=shorten(message, _MOST))
    result.text = _clean(body or message)


def _clean(text: str) -> str:
    """Escape control characters, most of which XML does not allow even as references."""
    lines = [one_line(line) for line in text.split("\n")]
    return logged("\n".join(lines))
