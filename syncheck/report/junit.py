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
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.errors import logged, one_line
from syncheck.records import Counts
from syncheck.report import failure, items, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Finding, Group, Report, TensorDiff, Verdict

_MOST = 500  # characters of an attribute


def render(report: Report) -> str:
    """Return the document in ASCII, which is valid in every encoding."""
    root = ET.Element("testsuites", name="syncheck")
    for group in report.groups:
        _group(ET.SubElement(root, "testsuite", name=_short(group.name)), group, report)
    if report.unreadable:
        suite = ET.SubElement(root, "testsuite", name="unreadable files")
        for file in report.unreadable:
            case = ET.SubElement(suite, "testcase", classname=_short(file.path), name=items.READABLE)
            _add_result(case, "error", "unreadable", f"could not tell: {file.path}: {file.reason}")
    if report.aliases or report.skipped:
        suite = ET.SubElement(root, "testsuite", name="files that were not compared")
        for alias in report.aliases:
            case = ET.SubElement(suite, "testcase", classname=_short(alias.path), name="alias")
            _add_result(case, "skipped", "alias", f"a link to {alias.of}, which was compared instead")
        if report.skipped:
            case = ET.SubElement(suite, "testcase", classname="syncheck", name="skipped")
            _add_result(case, "skipped", "skipped", f"{report.skipped} files are not checkpoints")
    if not report.groups and not report.unreadable:
        suite = ET.SubElement(root, "testsuite", name="syncheck")
        case = ET.SubElement(suite, "testcase", classname="syncheck", name=items.NOTHING)
        _add_result(case, "error", "undecided", words.verdict_line(report))
    for suite in root:
        _set_counts(suite, ("tests", "failures", "errors", "skipped"))
    _set_counts(root, ("tests", "failures", "errors"))
    ET.indent(root)
    # Characters beyond ASCII become character references.
    body = ET.tostring(root, encoding="us-ascii", xml_declaration=False).decode("ascii")
    # Escape CI commands like `errors.logged`, but with a reference that XML parsers decode.
    body = re.sub(r"##(?=\w*\[)", "#&#35;", body)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{body}\n'


def _set_counts(element: ET.Element, names: Sequence[str]) -> None:
    tags = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for name in names:
        element.set(name, str(sum(1 for _ in element.iter(tags[name]))))


def _group(suite: ET.Element, group: Group, report: Report) -> None:
    _add_properties(suite, group)
    if group.verdict == "alone":
        case = ET.SubElement(suite, "testcase", classname=_short(group.name), name=items.ALONE)
        result = "error" if report.verdict == "undecided" else "skipped"
        reason = f"no replica to compare with: {group.replicas[0].path}"
        _add_result(case, result, "alone", reason, "\n".join(words.note_lines(group)))
        return
    siblings = list(dict.fromkeys(map(items.item_of, group.kinds)))
    if any(value.counts for value in group.values):
        siblings.append(items.VALUES)
    for item in siblings or [items.NOTHING]:
        case = ET.SubElement(suite, "testcase", classname=_short(group.name), name=_short(item))
        _judge(case, group, items.findings_of_item(group, item, siblings or [items.NOTHING]), report)


def _add_properties(suite: ET.Element, group: Group) -> None:
    values = {"verdict": group.verdict, "run": group.run, "replicas": str(len(group.replicas))}
    if group.step is not None:
        values["step"] = str(group.step)
    values |= {name: str(getattr(group.counts, name)) for name in ("tensors", "different", "not_compared")}
    if group.left_out:
        values["left_out"] = str(group.left_out)
    if group.fixed:
        values["fixed"] = "; ".join(words.fixed_lines([group]))
    properties = ET.SubElement(suite, "properties")
    for name, value in values.items():
        ET.SubElement(properties, "property", name=f"syncheck_{name}", value=_short(value))


def _judge(case: ET.Element, group: Group, findings: Sequence[Finding], report: Report) -> None:
    """Add the result of a case. findings: the findings of this case."""
    item = case.get("name")
    kinds = {kind: counts for kind, counts in group.kinds.items() if items.item_of(kind) == item}
    diffs = tuple(diff for diff in group.tensors if diff.kind in kinds or item == items.NOTHING)
    counts = sum(kinds.values(), Counts())
    failing = [finding for finding in findings if finding.fails]
    reason = _undecided_reason(group, counts, diffs, is_values=item == items.VALUES)
    verdict: Verdict = "out_of_sync" if failing else "undecided" if reason else "in_sync"
    text = failure.group_text(
        replace(
            group,
            verdict=verdict,
            kinds=kinds,
            tensors=diffs,
            findings=tuple(findings),
            counts=counts,
            values=group.values if item == items.VALUES else (),
        )
    )
    if failing:
        first = failing[0]
        more = f" (and {', '.join(f.code for f in failing[1:4])})" if failing[1:] else ""
        _add_result(case, "failure", first.code, f"{words.finding_title(first)}{more}: {first.evidence}", text)
    elif reason:
        # For exit code 2 the case must be an error, because CI systems show skipped cases as success.
        is_decisive = report.verdict == group.verdict == "undecided"
        _add_result(case, "error" if is_decisive else "skipped", "undecided", f"could not tell: {reason}", text)
    else:
        ET.SubElement(case, "system-out").text = _clean(text)


def _undecided_reason(group: Group, counts: Counts, diffs: Sequence[TensorDiff], *, is_values: bool) -> str:
    """Return why a case has no verdict; empty if it has one."""
    unknown = sum(diff.unknown and diff.reason == "checksum" for diff in diffs)
    if unknown:
        return f"{unknown} of {counts.tensors} tensors have no usable stored checksum"
    if not is_values and not counts.compared:
        reasons = Counter(f"{diff.reason}: {diff.detail}" if diff.detail else f"{diff.reason}" for diff in diffs)
        details = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))
        return f"no tensor was compared ({details})" if details else "no tensor was compared; options may exclude all"
    if group.verdict == "undecided":
        return "too few tensors of this group were compared for a verdict"
    return ""


def _add_result(case: ET.Element, tag: str, kind: str, message: str, body: str = "") -> None:
    result = ET.SubElement(case, tag, type=kind, message=_short(message))
    result.text = _clean(body or message)


def _short(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def _clean(text: str) -> str:
    """Escape control characters, most of which XML does not allow even as references."""
    return logged("\n".join(map(one_line, text.split("\n"))))
