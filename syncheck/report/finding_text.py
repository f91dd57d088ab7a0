"""The text of a finding, in all formats: title, evidence, history, cause and fix.

Functions with a parameter `write` render messages: it writes the names and code in them for a format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.report.deciding import Decision, list_decisions
from syncheck.report.tables import difference_text
from syncheck.report.words import SITE
from syncheck.sentences import Sentence, write_plain
from syncheck.text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Finding, Group, History
    from syncheck.sentences import Message, Writer

# The findings that name no cause.
UNEXPLAINED = ("SYN299", "SYN399", "SYN449")
_UNKNOWN = "unknown"


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
        ignored=why_ignored(finding),
    )
    if finding.ranks:
        title = Title.ON_RANKS(title=title, ranks=finding.ranks)

    return title.render(write)


def why_ignored(finding: Finding) -> str:
    """Return why a finding does not fail, after a comma; empty if it fails, or is only information."""
    if not finding.counts:
        return ", does not fail"
    if finding.allowed:
        return ", allowed"
    return ", accepted by the baseline" if finding.accepted else ""


def more_text(finding: Finding) -> str:
    """Return the command that explains a finding, and its page if the project has a site."""
    command = f"syncheck explain {finding.code}"
    address = find_page(finding)
    if not address:
        return command
    return f"{command}, or {address}"


def find_page(finding: Finding) -> str:
    """Return the address of a finding's page; empty without a site."""
    if not SITE:
        return ""
    return f"{SITE}/reference/findings/{finding.code.lower()}/"


def finding_rows(finding: Finding, group: Group, write: Writer = write_plain) -> list[tuple[str, str]]:
    """Return labels and texts: what happened, when if there is a history, why, the fix, and what would decide."""
    rows = [("what", When.ALL(facts=finding.facts).render(write))]
    if finding.history is not None:
        rows.append(("when", describe_history(finding, write)))
    rows += [("why", cause_text(finding, write)), ("fix", finding.fix.render(write))]
    decisions = decision_text(finding, group, write)
    if decisions:
        rows.append(("next", decisions))
    return rows


def decision_text(finding: Finding, group: Group, write: Writer = write_plain) -> str:
    """Return what would decide between the causes of a finding; empty if nothing is known or due."""
    return Decision.ALL(sentences=list_decisions(finding, group)).render(write)


def cause_text(finding: Finding, write: Writer = write_plain) -> str:
    """Return the cause of a finding, with all causes that fit the evidence as well."""
    return _describe_cause(finding).render(write)


def _describe_cause(finding: Finding) -> Message:
    if finding.certainty != "consistent":
        return finding.cause

    alternatives = _name_findings(finding.alternatives)
    is_explained = finding.code not in UNEXPLAINED
    if is_explained and alternatives:
        return Cause.ALSO_POSSIBLE(cause=finding.cause, others=alternatives)
    if is_explained:
        return Cause.UNNAMED_POSSIBLE(cause=finding.cause)
    if alternatives:
        return Cause.NOT_EXCLUDED(cause=finding.cause, others=alternatives)

    return finding.cause


def _name_findings(codes: Sequence[str]) -> list[str]:
    """Return codes with their names in words, as in 'SYN211 gradients-not-reduced'."""
    if not codes:
        return []

    # A table of all rules, which only a finding with alternatives needs.
    from syncheck.diagnose.rules import name_rules

    titles: dict[str, str] = {}
    for code, slug in name_rules().items():
        titles[code] = f"{code} {slug}"

    # A saved report may have codes of another version.
    return [titles.get(code, code) for code in codes]


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
    # Other tensors may have differed when the first tensors agreed.
    steps_with_others = {point.step for point in history.points if point.others_differ}
    if history.agreed in steps_with_others:
        return When.DIFFERENT_SINCE(agreed=history.agreed, since=history.since)
    return When.OUT_OF_SYNC_SINCE(agreed=history.agreed, since=history.since)


def _first_difference(history: History) -> Message:
    since = _since(history)
    if not history.tensors:
        return since

    # A sentence with all tensors could be megabytes long.
    first = one_line(history.tensors[0])
    count = len(history.tensors)
    if count == 1:
        return When.FIRST_IN(since=since, tensor=first, ranks=history.ranks)

    return When.FIRST_IN_SEVERAL(
        since=since,
        count=count,
        tensor=first,
        ranks=history.ranks,
    )


def _steps_in_sync(history: History) -> list[Message]:
    """Return later steps in sync: an intermittent difference has other causes than a permanent one."""
    steps: dict[When, list[int]] = {}
    for point in history.points:
        if point.step > history.since and not point.differing:
            sentence = When.EQUAL_AGAIN if point.others_differ else When.IN_SYNC_AGAIN
            steps.setdefault(sentence, []).append(point.step)

    facts = []
    for sentence, numbers in steps.items():
        facts.append(sentence(count=len(numbers), steps=numbers))

    return facts


def _differences(history: History) -> list[Message]:
    """Return the largest difference at the first step out of sync and at the last step; empty if both are unknown."""
    # Points before the first difference have no size.
    sizes = [point.max_abs for point in history.points if point.step >= history.since]
    first, last = _known_difference(sizes[0]), _known_difference(sizes[-1])
    if first == last == _UNKNOWN:
        return []

    fact = When.DIFFERENCES(first=first, last=last)
    if len(sizes) == 1:
        fact = When.DIFFERENCE(first=first)

    return [_add_trend(fact, history)]


def _known_difference(difference: float | None) -> str:
    return _UNKNOWN if difference is None else difference_text(difference)
