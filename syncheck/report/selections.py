"""Selections that several formats show: failing findings, groups, the first entries of a long list.

`diagnose.selection` selects tensors and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from syncheck.diagnose.series import shown_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from syncheck.records import Finding, Group, Report

Item = TypeVar("Item")
# The most severe first.
SEVERITIES = ("error", "warning", "info")
_WITHOUT_DETAILS = ("in_sync", "alone")


def find_failing(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that make a run out of sync."""
    return [finding for finding in findings if finding.fails]


def list_codes(findings: Iterable[Finding]) -> list[str]:
    """Return the codes of findings."""
    return [finding.code for finding in findings]


def find_groups(groups: Iterable[Group], verdict: str) -> list[Group]:
    """Return the groups with a verdict."""
    return [group for group in groups if group.verdict == verdict]


def split_groups(groups: Sequence[Group], *, verbose: bool) -> tuple[list[Group], list[Group]]:
    """Return the groups with details in a text, and the other groups, whose verdicts need no details."""
    if verbose or len(groups) < 2:
        return list(groups), []
    detailed = [group for group in groups if group.verdict not in _WITHOUT_DETAILS]
    other_groups = [group for group in groups if group.verdict in _WITHOUT_DETAILS]
    return detailed, other_groups


def list_first_paths(groups: Iterable[Group]) -> list[str]:
    """Return the path of the first replica of each group."""
    return [group.replicas[0].path for group in groups]


def join_runs(runs: Mapping[str, Sequence[Group]]) -> list[Group]:
    """Return the groups of all runs."""
    groups: list[Group] = []
    for steps in runs.values():
        groups += steps
    return groups


def join_shown_steps(runs: Mapping[str, Sequence[Group]]) -> list[Group]:
    """Return the last step of each run, and its earlier steps with news (see `series.shown_steps`)."""
    groups: list[Group] = []
    for steps in runs.values():
        groups += shown_steps(steps)
    return groups


def count_excluded(report: Report) -> int:
    """Return the number of tensors that options exclude."""
    return sum(group.left_out for group in report.groups)


def write_first(
    items: Sequence[Item], most: int, write: Callable[[Item], str] = str, ending: str = "and {} more"
) -> list[str]:
    """Return the texts of the first items, and a text with the number of further items.

    most: number of texts before the ending.
    write: returns the text of an item. Further items are not written, because there may be thousands.
    """
    texts = [write(item) for item in items[:most]]
    if len(items) > most:
        texts.append(ending.format(len(items) - most))
    return texts
