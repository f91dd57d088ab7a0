"""Outcome of a test of checkpoints, as a function of the compared group. A test without a comparison never passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from syncheck.errors import PYTEST, CheckpointError, one_line, spelling
from syncheck.messages import Hint, names_text
from syncheck.pytest_plugin.checkpoints import text
from syncheck.records import Counts
from syncheck.report import words
from syncheck.report.items import ALONE, NOTHING, VALUES, findings_of_item, item_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.pytest_plugin.checkpoints.judge import Judge
    from syncheck.pytest_plugin.checkpoints.plan import Planned
    from syncheck.records import Finding, Group, TensorDiff


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of an item. headline: its line in pytest's short summary. body: the text of a failure or skip.

    properties: for JUnit and for the summary; strings only, because workers send them to another process.
    """

    status: Literal["passed", "failed", "skipped"]
    headline: str = ""
    body: str = ""
    properties: tuple[tuple[str, str], ...] = ()


@spelling(PYTEST)
def judge_item(planned: Planned, judge: Judge) -> Outcome:
    """Judge one item, and compare its run if necessary."""
    if planned.unreadable is not None:
        reason = f"could not tell: {planned.unreadable.path}: {planned.unreadable.reason}"
        return _failed(reason, _properties("undecided"))
    assert planned.group is not None
    if planned.item == ALONE:
        return _judge_alone(planned, judge)
    try:
        group, lost = judge.group(planned.group)
    except CheckpointError as error:
        return _failed(f"could not tell: {error}", _properties("undecided"))
    if lost:
        files = "; ".join(f"{file.path}: {file.reason}" for file in lost)
        reason = f"could not tell: unreadable since the run began: {files}"
        return _failed(reason, _properties("undecided", group, planned))
    return _judge_group(planned, group, judge)


def _judge_alone(planned: Planned, judge: Judge) -> Outcome:
    assert planned.group is not None
    replicas = judge.found.groups[planned.group]
    path = replicas.ranks[0][1].path
    headline = f"could not tell: no replica to compare with: {path}"
    links = [alias.path for alias in judge.found.aliases if alias.of == path]
    grouping = "; ".join(map(str, replicas.grouping))
    grouping += f"; links to this file: {names_text(links)}" if links else ""
    advice = str(Hint.GROUP_FILES())
    return _failed(headline, _properties("undecided"), f"{headline}\n{text.limit(grouping)}\n{advice}")


def _judge_group(planned: Planned, group: Group, judge: Judge) -> Outcome:
    counts = sum((counts for kind, counts in group.kinds.items() if item_of(kind) == planned.item), Counts())
    diffs = [diff for diff in group.tensors if item_of(diff.kind) == planned.item]
    findings = findings_of_item(group, planned.item, planned.siblings)
    failing = [finding for finding in findings if finding.fails]
    reason = "" if failing else _undecided_reason(planned, group, counts)
    verdict = "out_of_sync" if failing else "undecided" if reason else "in_sync"
    properties = _properties(verdict, group, planned, findings, counts, diffs)
    if failing:
        shown = [finding for finding in findings if finding.severity != "info"]
        body = text.failure_text(group, shown, counts, diffs, values=planned.item == VALUES, width=judge.width)
        return _failed(text.headline(failing), properties, body)
    if reason:
        if group.verdict == "undecided":
            return _failed(f"could not tell: {reason}", properties)
        return Outcome("skipped", text.limit(reason), text.limit(reason), properties)
    return Outcome("passed", properties=properties)


def _undecided_reason(planned: Planned, group: Group, counts: Counts) -> str:
    """Return why an item has no verdict; empty if it has one."""
    if planned.item == NOTHING:
        return "no tensor was compared: the options exclude all tensors, or the files contain none"
    if planned.item != VALUES and not counts.compared:
        reasons = Counter(
            f"{diff.reason}: {diff.detail}" if diff.detail else f"{diff.reason}"
            for diff in group.tensors
            if item_of(diff.kind) == planned.item
        )
        details = "; ".join(f"{count} {one_line(reason)}" for reason, count in reasons.most_common(3))
        return f"no tensor was compared ({details})" if details else "no tensor was compared"
    if group.verdict == "undecided":
        return "too few tensors of this group were compared for a verdict"
    return ""


def _failed(headline: str, properties: tuple[tuple[str, str], ...], body: str = "") -> Outcome:
    headline = text.limit(headline)
    return Outcome("failed", headline, body or headline, properties)


def _properties(
    verdict: str,
    group: Group | None = None,
    planned: Planned | None = None,
    findings: Sequence[Finding] = (),
    counts: Counts | None = None,
    diffs: Sequence[TensorDiff] = (),
) -> tuple[tuple[str, str], ...]:
    """Return the properties of an item. group, planned: both or none."""
    properties = {"verdict": verdict}
    if group is not None and planned is not None:
        properties["replicas"] = str(len(group.replicas))
        if group.fixed:
            properties["fixed"] = text.limit("; ".join(words.fixed_lines([group])), 1000)
        if group.notes:
            properties["notes"] = text.limit("; ".join(map(str, group.notes)), 500)
        properties |= _unjudged(group, planned)
    for name, some in (
        ("findings", findings),
        ("allowed", [finding for finding in findings if finding.allowed]),
        ("accepted", [finding for finding in findings if finding.accepted]),
    ):
        if some:
            properties[name] = ",".join(dict.fromkeys(finding.code for finding in some))
    if counts is not None:
        for name in ("tensors", "identical", "equal", "close", "different", "not_compared"):
            properties[name] = str(getattr(counts, name))
    measured = [diff for diff in words.sort_worst_first(diffs) if diff.max_abs is not None]
    if measured:
        properties["max_abs"] = f"{measured[0].max_abs:.6g}"
        properties["worst"] = text.limit(measured[0].name)
    return tuple((f"syncheck_{name}", value) for name, value in properties.items())


def _unjudged(group: Group, planned: Planned) -> dict[str, str]:
    """Return the properties about tensors and values that belong to no item."""
    kinds = {kind: counts for kind, counts in group.kinds.items() if item_of(kind) not in planned.siblings}
    parts = [f"{kind} {c.not_compared}/{c.tensors} not compared" for kind, c in kinds.items() if c.not_compared]
    if group.left_out:
        parts.append(f"{group.left_out} tensors excluded by options")
    values = words.values_text([value for value in group.values if not value.counts])
    properties = {"not_judged": "; ".join(parts), "values_that_differ": text.limit(values, 500)}
    return {name: value for name, value in properties.items() if value}
