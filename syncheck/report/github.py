"""A report as workflow commands, which GitHub shows as annotations of a run and of a pull request.

`::error` is what makes the exit code 1 or 2, `::warning` what was excused or could not be told beside it, `::notice`
what is for information. Of one finding on several steps of a run, the last step is drawn and the others are counted.
https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from syncheck.errors import one_line
from syncheck.report import when, words
from syncheck.series import step_order

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncheck.records import Finding, Group, Report

Level = Literal["error", "warning", "notice"]
LEVELS: tuple[Level, ...] = ("error", "warning", "notice")
# Annotations of each level. GitHub shows no more of one step, and says of no more that it hid them:
# https://github.com/actions/toolkit/blob/457303960f03375db6f033e214b9f90d79c3fe5c/docs/problem-matchers.md#limitations
MOST = 10
_MOST_TITLE, _MOST_LINE = 200, 600
_MOST_TENSORS = 3
_SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class Annotation:
    """One box on GitHub. text: its lines. file: what it is about, empty where that is no file."""

    level: Level
    title: str
    text: tuple[str, ...]
    file: str = ""


def render(report: Report) -> str:
    """Return the commands, at most MOST of each level, and then verdict and counts for the log."""
    found = [*_untold(report), *_findings(report)]
    if fixed := words.fixed_lines(report.groups):
        found.append(Annotation("notice", "syncheck: findings of the baseline are fixed", tuple(fixed[:MOST])))
    lines: list[str] = []
    for level in LEVELS:
        lines += map(command, _bounded([one for one in found if one.level == level]))
    return "".join(f"{line}\n" for line in [*lines, words.verdict_line(report), words.counts_line(report)])


def command(annotation: Annotation) -> str:
    """Write an annotation as a command on one line, whatever names from files are in it."""
    properties = {"file": one_line(annotation.file), "title": words.cut(one_line(annotation.title), _MOST_TITLE)}
    said = ",".join(f"{name}={_escaped_property(value)}" for name, value in properties.items() if value.strip())
    text = "\n".join(words.cut(one_line(line), _MOST_LINE) for line in annotation.text)
    return f"::{annotation.level} {said}::{_escaped(text)}"


def _escaped(text: str) -> str:
    # The percent sign first, or it would escape the escapes.
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escaped_property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def _bounded(found: list[Annotation]) -> list[Annotation]:
    """Let the last of too many tell of those that GitHub would leave out without a word."""
    if len(found) <= MOST:
        return found
    hidden = found[MOST - 1 :]
    titles = tuple(one.title for one in hidden[:MOST])
    more = (f"and {len(hidden) - MOST} more",) if len(hidden) > MOST else ()
    text = (*titles, *more, "GitHub shows 10 of a kind; the .json and .html reports have all.")
    return [*found[: MOST - 1], Annotation(found[0].level, f"syncheck: {len(hidden)} more", text)]


def _untold(report: Report) -> Iterator[Annotation]:
    for file in report.unreadable:
        yield Annotation("error", "syncheck: a file could not be read", (f"{file.path}: {file.reason}",), file.path)
    if report.verdict == "undecided" and not report.unreadable:
        yield Annotation("error", "syncheck: could not tell", (words.verdict_line(report),))
    elif any(group.verdict == "undecided" for group in report.groups):
        names = [group.name for group in report.groups if group.verdict == "undecided"]
        more = (f"and {len(names) - MOST} more",) if len(names) > MOST else ()
        yield Annotation("warning", "syncheck: could not tell of some groups", (*names[:MOST], *more))
    if omitted := words.omission_lines(report):
        paths = [group.replicas[0].path for group in report.groups if group.verdict == "alone"]
        paths += [alias.path for alias in report.aliases]
        title = "syncheck: some of the paths given were not compared"
        yield Annotation("warning", title, tuple(omitted), paths[0] if paths else "")


def _findings(report: Report) -> list[Annotation]:
    """Return one annotation a finding, the most severe first."""
    alike: dict[tuple[str, str, bool], list[tuple[Group, Finding]]] = {}
    for group in report.groups:
        for finding in group.findings:
            alike.setdefault((group.run, finding.code, finding.fails), []).append((group, finding))
    shown: list[tuple[Group, Finding, str]] = []
    for pairs in alike.values():
        steps = sorted({step_order(group) for group, _ in pairs})
        many = f"{len(steps) - 1} earlier step{'s' * (len(steps) > 2)}"
        before = f"Also at {many}, first at step {steps[0]}." if len(steps) > 1 else ""
        shown += [
            (group, finding, when.short(finding) or before)
            for group, finding in pairs
            if step_order(group) == steps[-1]
        ]
    shown.sort(key=lambda one: _SEVERITIES.index(one[1].severity))
    found: list[Annotation] = []
    drawn: Counter[str] = Counter()
    for group, finding, before in shown:
        level = _level(finding)
        drawn[level] += 1
        # The code comes first and the name, which may be long, last.
        title = f"{words.headline(finding)}, {group.name}"
        suspect = next((r for r in group.replicas if r.rank in finding.ranks), group.replicas[0])
        # Of those that will not be shown the title is enough.
        text = _text(group, finding, before) if drawn[level] <= MOST else ()
        found.append(Annotation(level, title, text, suspect.path))
    return found


def _level(finding: Finding) -> Level:
    if finding.severity == "info":
        return "notice"
    return "error" if finding.fails else "warning"


def _text(group: Group, finding: Finding, before: str) -> tuple[str, ...]:
    covered = frozenset(finding.tensors)
    worst = words.worst_first([diff for diff in group.tensors if diff.name in covered])
    rows = [_row(diff.name, *words.gap_cells(diff)) for diff in worst[:_MOST_TENSORS]]
    if len(worst) > _MOST_TENSORS:
        rows.append(f"- and {len(worst) - _MOST_TENSORS} more")
    text = (
        finding.evidence,
        before,
        *rows,
        str(finding.cause),
        f"Fix: {finding.fix}",
        f"syncheck explain {finding.code}",
    )
    return tuple(line for line in text if line)


def _row(name: str, differing: str, absolute: str, relative: str, ulp: str) -> str:
    measured = (("max abs", absolute), ("max rel", relative), ("max ulp", ulp))
    gaps = [f"{what} {gap}" for what, gap in measured if gap not in ("", "-")]
    return f"- {words.cut(one_line(name), _MOST_TITLE)}: {', '.join([differing, *gaps])}"
