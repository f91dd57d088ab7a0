"""The first reason why a verdict is undecided, as the last line of a report states it."""

from __future__ import annotations

from collections import defaultdict
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from syncheck.messages import Detail, Undecided
from syncheck.records import Reason
from syncheck.report.long_names import shorten_name, shorten_names
from syncheck.report.selections import count_excluded, find_groups, list_first_paths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from syncheck.records import Group, Report, TensorDiff, ValueDiff
    from syncheck.sentences import Message


def undecided_reason(report: Report) -> Message:
    """Return why a report has no verdict."""
    # The first reason counts.
    for find_reasons in _REASONS:
        for reason in find_reasons(report):
            return reason
    return Undecided.NOTHING()


def get_first_value(report: Report, get_value: Callable[[Group], Any]) -> Any:
    """Return the first value of a group that is not empty; None if all are empty."""
    for group in report.groups:
        value = get_value(group)
        if value:
            return value
    return None


def _find_unreadable(report: Report) -> Iterator[Message]:
    if report.unreadable:
        yield Undecided.UNREADABLE(count=len(report.unreadable))


def _find_alone(report: Report) -> Iterator[Message]:
    alone = find_groups(report.groups, "alone")
    if not alone:
        return
    # Advice for a single file is shorter, and links to it explain a missing replica.
    if len(report.groups) > len(alone):
        yield Undecided.SOME_ALONE(count=len(alone), paths=shorten_names(list_first_paths(alone)))
    elif len(alone) > 1:
        yield Undecided.NO_REPLICAS()
    elif report.aliases:
        yield Undecided.ALL_LINKS()
    else:
        yield Undecided.ONE_FILE()


def _find_claimed_twice(report: Report) -> Iterator[Message]:
    ranks = get_first_value(report, attrgetter("evidence.claimed_twice"))
    if ranks:
        yield Undecided.RANKS_TWICE(ranks=ranks)


def _find_uncompared_of_models(report: Report) -> Iterator[Message]:
    uncompared: list[TensorDiff] = []
    for group in report.groups:
        if group.is_pair:
            uncompared += [diff for diff in group.tensors if diff.uncompared]
    yield from _not_compared(uncompared)


def _not_compared(diffs: Sequence[TensorDiff]) -> Iterator[Message]:
    if diffs:
        # A reason with a next step comes first.
        first = max(diffs, key=_has_next_step)
        sentence = Undecided.UNPAIRED if _has_next_step(first) else Undecided.NOT_COMPARED
        yield sentence(count=len(diffs), name=shorten_name(first.name), detail=first.detail)


def _has_next_step(diff: TensorDiff) -> bool:
    """Whether the reason for which a tensor was not compared has a next step."""
    return diff.detail is not None and diff.detail.code is Detail.UNPAIRED


def _find_doubt_of_models(report: Report) -> Iterator[Message]:
    for group in report.groups:
        if group.is_pair and group.evidence.doubt is not None:
            yield group.evidence.doubt


def _find_guesses(report: Report) -> Iterator[Message]:
    contradicted = get_first_value(report, attrgetter("evidence.contradicted"))
    if contradicted:
        yield Undecided.CONTRADICTED_MAP(count=len(contradicted), names=contradicted)
    if get_first_value(report, attrgetter("evidence.inferred")):
        file = get_first_value(report, attrgetter("evidence.written_map"))
        if file:
            yield Undecided.WRITTEN_MAP(file=file)
        yield Undecided.INFERRED_MAP()
    guessed = get_first_value(report, attrgetter("evidence.guessed"))
    if guessed:
        yield Undecided.GUESSED_HEADS(names=guessed)


def _find_unknown_tensors(report: Report) -> Iterator[Message]:
    unknown = 0
    diffs_of_reason: dict[Reason | None, list[TensorDiff]] = defaultdict(list)
    for diff in report.tensors:
        if diff.unknown:
            unknown += 1
            diffs_of_reason[diff.reason].append(diff)

    ambiguous = diffs_of_reason[Reason.AMBIGUOUS]
    if ambiguous:
        reason = _describe_ambiguous(ambiguous)
        # Two models are compared by `syncheck diff` already, which records no runs.
        if get_first_value(report, attrgetter("evidence.runs")):
            reason = Undecided.OF_OTHER_RUNS(reason=reason)
        yield reason

    yield from _not_compared(diffs_of_reason[Reason.REFUSED])
    if unknown:
        yield Undecided.NO_CHECKSUMS(unknown=unknown, tensors=report.counts.tensors)


def _describe_ambiguous(ambiguous: Sequence[TensorDiff]) -> Message:
    name, detail = shorten_name(ambiguous[0].name), ambiguous[0].detail
    if len(ambiguous) == 1:
        return Undecided.AMBIGUOUS(name=name, detail=detail)
    return Undecided.MORE_AMBIGUOUS(name=name, more=len(ambiguous) - 1, detail=detail)


def _find_unknown_values(report: Report) -> Iterator[Message]:
    values: list[ValueDiff] = []
    for group in report.groups:
        values += [value for value in group.values if value.unknown]
    if values:
        yield Undecided.VALUES(count=len(values), name=shorten_name(values[0].name))


def _find_shards(report: Report) -> Iterator[Message]:
    uncompared = get_first_value(report, attrgetter("uncompared"))
    if uncompared:
        yield Undecided.RANKS_NOT_COMPARED(ranks=uncompared)
    if get_first_value(report, attrgetter("shards")):
        yield Undecided.ONLY_SHARDS()


def _find_doubt(report: Report) -> Iterator[Message]:
    absent_shards = get_first_value(report, attrgetter("evidence.absent_shards"))
    if absent_shards:
        yield absent_shards
    doubt = get_first_value(report, attrgetter("evidence.doubt"))
    if doubt:
        yield doubt


def _find_excluded(report: Report) -> Iterator[Message]:
    excluded = count_excluded(report)
    if excluded:
        yield Undecided.ALL_EXCLUDED(count=excluded)


_REASONS = (
    _find_unreadable,
    _find_alone,
    _find_claimed_twice,
    _find_uncompared_of_models,
    _find_doubt_of_models,
    _find_guesses,
    _find_unknown_tensors,
    _find_unknown_values,
    _find_doubt,
    _find_shards,
    _find_excluded,
)
