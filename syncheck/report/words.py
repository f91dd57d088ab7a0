"""Lines about a whole report or group that several formats share: verdict, counts, notes, omissions, titles.

Functions with a parameter `write` render messages: it writes the names and code in them for a format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.messages import Hint, Note, Undecided
from syncheck.records import Reason
from syncheck.sentences import Part, Sentence, write_plain
from syncheck.text import one_line, ranks_text, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.records import Counts, Group, Replica, Report, TensorDiff, ValueDiff
    from syncheck.sentences import Message, Writer

VERDICTS = {
    "in_sync": "IN SYNC",
    "out_of_sync": "OUT OF SYNC",
    "undecided": "COULD NOT TELL",
    "alone": "ALONE",
}

# The documentation site. tools/set_address.py replaces this placeholder everywhere when the project is released; its
# host is reserved and resolves nowhere (RFC 2606).
SITE = "https://syncheck.invalid/docs/latest"
_MOST_RUNS = 6
_MOST_NAME = 80
_MOST_NAME_IN_TEXT = 120
# The findings that affect neither the training nor the file of rank 0.
_HARMLESS = {("SYN201", "warning")}


class Headline(Sentence):
    """The verdict of a report, and what it does not say."""

    VERDICT = "{verdict:words}"
    BY_CHECKSUM = "{verdict:words} by stored checksum"
    ALLOWED = "{line}, ignoring allowed findings ({allowed:list})"
    ACCEPTED = "{line}, ignoring baseline findings ({accepted:list})"
    ALLOWED_AND_ACCEPTED = "{line}, ignoring allowed findings ({allowed:list}) and baseline findings ({accepted:list})"
    NOT_FINITE = "{line}, but the model is not finite"
    UNDECIDED = "{line}: {reason}"
    UNREADABLE = "{line}, and {count:count file} could not be read"
    RUN_NOT_FINITE = "{run:name}: {fact}"


class Omission(Sentence):
    """Paths that were not compared, and findings that no longer occur."""

    ALONE = (
        "{count:count checkpoint has|checkpoints have} no replica and {count:verb was|were} not compared: "
        "{paths:names 6}"
    )
    LINKS = (
        "{count:count path is a link to another given file|paths are links to other given files} and "
        "{count:verb was|were} not compared: {links:names 6}"
    )
    LINK = "{path:name} -> {target:name}"
    SKIPPED = "{count:count file is not a checkpoint|files are not checkpoints} and {count:verb was|were} skipped"
    FIXED = "fixed: {run:name} no longer has {code:name} on {names:names}; {hint}"


def _shorten_name(name: str) -> str:
    return shorten(name, _MOST_NAME_IN_TEXT)


def write_short(text: str, part: Part) -> str:
    """Write names in plain text, on one line and without the middle of a long name."""
    return _shorten_name(text) if part is Part.NAME else text


def counts_line(report: Report) -> str:
    """Return the last line of every report: the number of tensors by result, including those not compared."""
    line = counts_text(report.counts)
    excluded = sum(group.left_out for group in report.groups)
    if excluded:
        line += f" ({excluded} excluded by options)"
    return line


def counts_text(counts: Counts) -> str:
    """Return the number of tensors by result."""
    equal = f", {counts.equal} equal" if counts.equal else ""
    return (
        f"{counts.tensors} tensors: {counts.identical} identical{equal}, {counts.close} close, "
        f"{counts.different} different, {counts.not_compared} not compared"
    )


def first_lines(report: Report, write: Writer = write_plain) -> list[str]:
    """Return the first lines of a report: what a verdict does not say."""
    return [*unaffected_lines(report, write), *not_finite_lines(report, write)]


def unaffected_lines(report: Report, write: Writer = write_plain) -> list[str]:
    """Return a line if the replicas differ, but neither the training nor the file of rank 0 is affected."""
    failing = [finding for finding in report.findings if finding.fails]
    kinds = {(finding.code, finding.severity) for finding in failing}
    return [Note.RANK_0_UNAFFECTED().render(write)] if kinds == _HARMLESS else []


def not_finite_lines(report: Report, write: Writer = write_plain) -> list[str]:
    """Return a line for the last step of each run that is not finite on all ranks."""
    fact_of_run: dict[str, Message] = {}
    for group in report.groups:
        fact = describe_not_finite(group)
        if fact is not None:
            fact_of_run[group.run] = fact
    if len(fact_of_run) == 1:
        return [fact.render(write) for fact in fact_of_run.values()]
    lines = []
    for run, fact in list(fact_of_run.items())[:_MOST_RUNS]:
        lines.append(Headline.RUN_NOT_FINITE(run=_shorten_name(run), fact=fact).render(write))
    if len(fact_of_run) > _MOST_RUNS:
        lines.append(f"{len(fact_of_run) - _MOST_RUNS} more runs")
    return lines


def describe_not_finite(group: Group) -> Message | None:
    """Return which tensors are not finite on all replicas, and since when; None if there are none."""
    record = group.not_finite
    if record is None:
        return None
    fact = Note.NOT_FINITE(count=record.count, names=tuple(map(_shorten_name, record.names)))
    first = tuple(map(_shorten_name, record.first))
    if record.since is None:
        return fact
    if record.finite is None:
        return Note.NOT_FINITE_FROM_START(fact=fact, since=record.since, first=first)
    return Note.NOT_FINITE_SINCE(fact=fact, since=record.since, finite=record.finite, first=first)


def verdict_line(report: Report, write: Writer = write_plain, *, verdict: str = "") -> str:
    """Return the verdict; if it is undecided, with the reason. verdict: its name, default: of VERDICTS."""
    verdict = verdict or VERDICTS[report.verdict]
    # Unreadable files and checksums are reasons of an undecided verdict already.
    if report.verdict == "undecided":
        reason = undecided_reason(report)
        return Headline.UNDECIDED(line=Headline.VERDICT(verdict=verdict), reason=reason).render(write)
    sentence = Headline.BY_CHECKSUM if report.quick else Headline.VERDICT
    line = sentence(verdict=verdict)
    if report.verdict == "in_sync":
        line = _add_ignored_findings(line, report)
        if any(group.not_finite is not None for group in report.groups):
            line = Headline.NOT_FINITE(line=line)
    if report.unreadable:
        line = Headline.UNREADABLE(line=line, count=len(report.unreadable))
    return line.render(write)


def _add_ignored_findings(line: Message, report: Report) -> Message:
    allowed = sorted({finding.code for finding in report.findings if finding.allowed})
    accepted = sorted({finding.code for finding in report.findings if finding.accepted})
    if allowed and accepted:
        return Headline.ALLOWED_AND_ACCEPTED(line=line, allowed=allowed, accepted=accepted)
    if allowed:
        return Headline.ALLOWED(line=line, allowed=allowed)
    return Headline.ACCEPTED(line=line, accepted=accepted) if accepted else line


def undecided_reason(report: Report) -> Message:
    """Return why a report has no verdict."""
    for find_reason in _REASONS:
        reason = find_reason(report)
        if reason is not None:
            return reason
    return Undecided.NOTHING()


def _find_unreadable(report: Report) -> Message | None:
    if not report.unreadable:
        return None
    return Undecided.UNREADABLE(count=len(report.unreadable))


def _find_alone(report: Report) -> Message | None:
    alone = [group for group in report.groups if group.verdict == "alone"]
    if not alone:
        return None
    # Advice for a single file is shorter, and links to it explain a missing replica.
    if len(report.groups) == 1:
        return Undecided.ALL_LINKS() if report.aliases else Undecided.ONE_FILE()
    if len(alone) == len(report.groups):
        return Undecided.NO_REPLICAS()
    paths = tuple(_shorten_name(group.replicas[0].path) for group in alone)
    return Undecided.SOME_ALONE(count=len(alone), paths=paths)


def _find_claimed_twice(report: Report) -> Message | None:
    for group in report.groups:
        if group.evidence.claimed_twice:
            return Undecided.RANKS_TWICE(ranks=group.evidence.claimed_twice)
    return None


def _find_uncompared_of_models(report: Report) -> Message | None:
    uncompared = []
    for group in report.groups:
        if group.is_pair:
            uncompared += [diff for diff in group.tensors if diff.uncompared]
    return _not_compared(uncompared)


def _not_compared(diffs: Sequence[TensorDiff]) -> Message | None:
    if not diffs:
        return None
    return Undecided.NOT_COMPARED(count=len(diffs), name=diffs[0].name[:_MOST_NAME], detail=diffs[0].detail)


def _find_guesses(report: Report) -> Message | None:
    if any(group.evidence.inferred for group in report.groups):
        return Undecided.INFERRED_MAP()
    for group in report.groups:
        if group.evidence.guessed:
            return Undecided.GUESSED_HEADS(names=group.evidence.guessed)
    return None


def _find_unknown_tensors(report: Report) -> Message | None:
    unknown = [diff for diff in report.tensors if diff.unknown]
    ambiguous = [diff for diff in unknown if diff.reason is Reason.AMBIGUOUS]
    if ambiguous:
        name, detail = ambiguous[0].name[:_MOST_NAME], ambiguous[0].detail
        if len(ambiguous) == 1:
            return Undecided.AMBIGUOUS(name=name, detail=detail)
        return Undecided.MORE_AMBIGUOUS(name=name, more=len(ambiguous) - 1, detail=detail)
    refused = _not_compared([diff for diff in unknown if diff.reason is Reason.REFUSED])
    if refused is None and unknown:
        return Undecided.NO_CHECKSUMS(unknown=len(unknown), tensors=report.counts.tensors)
    return refused


def _find_unknown_values(report: Report) -> Message | None:
    values: list[ValueDiff] = []
    for group in report.groups:
        values += [value for value in group.values if value.unknown]
    return Undecided.VALUES(count=len(values), name=values[0].name[:_MOST_NAME]) if values else None


def _find_shards(report: Report) -> Message | None:
    for group in report.groups:
        if group.uncompared:
            return Undecided.RANKS_NOT_COMPARED(ranks=group.uncompared)
    return Undecided.ONLY_SHARDS() if any(group.shards for group in report.groups) else None


def _find_excluded(report: Report) -> Message | None:
    excluded = sum(group.left_out for group in report.groups)
    return Undecided.ALL_EXCLUDED(count=excluded) if excluded else None


# The first reason counts.
_REASONS = (
    _find_unreadable,
    _find_alone,
    _find_claimed_twice,
    _find_uncompared_of_models,
    _find_guesses,
    _find_unknown_tensors,
    _find_unknown_values,
    _find_shards,
    _find_excluded,
)


def omission_lines(report: Report, write: Writer = write_short) -> list[str]:
    """Return one line per reason why some of the given paths were not compared."""
    omissions = []
    alone = [group.replicas[0].path for group in report.groups if group.verdict == "alone"]
    if alone and len(report.groups) > 1:
        omissions.append(Omission.ALONE(count=len(alone), paths=alone))
    # Links are listed with their targets, because both were given.
    if report.aliases:
        links = [Omission.LINK(path=alias.path, target=alias.of) for alias in report.aliases]
        omissions.append(Omission.LINKS(count=len(links), links=links))
    if report.skipped:
        omissions.append(Omission.SKIPPED(count=report.skipped))
    return [omission.render(write) for omission in omissions]


def fixed_lines(groups: Iterable[Group], write: Writer = write_short) -> list[str]:
    """Return a line for each resolved run and code of the baseline."""
    lines = []
    for group in groups:
        for fixed in group.fixed:
            run, hint = group.label or group.run, Hint.UPDATE_BASELINE()
            message = Omission.FIXED(run=run, code=fixed.code, names=fixed.names, hint=hint)
            lines.append(message.render(write))
    return lines


def group_notes(group: Group) -> list[Message]:
    """Return how the files were grouped, and the notes of the group."""
    if not group.grouping:
        return [*group.notes]
    return [Note.GROUPING(reasons=group.grouping), *group.notes]


def note_lines(group: Group, write: Writer = write_plain) -> list[str]:
    """Return the lines of `group_notes`."""
    return [note.render(write) for note in group_notes(group)]


def group_title(group: Group) -> str:
    """Return the name of a group with its number of replicas, or of two models."""
    return one_line(group.name) + replica_count(group)


def replica_count(group: Group) -> str:
    """Return the end of the title of a group: ', 2 replicas', or nothing for two models."""
    if group.is_pair:
        return ""
    count = len(group.replicas)
    return f", {count} replica{'s' * (count != 1)}"


def replica_title(replica: Replica) -> str:
    """Return the rank, or the side of one of two models."""
    return ranks_text((replica.rank,))


def replica_text(replica: Replica) -> str:
    """Return a replica's rank or label, path, format and size."""
    details = [replica.format]
    if replica.files > 1:
        # Each rank in memory holds a part of a model, like each file of a folder.
        unit = "ranks" if replica.format == "memory" else "files"
        details.append(f"{replica.files} {unit}")
    details.append(f"{replica.tensors} tensor{'s' * (replica.tensors != 1)}")
    details.append(bytes_text(replica.bytes))
    return f"{replica_title(replica)}: {replica.path} ({', '.join(details)})"


def step_text(group: Group) -> str:
    """Return 'step 300', or the name of the group without a step."""
    return one_line(group.name) if group.step is None else f"step {group.step}"


def bytes_text(size: int) -> str:
    """Return a size in bytes with a decimal unit: 46833547 gives '46.8 MB'."""
    if size < 1000:
        return f"{size} B"
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}"
