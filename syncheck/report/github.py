"""A report as workflow commands, which GitHub shows as annotations of a run and of a pull request.

`::error` marks the reasons of exit codes 1 and 2, `::warning` allowed findings and groups without a verdict, `::notice`
informational findings. A finding at several steps of a run becomes one annotation for the last step, with the number
of the earlier steps.
https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from syncheck.diagnose.series import step_order
from syncheck.report import finding_text, tables, words
from syncheck.text import one_line, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncheck.records import Finding, Group, Report

Level = Literal["error", "warning", "notice"]
LEVELS: tuple[Level, ...] = ("error", "warning", "notice")
# Annotations per level. GitHub silently hides further annotations of a step:
# https://github.com/actions/toolkit/blob/457303960f03375db6f033e214b9f90d79c3fe5c/docs/problem-matchers.md#limitations
MOST = 10
_MOST_TITLE, _MOST_LINE = 200, 600
_MOST_TENSORS = 3
_SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class Annotation:
    """One annotation. text: its lines. file: the file it is attached to, may be empty."""

    level: Level
    title: str
    text: tuple[str, ...]
    file: str = ""


def render(report: Report) -> str:
    """Return at most MOST commands per level, then the verdict and the counts for the log."""
    annotations = [*_problems(report), *_findings(report)]
    if fixed := words.fixed_lines(report.groups):
        annotations.append(Annotation("notice", "syncheck: baseline findings fixed", tuple(fixed[:MOST])))
    lines: list[str] = []
    for level in LEVELS:
        of_level = [annotation for annotation in annotations if annotation.level == level]
        lines += [_command(annotation) for annotation in _limit(of_level)]
    lines += [words.verdict_line(report), words.counts_line(report), ""]
    return "\n".join(lines)


def _command(annotation: Annotation) -> str:
    """Return an annotation as an escaped command on one line."""
    properties = {"file": one_line(annotation.file), "title": shorten(annotation.title, _MOST_TITLE)}
    header = ",".join(f"{name}={_escape_property(value)}" for name, value in properties.items() if value.strip())
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
    titles = _first_lines([annotation.title for annotation in hidden])
    text = (*titles, f"GitHub shows {MOST} annotations per level; the .json and .html reports list all.")
    return [*annotations[: MOST - 1], Annotation(annotations[0].level, f"syncheck: {len(hidden)} more", text)]


def _problems(report: Report) -> Iterator[Annotation]:
    """Yield annotations for a model that is not finite, unreadable files, missing verdicts and uncompared files."""
    if facts := words.not_finite_lines(report):
        yield Annotation("warning", "syncheck: not finite", tuple(facts))
    for file in report.unreadable:
        yield Annotation("error", "syncheck: unreadable file", (f"{file.path}: {file.reason}",), file.path)
    undecided = [group.name for group in report.groups if group.verdict == "undecided"]
    if report.verdict == "undecided" and not report.unreadable:
        yield Annotation("error", "syncheck: could not tell", (words.verdict_line(report),))
    elif undecided:
        yield Annotation("warning", "syncheck: could not tell for some groups", _first_lines(undecided))
    if omitted := words.omission_lines(report):
        paths = [group.replicas[0].path for group in report.groups if group.verdict == "alone"]
        paths += [alias.path for alias in report.aliases]
        # Files that are not checkpoints have no paths in a report.
        path = paths[0] if paths else ""
        yield Annotation("warning", "syncheck: some files were not compared", tuple(omitted), path)


def _first_lines(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the first texts, and a line with the number of further texts."""
    if len(texts) <= MOST:
        return tuple(texts)
    return (*texts[:MOST], f"and {len(texts) - MOST} more")


@dataclass(frozen=True, slots=True)
class _Occurrence:
    """A finding of a group at the last step of its run. history: the earlier steps, in words."""

    group: Group
    finding: Finding
    history: str


def _findings(report: Report) -> list[Annotation]:
    """Return one annotation per finding, the most severe first."""
    occurrences = _last_occurrences(report)
    occurrences.sort(key=lambda occurrence: _SEVERITIES.index(occurrence.finding.severity))
    annotations: list[Annotation] = []
    count_by_level: Counter[str] = Counter()
    for occurrence in occurrences:
        group, finding = occurrence.group, occurrence.finding
        level = _level(finding)
        count_by_level[level] += 1
        # The name comes last, because it may be long.
        title = f"{finding_text.finding_title(finding)}, {group.name}"
        suspects = [replica for replica in group.replicas if replica.rank in finding.ranks]
        path = (suspects or group.replicas)[0].path
        # Annotations beyond the limit are listed by title only.
        text = _text(occurrence) if count_by_level[level] <= MOST else ()
        annotations.append(Annotation(level, title, text, path))
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
    earlier = len(steps) - 1
    return f"Also at {earlier} earlier step{'s' * (earlier > 1)}, first at step {steps[0]}."


def _level(finding: Finding) -> Level:
    if finding.severity == "info":
        return "notice"
    return "error" if finding.fails else "warning"


def _text(occurrence: _Occurrence) -> tuple[str, ...]:
    group, finding = occurrence.group, occurrence.finding
    names = frozenset(finding.tensors)
    worst = tables.sort_worst_first(diff for diff in group.tensors if diff.name in names)
    rows = [_row(diff.name, tables.difference_cells(diff)) for diff in worst[:_MOST_TENSORS]]
    if len(worst) > _MOST_TENSORS:
        rows.append(f"- and {len(worst) - _MOST_TENSORS} more")
    rows += tables.place_lines(worst[:_MOST_TENSORS], group)
    lines = (
        finding.evidence,
        occurrence.history,
        *rows,
        finding_text.cause_text(finding),
        f"Fix: {finding.fix}",
        f"syncheck explain {finding.code}",
    )
    return tuple(line for line in lines if line)


def _row(name: str, cells: Sequence[str]) -> str:
    differing, *numbers = cells
    parts = [differing]
    for label, number in zip(tables.NUMBERS, numbers, strict=True):
        if number not in ("", "-"):
            parts.append(f"{label} {number}")
    return f"- {shorten(name, _MOST_TITLE)}: {', '.join(parts)}"
