"""Lines about a whole report or group that several formats share: verdict, counts, notes, omissions, titles.

Functions with a parameter `write` render messages: it writes the names and code in them for a format.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from syncheck.messages import Grouping, Hint, Note
from syncheck.report.long_names import shorten_name, shorten_names, write_names
from syncheck.report.selections import count_excluded, find_failing, find_groups, list_first_paths, write_first
from syncheck.report.undecided import get_first_value, undecided_reason
from syncheck.sentences import Sentence, write_plain
from syncheck.text import one_line, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.records import Counts, Group, Replica, Report
    from syncheck.sentences import Message, Writer

VERDICTS = {
    "in_sync": "IN SYNC",
    "out_of_sync": "OUT OF SYNC",
    "undecided": "COULD NOT TELL",
    "alone": "ALONE",
}

# The documentation site, which tools/set_address.py sets at a release. Until then no address is printed.
SITE = ""
_UNITS = ("B", "kB", "MB", "GB", "TB")
_MOST_RUNS = 6
# The findings that affect neither the training nor the file of rank 0.
_HARMLESS = {("SYN201", "warning")}
# Notes on the limits of a verdict: ranks without files, contradicting steps, elements that a conversion lost, and parts
# of a step in parity.
_OF_FILES = (Note.NO_FILES, Note.SAME_FILES, Note.CONTRADICTING_STEPS, Note.MORE_CONTRADICTING_STEPS)
_OF_MODELS = (Note.MODEL_TYPES_DIFFER, Note.FLUSHED)
SCOPE = (
    *_OF_FILES,
    *_OF_MODELS,
    Note.PARITY_COMPARED,
    Note.PARITY_NO_STEP,
    Note.PARITY_NO_FINISH,
    Note.PARITY_NO_NORM,
    Note.PARITY_NO_CLIPPING,
    Note.PARITY_NO_UPDATE,
    Note.PARITY_NO_SETTINGS,
    Note.PARITY_SMALL_NORM,
    Note.PARITY_SMALL_ELEMENTS,
)


class Headline(Sentence):
    """The verdict of a report and its limits."""

    VERDICT = "{verdict:words}"
    BY_CHECKSUM = "{verdict:words} by stored checksum"
    ALLOWED = "{line}, ignoring allowed findings ({allowed:list})"
    ACCEPTED = "{line}, ignoring baseline findings ({accepted:list})"
    ALLOWED_AND_ACCEPTED = "{line}, ignoring allowed findings ({allowed:list}) and baseline findings ({accepted:list})"
    NOT_FINITE = "{line}, but the model is not finite"
    UNDECIDED = "{line}: {reason}"
    UNREADABLE = "{line}, and {count:count file} could not be read"
    RUN_NOT_FINITE = "{run:name}: {fact}"
    ONE_SIDED = "more NaN or infinite elements in one model: {tensors:names}"
    ONE_SIDED_TENSOR = "{name:name} has {values:by_rank} of {numel}, for example at {index}"


# Whether findings are allowed, and whether the baseline has some.
_IGNORED_FINDINGS = {
    (True, False): Headline.ALLOWED,
    (False, True): Headline.ACCEPTED,
    (True, True): Headline.ALLOWED_AND_ACCEPTED,
}


class Omission(Sentence):
    """Paths that were not compared, and findings that no longer occur."""

    HOSTS = (
        "the replicas within each folder were compared, but no two folders, which have equal local ranks; if they are "
        "hosts of one run: {group_by:option ''}"
    )
    FOLDERS = "the replicas within each folder were compared, but no two folders: `syncheck diff FOLDER FOLDER`"
    ALONE = (
        "{count:count checkpoint has|checkpoints have} no replica and {count:verb was|were} not compared: "
        "{paths:names 6}"
    )
    LINKS = (
        "{count:count path is a link to another given file|paths are links to other given files} and "
        "{count:verb was|were} not compared: {links:names 6}"
    )
    LINK = "{path:name} -> {target:name}"
    SKIPPED = (
        "{count:count file is not a checkpoint|files are not checkpoints} and {count:verb was|were} skipped: "
        "{paths:list}"
    )
    SKIPPED_MANY = "{count} files are not checkpoints and were skipped, among them {paths:list}"
    FIXED = "fixed: {run:name} no longer has {code:name} on {names:names}; {hint}"


def counts_line(report: Report) -> str:
    """Return the last line of every report: the number of tensors by result, including those not compared."""
    line = counts_text(report.counts)
    excluded = count_excluded(report)
    if excluded:
        line += f" ({excluded} excluded by options)"
    return line


def counts_text(counts: Counts) -> str:
    """Return the number of tensors by result."""
    texts = [
        f"{counts.identical} identical",
        f"{counts.equal} equal",
        f"{counts.close} close",
        f"{counts.different} different",
        f"{counts.not_compared} not compared",
    ]
    # Tensors are rarely equal without being identical.
    if not counts.equal:
        del texts[1]

    return f"{counts.tensors} tensors: {', '.join(texts)}"


def first_lines(report: Report, write: Writer = write_plain) -> list[str]:
    """Return the first lines of a report: the limits of its verdict."""
    return [*unaffected_lines(report, write), *one_sided_lines(report, write), *not_finite_lines(report, write)]


def one_sided_lines(report: Report, write: Writer = write_plain) -> list[str]:
    """Return a line if one of two models has more NaN and infinite elements, with numbers and indices."""
    facts = []
    # Replicas have a finding of their own, whose ranks are in its title.
    for group in filter(attrgetter("is_pair"), report.groups):
        for diff in group.tensors:
            if len(set(diff.nonfinite.values())) > 1:
                fact = Headline.ONE_SIDED_TENSOR(
                    name=shorten_name(diff.name),
                    values=dict(diff.nonfinite),
                    numel=diff.numel,
                    index=list(diff.index or ()),
                )
                facts.append(fact)
    return [Headline.ONE_SIDED(tensors=facts).render(write)] if facts else []


def unaffected_lines(report: Report, write: Writer = write_plain) -> list[str]:
    """Return a line if the replicas differ, but neither the training nor the file of rank 0 is affected."""
    kinds = {(finding.code, finding.severity) for finding in find_failing(report.findings)}
    return [Note.RANK_0_UNAFFECTED().render(write)] if kinds == _HARMLESS else []


def not_finite_lines(report: Report, write: Writer = write_plain) -> list[str]:
    """Return a line for the last step of each run that is not finite on all ranks."""
    fact_of_run: dict[str, Message] = {}
    for group in report.groups:
        fact = describe_not_finite(group)
        if fact is not None:
            fact_of_run[group.run] = fact

    lines = []
    for run, fact in fact_of_run.items():
        # The name of the only run is no news.
        if len(fact_of_run) > 1:
            fact = Headline.RUN_NOT_FINITE(run=shorten_name(run), fact=fact)
        lines.append(fact.render(write))

    return write_first(lines, _MOST_RUNS, ending="{} more runs")


def describe_not_finite(group: Group) -> Message | None:
    """Return which tensors are not finite on all replicas, and since when; None if there are none."""
    record = group.not_finite
    if record is None:
        return None

    fact = Note.NOT_FINITE(count=record.count, names=shorten_names(record.names))
    first = shorten_names(record.first)
    if record.since is None:
        return fact
    if record.finite is None:
        return Note.NOT_FINITE_FROM_START(fact=fact, since=record.since, first=first)

    return Note.NOT_FINITE_SINCE(
        fact=fact,
        since=record.since,
        finite=record.finite,
        first=first,
    )


def verdict_line(report: Report, write: Writer = write_plain, *, verdict: str = "") -> str:
    """Return the verdict; if it is undecided, with the reason. verdict: its name, default: of VERDICTS."""
    verdict = verdict or VERDICTS[report.verdict]
    line = Headline.VERDICT(verdict=verdict)
    # Unreadable files and checksums are reasons of an undecided verdict already.
    if report.verdict == "undecided":
        return Headline.UNDECIDED(line=line, reason=undecided_reason(report)).render(write)
    if report.quick:
        line = Headline.BY_CHECKSUM(verdict=verdict)
    if report.verdict == "in_sync":
        line = _add_ignored_findings(line, report)
        if get_first_value(report, attrgetter("not_finite")):
            line = Headline.NOT_FINITE(line=line)
    if report.unreadable:
        line = Headline.UNREADABLE(line=line, count=len(report.unreadable))

    return line.render(write)


def _add_ignored_findings(line: Message, report: Report) -> Message:
    """Add the codes of the options and of the baseline."""
    allowed = {finding.code for finding in report.findings if finding.allowed}
    accepted = {finding.code for finding in report.findings if finding.accepted}
    sentence = _IGNORED_FINDINGS.get((bool(allowed), bool(accepted)))
    if sentence is None:
        return line
    return sentence(line=line, allowed=sorted(allowed), accepted=sorted(accepted))


def scope_lines(report: Report, write: Writer = write_names) -> list[str]:
    """Return the notes that state what the verdict is about."""
    lines = []
    for group in report.groups:
        for note in group.notes:
            if note.code in SCOPE:
                lines.append(note.render(write))
    return lines


def omission_lines(report: Report, write: Writer = write_names) -> list[str]:
    """Return one line per reason why some of the given paths were not compared."""
    return folder_lines(report, write) + file_lines(report, write)


def folder_lines(report: Report, write: Writer = write_names) -> list[str]:
    """Return a line if folders were not compared with each other; empty otherwise."""
    groupings: set[Message] = set()
    for group in report.groups:
        groupings.update(group.grouping)
    omissions = {
        Grouping.PERHAPS_HOSTS(): Omission.HOSTS(),
        Grouping.FOLDERS_ARE_RUNS(): Omission.FOLDERS(),
    }
    for grouping, omission in omissions.items():
        if grouping in groupings:
            return [omission.render(write)]
    return []


def file_lines(report: Report, write: Writer = write_names) -> list[str]:
    """Return one line per reason why some of the given files were not compared."""
    lines = []
    alone = list_first_paths(find_groups(report.groups, "alone"))
    if alone and len(report.groups) > 1:
        lines.append(Omission.ALONE(count=len(alone), paths=alone).render(write))
    # Links are listed with their targets, because both were given.
    if report.aliases:
        links = [Omission.LINK(path=alias.path, target=alias.of) for alias in report.aliases]
        lines.append(Omission.LINKS(count=len(links), links=links).render(write))
    return lines + skipped_lines(report, write)


def skipped_lines(report: Report, write: Writer = write_names) -> list[str]:
    """Return a line with the first files that are not checkpoints; empty if only notes and settings were skipped."""
    if not report.skipped_paths:
        return []
    is_complete = len(report.skipped_paths) == report.skipped
    sentence = Omission.SKIPPED if is_complete else Omission.SKIPPED_MANY
    message = sentence(count=report.skipped, paths=report.skipped_paths)
    return [message.render(write)]


def fixed_lines(groups: Iterable[Group], write: Writer = write_names) -> list[str]:
    """Return a line for each resolved run and code of the baseline."""
    lines = []
    for group in groups:
        for fixed in group.fixed:
            message = Omission.FIXED(
                run=group.label or group.run,
                code=fixed.code,
                names=fixed.names,
                hint=Hint.UPDATE_BASELINE(),
            )
            lines.append(message.render(write))

    return lines


def group_notes(group: Group) -> list[Message]:
    """Return how the files were grouped, and the notes of the group."""
    notes = list(group.notes)
    if group.grouping:
        notes.insert(0, Note.GROUPING(reasons=group.grouping))
    return notes


def list_details(group: Group) -> list[Message]:
    """Return `group_notes` without the scope of the verdict: a report states it once."""
    return [note for note in group_notes(group) if note.code not in SCOPE]


def note_lines(group: Group, write: Writer = write_plain) -> list[str]:
    """Return the lines of `list_details`."""
    lines = []
    for note in list_details(group):
        lines.append(note.render(write))

    return lines


def group_title(group: Group) -> str:
    """Return the name of a group with its number of replicas, or of two models."""
    return one_line(group.name) + replica_count(group)


def replica_count(group: Group) -> str:
    """Return the end of the title of a group: ', 2 replicas', ', 2 ranks' in parity, or nothing for two models."""
    # The ranks of a parallel program may hold shards.
    noun = "rank" if Note.PARITY in map(attrgetter("code"), group.notes) else "replica"
    return "" if group.is_pair else f", {count_text(len(group.replicas), noun)}"


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun: '1 replica', '2 replicas'."""
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


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
    details += [count_text(replica.tensors, "tensor"), bytes_text(replica.bytes)]
    return f"{replica_title(replica)}: {replica.path} ({', '.join(details)})"


def step_text(group: Group) -> str:
    """Return 'step 300', or the name of the group without a step."""
    return one_line(group.name) if group.step is None else f"step {group.step}"


def bytes_text(size: int) -> str:
    """Return a size in bytes with a decimal unit: 46833547 gives '46.8 MB'."""
    thousands = min((len(str(size)) - 1) // 3, len(_UNITS) - 1)
    if not thousands:
        return f"{size} B"
    return f"{size / 1000**thousands:.1f} {_UNITS[thousands]}"
