"""The text of a finding, in all formats: title, evidence, history, cause and fix.

Functions with a parameter `write` render messages: it writes the names and code in them for a format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.report.tables import difference_text
from syncheck.report.words import SITE
from syncheck.sentences import Sentence, write_plain
from syncheck.text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Finding, History
    from syncheck.sentences import Message, Writer

# The findings that name no cause.
UNEXPLAINED = ("SYN299", "SYN399")


class Title(Sentence):
    """The title of a finding."""

    TITLE = "{code} {slug} ({severity:words}, {certainty:words}{ignored:words})"
    ON_RANKS = "{title} on {ranks:ranges}"


class Cause(Sentence):
    """A cause, with other causes that fit the evidence as well."""

    NOT_EXCLUDED = "{cause} Not excluded: {others:list}."
    ALSO_POSSIBLE = "Possible cause: {cause} Also possible: {others:list}."
    UNNAMED_POSSIBLE = "Possible cause: {cause} A cause that no finding names is possible too."


class When(Sentence):
    """Since when tensors differ, and how their difference developed."""

    SINCE_FIRST_STEP = "out of sync since the first step compared ({since})"
    # Other tensors differed before, so the run was not in sync.
    DIFFERENT_SINCE = "equal until step {agreed}, different from step {since}"
    OUT_OF_SYNC_SINCE = "in sync until step {agreed}, out of sync from step {since}"
    FIRST_IN = "{since}, first in {tensor:name} on {ranks:ranges}"
    FIRST_IN_SEVERAL = "{since}, first in {count} tensors including {tensor:name} on {ranks:ranges}"
    IN_SYNC_AGAIN = "in sync again at {count:verb step|steps} {steps:names}"
    EQUAL_AGAIN = "equal again, while other tensors differ, at {count:verb step|steps} {steps:names}"
    DIFFERENCE = "max abs difference {first:words}"
    DIFFERENCES = "max abs difference {first:words} -> {last:words}"
    WITH_TREND = "{fact}, {trend:words}"
    ALL = "{facts:statements}"


def finding_title(finding: Finding, write: Writer = write_plain) -> str:
    """Return the title of a finding: 'SYN201 bn-local-stats (warning, likely) on ranks 0-1'."""
    title = Title.TITLE(
        code=finding.code,
        slug=finding.slug,
        severity=finding.severity,
        certainty=finding.certainty,
        ignored=_why_ignored(finding),
    )
    if finding.ranks:
        title = Title.ON_RANKS(title=title, ranks=finding.ranks)
    return title.render(write)


def _why_ignored(finding: Finding) -> str:
    if not finding.counts:
        return ", does not fail"
    if finding.allowed:
        return ", allowed"
    return ", accepted by the baseline" if finding.accepted else ""


def more_text(finding: Finding) -> str:
    """Return the page of a finding on the documentation site."""
    return f"{SITE}/reference/findings/{finding.code.lower()}/"


def finding_rows(finding: Finding, write: Writer = write_plain) -> list[tuple[str, str]]:
    """Return labels and texts: what happened, when if there is a history, why, and the fix."""
    rows = [("what", When.ALL(facts=finding.facts).render(write))]
    if finding.history is not None:
        rows.append(("when", describe_history(finding, write)))
    return [*rows, ("why", cause_text(finding, write)), ("fix", finding.fix.render(write))]


def cause_text(finding: Finding, write: Writer = write_plain) -> str:
    """Return the cause of a finding, with all causes that fit the evidence as well."""
    return _describe_cause(finding).render(write)


def _describe_cause(finding: Finding) -> Message:
    if finding.certainty != "consistent":
        return finding.cause
    others = _name_findings(finding.alternatives)
    if finding.code in UNEXPLAINED:
        return Cause.NOT_EXCLUDED(cause=finding.cause, others=others) if others else finding.cause
    if others:
        return Cause.ALSO_POSSIBLE(cause=finding.cause, others=others)
    return Cause.UNNAMED_POSSIBLE(cause=finding.cause)


def _name_findings(codes: Sequence[str]) -> list[str]:
    """Return codes with their names in words, as in 'SYN211 gradients-not-reduced'."""
    if not codes:
        return []
    # All rules are loaded only for a finding with alternatives.
    from syncheck.diagnose.rules import RULES

    names = {rule.code: rule.slug for rule in RULES}
    # A saved report may have codes of another version.
    return [f"{code} {names[code]}" if code in names else code for code in codes]


def describe_history(finding: Finding, write: Writer = write_plain) -> str:
    """Return first step, first tensors, steps in sync again and differences; empty without a history."""
    history = finding.history
    if history is None:
        return ""
    facts = [_first_difference(history), *_steps_in_sync(history), *_differences(history)]
    return When.ALL(facts=facts).render(write)


def summarize_history(finding: Finding, write: Writer = write_plain) -> str:
    """Return the first step and the trend; empty without a history."""
    history = finding.history
    if history is None:
        return ""
    return _add_trend(_since(history), history).render(write)


def _add_trend(fact: Message, history: History) -> Message:
    return When.WITH_TREND(fact=fact, trend=history.trend) if history.trend else fact


def _since(history: History) -> Message:
    if history.agreed is None:
        return When.SINCE_FIRST_STEP(since=history.since)
    others_differed = any(point.step == history.agreed and point.others_differ for point in history.points)
    sentence = When.DIFFERENT_SINCE if others_differed else When.OUT_OF_SYNC_SINCE
    return sentence(agreed=history.agreed, since=history.since)


def _first_difference(history: History) -> Message:
    since = _since(history)
    if not history.tensors:
        return since
    first = one_line(history.tensors[0])
    count = len(history.tensors)
    if count == 1:
        return When.FIRST_IN(since=since, tensor=first, ranks=history.ranks)
    return When.FIRST_IN_SEVERAL(since=since, count=count, tensor=first, ranks=history.ranks)


def _steps_in_sync(history: History) -> list[Message]:
    """Return later steps in sync: an intermittent difference has other causes than a permanent one."""
    later = [point for point in history.points if point.step > history.since and not point.differing]
    in_sync = [point.step for point in later if not point.others_differ]
    equal = [point.step for point in later if point.others_differ]
    facts = []
    if in_sync:
        facts.append(When.IN_SYNC_AGAIN(count=len(in_sync), steps=in_sync))
    if equal:
        facts.append(When.EQUAL_AGAIN(count=len(equal), steps=equal))
    return facts


def _differences(history: History) -> list[Message]:
    """Return the largest difference at the first step out of sync and at the last step; empty if both are unknown."""
    points = [point for point in history.points if point.step >= history.since]
    # Points before the first difference have no size.
    first, last = points[0].max_abs, points[-1].max_abs
    if first is None and last is None:
        return []
    if len(points) == 1:
        fact = When.DIFFERENCE(first=_known_difference(first))
    else:
        fact = When.DIFFERENCES(first=_known_difference(first), last=_known_difference(last))
    return [_add_trend(fact, history)]


def _known_difference(difference: float | None) -> str:
    return "unknown" if difference is None else difference_text(difference)
