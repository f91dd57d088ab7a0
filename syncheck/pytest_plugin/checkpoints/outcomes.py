"""How a test item on checkpoints ends: a pure function of the compared group, so that no pass can be vacuous."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from syncheck.errors import PYTEST, CheckpointError, one_line, spelling
from syncheck.messages import Hint, names_text
from syncheck.pytest_plugin.checkpoints import text
from syncheck.records import Counts
from syncheck.report import words
from syncheck.report.items import ALONE, NOTHING, VALUES, concerning, item_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.pytest_plugin.checkpoints.judge import Judge
    from syncheck.pytest_plugin.checkpoints.plan import Planned
    from syncheck.records import Finding, Group, TensorDiff


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an item ended. headline: the one line of pytest's short summary. body: what a failure or skip prints.

    properties: for junit and for the summary, strings only, so that they reach both from another process.
    """

    status: Literal["passed", "failed", "skipped"]
    headline: str = ""
    body: str = ""
    properties: tuple[tuple[str, str], ...] = ()


@spelling(PYTEST)
def outcome(planned: Planned, judge: Judge) -> Outcome:
    """Judge one item. Only what the item needs is compared."""
    if planned.unreadable is not None:
        return _failed(f"could not tell: {planned.unreadable.path}: {planned.unreadable.reason}", _told("undecided"))
    assert planned.group is not None
    if planned.item == ALONE:
        return _alone(planned, judge)
    try:
        group, lost = judge.group(planned.group)
    except CheckpointError as error:
        return _failed(f"could not tell: {error}", _told("undecided"))
    if lost:
        broken = "; ".join(f"{file.path}: {file.reason}" for file in lost)
        return _failed(f"could not tell: broken since the run began: {broken}", _told("undecided", group, planned))
    return _judged(planned, group, judge)


def _alone(planned: Planned, judge: Judge) -> Outcome:
    assert planned.group is not None
    replicas = judge.found.groups[planned.group]
    path = replicas.ranks[0][1].path
    headline = f"could not tell: one file only, nothing to compare it with: {path}"
    links = [alias.path for alias in judge.found.aliases if alias.of == path]
    found = "; ".join(map(str, replicas.grouping))
    found += f"; the same file by a link: {names_text(links)}" if links else ""
    advice = str(Hint.GROUP_FILES())
    return _failed(headline, _told("undecided"), f"{headline}\n{text.bounded(found)}\n{advice}")


def _judged(planned: Planned, group: Group, judge: Judge) -> Outcome:
    counts = sum((of for kind, of in group.kinds.items() if item_of(kind) == planned.item), Counts())
    mine = [diff for diff in group.tensors if item_of(diff.kind) == planned.item]
    findings = concerning(group, planned.item, planned.siblings)
    failing = [finding for finding in findings if finding.fails]
    reason = "" if failing else _nothing(planned, group, counts)
    verdict = "out_of_sync" if failing else "undecided" if reason else "in_sync"
    measured = _told(verdict, group, planned, findings, counts, mine)
    if failing:
        shown = [finding for finding in findings if finding.severity != "info"]
        body = text.failure(group, shown, counts, mine, values=planned.item == VALUES, width=judge.width)
        return _failed(text.headline(failing), measured, body)
    if reason:
        decided = group.verdict != "undecided"
        return _skipped(reason, measured) if decided else _failed(f"could not tell: {reason}", measured)
    return Outcome("passed", properties=measured)


def _nothing(planned: Planned, group: Group, counts: Counts) -> str:
    """Say why an item can tell nothing; empty where it can."""
    if planned.item == NOTHING:
        return "no tensor was compared: the options leave all of them out, or the files hold none"
    if planned.item != VALUES and not counts.compared:
        reasons = Counter(
            f"{diff.reason}: {diff.detail}" if diff.detail else f"{diff.reason}"
            for diff in group.tensors
            if item_of(diff.kind) == planned.item
        )
        why = "; ".join(f"{count} {one_line(reason)}" for reason, count in reasons.most_common(3))
        return f"no tensor was compared ({why})" if why else "no tensor was compared"
    if group.verdict == "undecided":
        return "no tensor of a model was compared, and what else agrees says nothing of one"
    return ""


def _failed(headline: str, properties: tuple[tuple[str, str], ...], body: str = "") -> Outcome:
    headline = text.bounded(headline)
    return Outcome("failed", headline, body or headline, properties)


def _skipped(reason: str, properties: tuple[tuple[str, str], ...]) -> Outcome:
    return Outcome("skipped", text.bounded(reason), text.bounded(reason), properties)


def _told(
    verdict: str,
    group: Group | None = None,
    planned: Planned | None = None,
    findings: Sequence[Finding] = (),
    counts: Counts | None = None,
    mine: Sequence[TensorDiff] = (),
) -> tuple[tuple[str, str], ...]:
    """Return the properties of an item. group, planned: both or none."""
    told = {"verdict": verdict}
    if group is not None and planned is not None:
        told["replicas"] = str(len(group.replicas))
        if group.fixed:
            told["fixed"] = text.bounded("; ".join(words.fixed_lines([group])), 1000)
        if group.notes:
            told["notes"] = text.bounded("; ".join(map(str, group.notes)), 500)
        told |= _beside(group, planned)
    for name, told_of in (
        ("findings", findings),
        ("allowed", [finding for finding in findings if finding.allowed]),
        ("accepted", [finding for finding in findings if finding.accepted]),
    ):
        if told_of:
            told[name] = ",".join(dict.fromkeys(finding.code for finding in told_of))
    if counts is not None:
        for name in ("tensors", "identical", "equal", "close", "different", "not_compared"):
            told[name] = str(getattr(counts, name))
    gaps = [diff for diff in words.worst_first(mine) if diff.max_abs is not None]
    if gaps:
        told["max_abs"] = f"{gaps[0].max_abs:.6g}"
        told["worst"] = text.bounded(gaps[0].name)
    return tuple((f"syncheck_{name}", value) for name, value in told.items())


def _beside(group: Group, planned: Planned) -> dict[str, str]:
    """Say what of a group no item judges: what was not compared is always counted, and what differs is always said."""
    counts = {kind: of for kind, of in group.kinds.items() if item_of(kind) not in planned.siblings}
    parts = [f"{kind} {of.not_compared}/{of.tensors} not compared" for kind, of in counts.items() if of.not_compared]
    if group.left_out:
        parts.append(f"{group.left_out} tensors left out by the options")
    values = words.values_text([value for value in group.values if not value.counts])
    told = {"not_judged": "; ".join(parts), "values_that_differ": text.bounded(values, 500)}
    return {name: value for name, value in told.items() if value}
