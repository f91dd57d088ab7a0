"""Text of a failed assertion: findings, worst tensors and counts, of bounded size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.messages import Hint, Undecided
from syncheck.records import Reason, Report
from syncheck.report import plain, tables, words
from syncheck.report import text as text_of
from syncheck.text import logged, names_text, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.records import Finding, Group, TensorDiff

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
    failing = [group for group in report.groups if group.verdict != "in_sync" or any(map(_is_refused, group.tensors))]
    failing.sort(key=lambda group: group.verdict != "out_of_sync")
    worst = replace(report, groups=tuple(_cut_group(group, limit) for group in failing[:MOST_GROUPS]))
    codes: dict[str, None] = {}
    for group in failing:
        codes.update(dict.fromkeys(finding.code for finding in group.findings if finding.fails))
    lines = [_title(report, ", ".join(codes)), "", *plain.render(text_of.comparison_body(worst, limit)).splitlines()]
    if len(failing) > MOST_GROUPS:
        lines += [f"and {len(failing) - MOST_GROUPS} more groups not in sync", ""]
    for file in report.unreadable[:MOST_UNREADABLE]:
        lines.append(f"unreadable: {shorten(file.path, _NAME)}: {shorten(file.reason, _SENTENCE)}")
    lines += [_verdict(report), words.counts_line(report)]
    return logged("\n".join(shorten(line, MOST_COLUMNS) for line in lines))


def _title(report: Report, codes: str) -> str:
    """Return the first line. codes: of the failing findings."""
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
    lines = plain.render(text_of.comparison_body(report, MOST_ROWS, all_rows)).splitlines()
    return "\n".join(shorten(line, MOST_COLUMNS) for line in lines).rstrip()


def uncompared_tensors(report: Report) -> list[TensorDiff]:
    """Return the tensors without a comparison, except shards and tensors skipped by design."""
    return [diff for diff in report.tensors if _is_refused(diff)]


def _is_refused(diff: TensorDiff) -> bool:
    return diff.status == "not_compared" and diff.reason in _REFUSALS


def _verdict(report: Report) -> str:
    """Return the verdict of an assertion: unlike a report, an assertion fails if a tensor could not be compared."""
    refused = uncompared_tensors(report)
    if report.verdict == "out_of_sync" or report.unreadable or not refused:
        return words.verdict_line(report)
    names = names_text([f"{shorten(diff.name, _NAME)} ({shorten(str(diff.detail or ''), _NAME)})" for diff in refused])
    return f"{words.VERDICTS['undecided']}: {Undecided.REFUSED(count=len(refused), tensors=names)}"


def _cut_group(group: Group, limit: int) -> Group:
    """Return a group with names of bounded length and a bounded number of findings and notes."""
    worst = tables.tensors_to_list(group, shards=not limit)
    # Keep the tensors beyond the limit, because the table reports their number.
    beyond_limit = []
    if limit:
        shards = [diff for diff in group.tensors if diff.reason is Reason.SHARDED]
        worst, beyond_limit = worst[:limit], [*worst[limit:], *shards]
    return replace(
        group,
        name=shorten(group.name, _NAME),
        replicas=tuple(replace(replica, path=shorten(replica.path, _NAME)) for replica in group.replicas),
        notes=group.notes[:MOST_FINDINGS],
        tensors=(*(replace(diff, name=shorten(diff.name, _NAME)) for diff in worst), *beyond_limit),
        findings=tuple(_cut_findings(group.findings)),
        values=tuple(replace(value, name=shorten(value.name, _NAME)) for value in group.values),
    )


def _cut_findings(findings: Iterable[Finding]) -> Iterable[Finding]:
    failing_first = sorted(findings, key=lambda finding: not finding.fails)
    for finding in failing_first[:MOST_FINDINGS]:
        history = finding.history
        if history is not None:
            history = replace(
                history, tensors=tuple(shorten(name, _NAME) for name in history.tensors[:1]) + history.tensors[1:]
            )
        yield replace(finding, history=history)
