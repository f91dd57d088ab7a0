"""Text of a failed assertion: findings, worst tensors and counts, of bounded size."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from syncheck.messages import Hint, Note, Undecided
from syncheck.records import Reason, Report
from syncheck.report import plain, tables, words
from syncheck.report import text as text_of
from syncheck.report.selections import find_failing, list_codes
from syncheck.text import logged, names_text, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from syncheck.records import Finding, Group, TensorDiff, ValueDiff
    from syncheck.sentences import Message

    Named = TypeVar("Named", TensorDiff, ValueDiff)

# Bounds of the text, because names in a checkpoint may be arbitrarily long.
MOST_COLUMNS = 1000
MOST_ROWS = 10
MOST_GROUPS = 3
MOST_FINDINGS = 8
MOST_UNREADABLE = 5
_NAME, _SENTENCE = 120, 600  # characters
_REFUSALS = (Reason.REFUSED, Reason.DIGEST, Reason.CHECKSUM)


def message(report: Report, limit: int = MOST_ROWS) -> str:
    """Return the worst groups with their findings and tensors, then the verdict and the counts.

    limit: tensors listed per group, 0 for all.
    """
    worst_groups, other_groups = [], []
    codes: dict[str, None] = {}
    for group in report.groups:
        codes.update(dict.fromkeys(list_codes(find_failing(group.findings))))
        if group.verdict == "out_of_sync":
            worst_groups.append(group)
        # A report accepts refused tensors beside others that agree; an assertion does not.
        elif group.verdict != "in_sync" or _find_refused(group.tensors):
            other_groups.append(group)

    failing = [*worst_groups, *other_groups]
    cut_groups = [_cut_group(group, limit) for group in failing[:MOST_GROUPS]]
    body = text_of.comparison_body(replace(report, groups=tuple(cut_groups)), limit)
    lines = [_title(report, ", ".join(codes)), "", *plain.render(body).splitlines()]
    if len(failing) > MOST_GROUPS:
        lines += [f"and {len(failing) - MOST_GROUPS} more groups not in sync", ""]

    for file in report.unreadable[:MOST_UNREADABLE]:
        lines.append(f"unreadable: {shorten(file.path, _NAME)}: {shorten(file.reason, _SENTENCE)}")

    lines += [_verdict(report), words.counts_line(report)]
    return logged(_shorten_lines(lines))


def _shorten_lines(lines: Iterable[str]) -> str:
    """Join lines, each of bounded length."""
    return "\n".join(shorten(line, MOST_COLUMNS) for line in lines)


def _title(report: Report, codes: str) -> str:
    """Return the first line. codes: of the failing findings."""
    if report.command == "parity":
        return f"the parallel program does not compute the step of one process: {codes}"
    subject = "A and B" if report.command == "diff" else "replicas"
    if report.verdict == "out_of_sync":
        return f"{subject} are out of sync: {codes}"
    title = f"{subject} are not known to be in sync"
    return f"{title}: {codes}" if codes else title


def group_text(group: Group, all_rows: Hint = Hint.ALL_ROWS_IN_JSON) -> str:
    """Return one group as `syncheck compare` prints it, of bounded size.

    all_rows: the hint printed if tensors are omitted.
    """
    report = Report(group.verdict, (_cut_group(group, MOST_ROWS),))
    body = text_of.comparison_body(report, MOST_ROWS, all_rows)
    return _shorten_lines(plain.render(body).splitlines()).rstrip()


def uncompared_tensors(report: Report) -> list[TensorDiff]:
    """Return the tensors without a comparison, except shards and tensors skipped by design."""
    return _find_refused(report.tensors)


def _find_refused(diffs: Iterable[TensorDiff]) -> list[TensorDiff]:
    return [diff for diff in diffs if diff.status == "not_compared" and diff.reason in _REFUSALS]


def _verdict(report: Report) -> str:
    """Return the verdict of an assertion: unlike a report, an assertion fails if a tensor could not be compared."""
    refused = uncompared_tensors(report)
    if report.verdict == "out_of_sync" or report.unreadable or not refused:
        return words.verdict_line(report)

    names = []
    for diff in refused:
        detail = str(diff.detail or "")
        names.append(f"{shorten(diff.name, _NAME)} ({shorten(detail, _NAME)})")

    return f"{words.VERDICTS['undecided']}: {Undecided.REFUSED(count=len(refused), tensors=names_text(names))}"


def _cut_group(group: Group, limit: int) -> Group:
    """Return a group with names of bounded length and a bounded number of findings and notes."""
    worst = tables.tensors_to_list(group, shards=not limit)
    # Keep the tensors beyond the limit, because the table reports their number.
    beyond_limit: list[TensorDiff] = []
    if limit:
        shards = [diff for diff in group.tensors if diff.reason is Reason.SHARDED]
        worst, beyond_limit = worst[:limit], [*worst[limit:], *shards]

    replicas = []
    for replica in group.replicas:
        replicas.append(replace(replica, path=shorten(replica.path, _NAME)))

    return replace(
        group,
        name=shorten(group.name, _NAME),
        replicas=tuple(replicas),
        notes=_cut_notes(group.notes),
        tensors=(*_shorten_names(worst), *beyond_limit),
        findings=tuple(_cut_findings(group.findings)),
        values=tuple(_shorten_names(group.values)),
    )


def _cut_notes(notes: Sequence[Message]) -> tuple[Message, ...]:
    """Return the first notes, then how many more there are: a map to review must not look complete."""
    omitted = len(notes) - MOST_FINDINGS
    if omitted <= 0:
        return tuple(notes)
    return (*notes[:MOST_FINDINGS], Note.MORE_NOTES(count=omitted))


def _shorten_names(records: Iterable[Named]) -> list[Named]:
    """Return tensors or values with names of bounded length."""
    return [replace(record, name=shorten(record.name, _NAME)) for record in records]


def _cut_findings(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the first findings, failing findings before all else, with a first tensor of bounded length."""
    failing_first = sorted(findings, key=attrgetter("fails"), reverse=True)
    for finding in failing_first[:MOST_FINDINGS]:
        history = finding.history
        if history is not None and history.tensors:
            first, *further = history.tensors
            history = replace(history, tensors=(shorten(first, _NAME), *further))
        yield replace(finding, history=history)
