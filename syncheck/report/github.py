"""A report as workflow commands, which GitHub shows as annotations of a run and of a pull request.

`::error` marks the reasons of exit codes 1 and 2, `::warning` allowed findings and groups without a verdict, `::notice`
informational findings. A finding at several steps of a run becomes one annotation for the last step, with the number
of the earlier steps.
https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

from collections import Counter, defaultdict
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from syncheck.diagnose.selection import select_names
from syncheck.diagnose.series import step_order
from syncheck.frozen import record
from syncheck.report import finding_text, tables, words
from syncheck.report.selections import SEVERITIES, find_groups, list_first_paths, write_first
from syncheck.text import one_line, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncheck.records import Finding, Group, Report, TensorDiff

Level = Literal["error", "warning", "notice"]
LEVELS: tuple[Level, ...] = ("error", "warning", "notice")
# Annotations per level. GitHub silently hides further annotations of a step:
# https://github.com/actions/toolkit/blob/457303960f03375db6f033e214b9f90d79c3fe5c/docs/problem-matchers.md#limitations
MOST = 10
_MOST_TITLE, _MOST_LINE = 200, 600
_MOST_TENSORS = 3


@record
class Annotation:
    """One annotation. text: its lines. file: the file it is attached to, may be empty."""

    level: Level
    title: str
    text: tuple[str, ...]
    file: str = ""


def render(report: Report) -> str:
    """Return at most MOST commands per level, then the verdict and the counts for the log."""
    # GitHub counts the annotations of each level by themselves.
    by_level: dict[Level, list[Annotation]] = defaultdict(list)
    for annotation in [*_problems(report), *_findings(report), *_fixed(report)]:
        by_level[annotation.level].append(annotation)

    lines: list[str] = []
    for level in LEVELS:
        lines += [_command(annotation) for annotation in _limit(by_level[level])]

    lines += [words.verdict_line(report), words.counts_line(report), ""]
    return "\n".join(lines)


def _command(annotation: Annotation) -> str:
    """Return an annotation as an escaped command on one line."""
    header = f"title={_escape_property(shorten(annotation.title, _MOST_TITLE))}"
    file = one_line(annotation.file)
    if file.strip():
        header = f"file={_escape_property(file)},{header}"
    text = "\n".join(shorten(line, _MOST_LINE) for line in annotation.text)
    return f"::{annotation.level} {header}::{_escape(text)}"


def _escape(text: str) -> str:
    # The percent sign first, because it starts the other escapes.
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")


def _limit(annotations: list[Annotation]) -> list[Annotation]:
    """Replace annotations beyond the limit of GitHub by one list of their titles."""
    if len(annotations) <= MOST:
        return annotations
    hidden = annotations[MOST - 1 :]
    titles = write_first(hidden, MOST, attrgetter("title"))
    text = (*titles, f"GitHub shows {MOST} annotations per level; the .json and .html reports list all.")
    return [*annotations[: MOST - 1], Annotation(annotations[0].level, f"syncheck: {len(hidden)} more", text)]


def _problems(report: Report) -> Iterator[Annotation]:
    """Yield annotations for a model that is not finite, unreadable files, missing verdicts and uncompared files."""
    facts = words.one_sided_lines(report) + words.not_finite_lines(report)
    if facts:
        yield Annotation("warning", "syncheck: not finite", tuple(facts))

    for file in report.unreadable:
        yield Annotation(
            level="error",
            title="syncheck: unreadable file",
            text=(f"{file.path}: {file.reason}",),
            file=file.path,
        )

    undecided = find_groups(report.groups, "undecided")
    if report.verdict == "undecided" and not report.unreadable:
        yield Annotation("error", "syncheck: could not tell", (words.verdict_line(report),))
    elif undecided:
        names = write_first(undecided, MOST, attrgetter("name"))
        yield Annotation("warning", "syncheck: could not tell for some groups", tuple(names))

    yield from _omissions(report)


def _omissions(report: Report) -> Iterator[Annotation]:
    """Yield annotations for folders that were not compared with each other, and for files that were not compared."""
    folders = words.folder_lines(report)
    if folders:
        yield Annotation("warning", "syncheck: folders were not compared with each other", tuple(folders))

    omitted = words.file_lines(report)
    if omitted:
        paths = list_first_paths(find_groups(report.groups, "alone"))
        for alias in report.aliases:
            paths.append(alias.path)
        yield Annotation(
            level="warning",
            title="syncheck: some files were not compared",
            text=tuple(omitted),
            # Files that are not checkpoints get no annotation.
            file=paths[0] if paths else "",
        )


def _fixed(report: Report) -> Iterator[Annotation]:
    """Yield an annotation for the findings of the baseline that no longer occur."""
    lines = words.fixed_lines(report.groups)
    if lines:
        yield Annotation("notice", "syncheck: baseline findings fixed", tuple(lines[:MOST]))


@record
class _Occurrence:
    """A finding of a group at the last step of its run. history: the earlier steps, in words."""

    group: Group
    finding: Finding
    history: str

    @property
    def importance(self) -> int:
        """A sort key, the lowest for the most severe finding."""
        return SEVERITIES.index(self.finding.severity)

    @property
    def level(self) -> Level:
        """The level of the annotation."""
        if self.finding.severity == "info":
            return "notice"
        return "error" if self.finding.fails else "warning"

    @property
    def path(self) -> str:
        """The file of a suspect, or of the first replica; empty for events without ranks."""
        paths = [replica.path for replica in self.group.replicas]
        for replica in self.group.replicas:
            if replica.rank in self.finding.ranks:
                return replica.path
        return paths[0] if paths else ""


def _findings(report: Report) -> list[Annotation]:
    """Return one annotation per finding, the most severe first."""
    annotations: list[Annotation] = []
    count_by_level: Counter[str] = Counter()
    for occurrence in sorted(_last_occurrences(report), key=attrgetter("importance")):
        # The name comes last, because it may be long.
        title = f"{finding_text.finding_title(occurrence.finding)}, {occurrence.group.name}"
        count_by_level[occurrence.level] += 1
        # Annotations beyond the limit are listed by title only.
        is_complete = count_by_level[occurrence.level] <= MOST
        annotation = Annotation(
            level=occurrence.level,
            title=title,
            text=_text(occurrence) if is_complete else (),
            file=occurrence.path,
        )
        annotations.append(annotation)

    return annotations


def _last_occurrences(report: Report) -> list[_Occurrence]:
    """Return the findings of each run at the last step that has them."""
    by_run_and_code: dict[tuple[str, str, bool], list[tuple[Group, Finding]]] = {}
    for group in report.groups:
        for finding in group.findings:
            by_run_and_code.setdefault((group.run, finding.code, finding.fails), []).append((group, finding))

    occurrences = []
    for pairs in by_run_and_code.values():
        steps = sorted({step_order(group) for group, _ in pairs})
        earlier = _describe_earlier_steps(steps)
        for group, finding in pairs:
            if step_order(group) == steps[-1]:
                history = finding_text.summarize_history(finding) or earlier
                occurrences.append(_Occurrence(group, finding, history))

    return occurrences


def _describe_earlier_steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return ""
    earlier = words.count_text(len(steps) - 1, "earlier step")
    return f"Also at {earlier}, first at step {steps[0]}."


def _text(occurrence: _Occurrence) -> tuple[str, ...]:
    group, finding = occurrence.group, occurrence.finding
    worst = tables.sort_worst_first(select_names(group.tensors, frozenset(finding.tensors)))
    lines = [
        finding.evidence,
        occurrence.history,
        *write_first(worst, _MOST_TENSORS, _row, ending="- and {} more"),
        *tables.place_lines(worst[:_MOST_TENSORS], group),
        finding_text.cause_text(finding),
        f"Fix: {finding.fix}",
        finding_text.decision_text(finding, group),
        f"syncheck explain {finding.code}",
    ]
    return tuple(line for line in lines if line)


def _row(diff: TensorDiff) -> str:
    differing, *numbers = tables.difference_cells(diff)
    parts = [differing]
    for label, number in zip(tables.NUMBERS, numbers, strict=True):
        if number not in ("", "-"):
            parts.append(f"{label} {number}")
    return f"- {shorten(diff.name, _MOST_TITLE)}: {', '.join(parts)}"
