"""A report as JUnit XML, which CI systems show as tests: a suite for each group, a case for each kind of tensor.

The cases are those of the pytest plugin (`items.ITEMS`): `parameters` of a run is one test in both. How one ends:

- `failure`: a finding that makes the run out of sync. Its type is the code.
- `error`: could not tell, where that makes the exit code 2: a file that cannot be read, or nothing compared anywhere.
- `skipped`: nothing of it was compared, and other cases decide.

So there are failures if and only if the exit code is 1, and errors and no failures if and only if it is 2. Elements and
attributes are those of https://github.com/jenkinsci/xunit-plugin/blob/031e285ef3b60dee7aaf36e9096d7dcd95ffae83/src/main/resources/org/jenkinsci/plugins/xunit/types/model/xsd/junit-10.xsd
and no times: nothing here was measured.
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
    """Return the document: well-formed, in ASCII whatever the names are, so that no encoding can spoil it."""
    root = ET.Element("testsuites", name="syncheck")
    for group in report.groups:
        _group(ET.SubElement(root, "testsuite", name=_short(group.name)), group, report)
    if report.unreadable:
        suite = ET.SubElement(root, "testsuite", name="files that cannot be read")
        for file in report.unreadable:
            case = ET.SubElement(suite, "testcase", classname=_short(file.path), name=items.READABLE)
            _end(case, "error", "unreadable", f"could not tell: {file.path}: {file.reason}")
    if report.aliases or report.skipped:
        suite = ET.SubElement(root, "testsuite", name="files that were not compared")
        for alias in report.aliases:
            case = ET.SubElement(suite, "testcase", classname=_short(alias.path), name="alias")
            _end(case, "skipped", "alias", f"a link leads to {alias.of}, which was compared in its place")
        if report.skipped:
            case = ET.SubElement(suite, "testcase", classname="syncheck", name="skipped")
            _end(case, "skipped", "skipped", f"{report.skipped} files in the folders are no checkpoints")
    if not report.groups and not report.unreadable:
        suite = ET.SubElement(root, "testsuite", name="syncheck")
        case = ET.SubElement(suite, "testcase", classname="syncheck", name=items.NOTHING)
        _end(case, "error", "undecided", words.verdict_line(report))
    for suite in root:
        _count(suite, suite, ("tests", "failures", "errors", "skipped"))
    _count(root, root, ("tests", "failures", "errors"))
    ET.indent(root)
    # Characters beyond ASCII become references.
    body = ET.tostring(root, encoding="us-ascii", xml_declaration=False).decode("ascii")
    # As `errors.logged` does, but in an attribute the name stays what it is.
    body = re.sub(r"##(?=\w*\[)", "#&#35;", body)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{body}\n'


def _count(element: ET.Element, of: ET.Element, names: Sequence[str]) -> None:
    tags = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for name in names:
        element.set(name, str(sum(1 for _ in of.iter(tags[name]))))


def _group(suite: ET.Element, group: Group, report: Report) -> None:
    _properties(suite, group)
    if group.verdict == "alone":
        case = ET.SubElement(suite, "testcase", classname=_short(group.name), name=items.ALONE)
        reason = f"one file only, nothing to compare it with: {group.replicas[0].path}"
        _end(
            case,
            "error" if report.verdict == "undecided" else "skipped",
            "alone",
            reason,
            "\n".join(words.notes_of(group)),
        )
        return
    siblings = list(dict.fromkeys(map(items.item_of, group.kinds)))
    if any(value.counts for value in group.values):
        siblings.append(items.VALUES)
    for item in siblings or [items.NOTHING]:
        case = ET.SubElement(suite, "testcase", classname=_short(group.name), name=_short(item))
        _judged(case, group, items.concerning(group, item, siblings or [items.NOTHING]), report)


def _properties(suite: ET.Element, group: Group) -> None:
    told = {"verdict": group.verdict, "run": group.run, "replicas": str(len(group.replicas))}
    if group.step is not None:
        told["step"] = str(group.step)
    told |= {name: str(getattr(group.counts, name)) for name in ("tensors", "different", "not_compared")}
    if group.left_out:
        told["left_out"] = str(group.left_out)
    if group.fixed:
        told["fixed"] = "; ".join(words.fixed_lines([group]))
    properties = ET.SubElement(suite, "properties")
    for name, value in told.items():
        ET.SubElement(properties, "property", name=f"syncheck_{name}", value=_short(value))


def _judged(case: ET.Element, group: Group, findings: Sequence[Finding], report: Report) -> None:
    """Give a case its end. findings: those that it has to tell."""
    item = case.get("name")
    kinds = {kind: of for kind, of in group.kinds.items() if items.item_of(kind) == item}
    mine = tuple(diff for diff in group.tensors if diff.kind in kinds or item == items.NOTHING)
    counts = sum(kinds.values(), Counts())
    failing = [finding for finding in findings if finding.fails]
    reason = _nothing(group, counts, mine, is_values=item == items.VALUES)
    verdict: Verdict = "out_of_sync" if failing else "undecided" if reason else "in_sync"
    told = failure.of_group(
        replace(
            group,
            verdict=verdict,
            kinds=kinds,
            tensors=mine,
            findings=tuple(findings),
            counts=counts,
            values=group.values if item == items.VALUES else (),
        )
    )
    if failing:
        first = failing[0]
        more = f" (and {', '.join(f.code for f in failing[1:4])})" if failing[1:] else ""
        _end(case, "failure", first.code, f"{words.headline(first)}{more}: {first.evidence}", told)
    elif reason:
        # What makes the whole answer "could not tell" is an error, or a run of exit code 2 would look green.
        untold = report.verdict == group.verdict == "undecided"
        _end(case, "error" if untold else "skipped", "undecided", f"could not tell: {reason}", told)
    else:
        ET.SubElement(case, "system-out").text = _clean(told)


def _nothing(group: Group, counts: Counts, mine: Sequence[TensorDiff], *, is_values: bool) -> str:
    """Say why a case can tell nothing; empty where it can."""
    untold = sum(diff.unknown and diff.reason == "checksum" for diff in mine)
    if untold:
        return f"the stored checksums do not tell of {untold} of {counts.tensors} tensors"
    if not is_values and not counts.compared:
        reasons = Counter(f"{diff.reason}: {diff.detail}" if diff.detail else f"{diff.reason}" for diff in mine)
        why = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))
        return f"no tensor was compared ({why})" if why else "no tensor was compared; the options may leave all out"
    if group.verdict == "undecided":
        return "too little was compared in this group to tell of the model"
    return ""


def _end(case: ET.Element, how: str, kind: str, message: str, body: str = "") -> None:
    ended = ET.SubElement(case, how, type=kind, message=_short(message))
    ended.text = _clean(body or message)


def _short(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def _clean(text: str) -> str:
    """Escape all that is not printable: most of it has no place in XML, not even as a reference."""
    return logged("\n".join(map(one_line, text.split("\n"))))
