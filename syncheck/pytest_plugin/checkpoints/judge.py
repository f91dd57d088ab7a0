"""Comparisons of checkpoints and the outcomes of their tests. A test without a comparison never passes.

Checkpoints are compared when the first test item needs them. Paths are relative to the start folder.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from syncheck import api
from syncheck.errors import CheckpointError
from syncheck.messages import Hint
from syncheck.report import failure, words
from syncheck.report.items import ALONE, headline, item_of, judge_item
from syncheck.text import names_text, shorten

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.pytest_plugin.checkpoints.plan import Planned
    from syncheck.records import Group, Report, Unreadable

_MOST = 2000  # characters of a sentence, because findings quote names from the files


class Judge:
    """Compares checkpoints on demand and caches the results.

    whole: compare all checkpoints at once, because the whole report is needed. Otherwise each run is compared
    separately, because a worker of pytest-xdist may run the items of some runs only.
    histograms: compute histograms for an HTML page. accepting: accept all findings, because they become the baseline.
    """

    def __init__(
        self,
        found: api.Found,
        options: api.Options,
        start: Path,
        *,
        whole: bool,
        histograms: bool = False,
        accepting: bool = False,
    ) -> None:
        self.found = found
        self._accepting = accepting
        self._histograms = histograms
        self.options = options
        self.start = start
        self._whole = whole
        self._report: Report | CheckpointError | None = None
        self._runs: dict[str, Report | CheckpointError] = {}
        self._numbers: dict[str, list[int]] = {}
        for number, replicas in enumerate(found.groups):
            self._numbers.setdefault(replicas.run, []).append(number)

    def report(self) -> Report:
        """Return the report on all groups. Raises CheckpointError if no file of a group is readable any more."""
        if self._report is None:
            self._report = self._compare(self.found)
        return _raise_error(self._report)

    def group(self, number: int) -> tuple[Group, list[Unreadable]]:
        """Return a compared group, and the list of its files with read errors since the start.

        Raises CheckpointError if no file of its run is readable any more.
        """
        replicas = self.found.groups[number]
        report, index = self._report_with(number)
        paths = {snapshot.path for _, snapshot in replicas.ranks}
        return report.groups[index], [file for file in report.unreadable if file.path in paths]

    def _report_with(self, number: int) -> tuple[Report, int]:
        """Return a report with a group, and the index of the group in this report."""
        if self._whole or self._report is not None:
            with contextlib.suppress(CheckpointError):
                return self.report(), number
        # The steps of a run are compared together, because some findings need all steps.
        run = self.found.groups[number].run
        numbers = self._numbers[run]
        if run not in self._runs:
            part = replace(self.found, groups=tuple(self.found.groups[i] for i in numbers), unreadable=())
            self._runs[run] = self._compare(part)
        return _raise_error(self._runs[run]), numbers.index(number)

    def _compare(self, found: api.Found) -> Report | CheckpointError:
        with contextlib.chdir(self.start):
            try:
                report = api.judge(found, self.options, histograms=self._histograms)
                return api.finish(report, self.options, accept_all=self._accepting)
            except CheckpointError as error:
                return error


def _raise_error(result: Report | CheckpointError) -> Report:
    if isinstance(result, CheckpointError):
        raise result
    return result


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of an item. headline: its line in pytest's short summary. body: the text of a failure or skip.

    properties: for JUnit and for the summary; strings only, because workers send them to another process.
    """

    status: Literal["passed", "failed", "skipped"]
    headline: str = ""
    body: str = ""
    properties: tuple[tuple[str, str], ...] = ()


def judge_planned(planned: Planned, judge: Judge) -> Outcome:
    """Judge one item, and compare its run if necessary."""
    if planned.unreadable is not None:
        reason = f"could not tell: {planned.unreadable.path}: {planned.unreadable.reason}"
        return _failed(reason)
    assert planned.group is not None
    if planned.item == ALONE:
        return _judge_alone(planned, judge)
    try:
        group, lost = judge.group(planned.group)
    except CheckpointError as error:
        return _failed(f"could not tell: {error}")
    if lost:
        files = "; ".join(f"{file.path}: {file.reason}" for file in lost)
        reason = f"could not tell: unreadable since the run began: {files}"
        return _failed(reason)
    part, reason = judge_item(group, planned.item, planned.siblings)
    properties = _properties(group, planned, part)
    if part.verdict == "out_of_sync":
        body = failure.group_text(part, Hint.ALL_ROWS_IN_HTML)
        return _failed(headline([finding for finding in part.findings if finding.fails]), properties, body)
    if not reason:
        return Outcome("passed", properties=properties)
    if group.verdict == "undecided":
        return _failed(f"could not tell: {reason}", properties)
    return Outcome("skipped", shorten(reason, _MOST), shorten(reason, _MOST), properties)


def _judge_alone(planned: Planned, judge: Judge) -> Outcome:
    assert planned.group is not None
    replicas = judge.found.groups[planned.group]
    path = replicas.ranks[0][1].path
    headline = f"could not tell: no replica to compare with: {path}"
    links = [alias.path for alias in judge.found.aliases if alias.of == path]
    grouping = "; ".join(map(str, replicas.grouping))
    grouping += f"; links to this file: {names_text(links)}" if links else ""
    advice = str(Hint.GROUP_FILES())
    return _failed(headline, body=f"{headline}\n{shorten(grouping, _MOST)}\n{advice}")


def _failed(
    headline: str, properties: tuple[tuple[str, str], ...] = (("syncheck_verdict", "undecided"),), body: str = ""
) -> Outcome:
    headline = shorten(headline, _MOST)
    return Outcome("failed", headline, body or headline, properties)


def _properties(group: Group, planned: Planned, part: Group) -> tuple[tuple[str, str], ...]:
    """Return the properties of an item. part: the compared part of the group."""
    properties = {"verdict": part.verdict, "replicas": str(len(group.replicas))}
    if group.fixed:
        properties["fixed"] = shorten("; ".join(words.fixed_lines([group])), 1000)
    fact = words.describe_not_finite(group)
    notes = [*group.notes] if fact is None else [fact, *group.notes]
    if notes:
        properties["notes"] = shorten("; ".join(map(str, notes)), 500)
    properties |= _unjudged(group, planned)
    for name, findings in (
        ("findings", part.findings),
        ("allowed", [finding for finding in part.findings if finding.allowed]),
        ("accepted", [finding for finding in part.findings if finding.accepted]),
    ):
        if findings:
            properties[name] = ",".join(dict.fromkeys(finding.code for finding in findings))
    for name in ("tensors", "identical", "equal", "close", "different", "not_compared"):
        properties[name] = str(getattr(part.counts, name))
    measured = [diff for diff in words.sort_worst_first(part.tensors) if diff.max_abs is not None]
    if measured:
        properties["max_abs"] = f"{measured[0].max_abs:.6g}"
        properties["worst"] = shorten(measured[0].name, _MOST)
    return tuple((f"syncheck_{name}", value) for name, value in properties.items())


def _unjudged(group: Group, planned: Planned) -> dict[str, str]:
    """Return the properties about tensors and values that belong to no item."""
    kinds = {kind: counts for kind, counts in group.kinds.items() if item_of(kind) not in planned.siblings}
    parts = [f"{kind} {c.not_compared}/{c.tensors} not compared" for kind, c in kinds.items() if c.not_compared]
    if group.left_out:
        parts.append(f"{group.left_out} tensors excluded by options")
    values = words.values_text([value for value in group.values if not value.counts])
    properties = {"not_judged": "; ".join(parts), "values_that_differ": shorten(values, 500)}
    return {name: value for name, value in properties.items() if value}
