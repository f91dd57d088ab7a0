"""Comparisons of checkpoints and the outcomes of their tests. A test without a comparison never passes.

Checkpoints are compared when the first test item needs them. Paths are relative to the start folder.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from syncheck import api
from syncheck.errors import CheckpointError
from syncheck.frozen import record
from syncheck.messages import Hint
from syncheck.report import failure, tables, words
from syncheck.report.items import ALONE, headline, item_of, judge_item
from syncheck.text import names_text, shorten

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.pytest_plugin.checkpoints.plan import Planned
    from syncheck.records import Group, Report, Unreadable

# Characters of a sentence, because findings quote names from the files.
_MOST = 2000


class Judge:
    """Compares checkpoints on demand and caches the results.

    at_once: compare all checkpoints at once, because the whole report is needed. Otherwise each run is compared
    separately, because a worker of pytest-xdist may run the items of some runs only.
    histograms: compute histograms for an HTML page. accepting: accept all findings, because they become the baseline.
    """

    def __init__(
        self,
        checkpoints: api.Found,
        options: api.Options,
        start: Path,
        *,
        at_once: bool,
        histograms: bool = False,
        accepting: bool = False,
    ) -> None:
        self.checkpoints = checkpoints
        self._accepting = accepting
        self._histograms = histograms
        self.options = options
        self.start = start
        self._at_once = at_once
        self._report: Report | CheckpointError | None = None
        self._runs: dict[str, Report | CheckpointError] = {}
        self._numbers: dict[str, list[int]] = {}
        for number, replicas in enumerate(checkpoints.groups):
            self._numbers.setdefault(replicas.run, []).append(number)

    def report(self) -> Report:
        """Return the report on all groups. Raises CheckpointError if no file of a group is readable any more."""
        if self._report is None:
            self._report = self._compare(self.checkpoints)
        return _raise_error(self._report)

    def group(self, number: int) -> tuple[Group, list[Unreadable]]:
        """Return a compared group, and the list of its files with read errors since the start.

        Raises CheckpointError if no file of its run is readable any more.
        """
        replicas = self.checkpoints.groups[number]
        report, index = self._report_with(number)
        paths = {snapshot.path for _, snapshot in replicas.ranks}
        return report.groups[index], [file for file in report.unreadable if file.path in paths]

    def _report_with(self, number: int) -> tuple[Report, int]:
        """Return a report with a group, and the index of the group in this report."""
        if self._at_once or self._report is not None:
            with contextlib.suppress(CheckpointError):
                return self.report(), number

        # The steps of a run are compared together, because some findings need all steps.
        run = self.checkpoints.groups[number].run
        numbers = self._numbers[run]
        if run not in self._runs:
            groups = tuple(self.checkpoints.groups[i] for i in numbers)
            self._runs[run] = self._compare(replace(self.checkpoints, groups=groups, unreadable=()))

        return _raise_error(self._runs[run]), numbers.index(number)

    def _compare(self, checkpoints: api.Found) -> Report | CheckpointError:
        with contextlib.chdir(self.start):
            try:
                report = api.judge(checkpoints, self.options, histograms=self._histograms)
                return api.finish(report, self.options, accept_all=self._accepting)
            except CheckpointError as error:
                return error


def _raise_error(result: Report | CheckpointError) -> Report:
    if isinstance(result, CheckpointError):
        raise result
    return result


@record
class Outcome:
    """Outcome of an item.

    headline: its line in pytest's short summary.
    body: the text of a failure or skip.
    properties: for JUnit and for the summary; strings only, because workers send them to another process.
    """

    status: Literal["passed", "failed", "skipped"]
    headline: str = ""
    body: str = ""
    properties: tuple[tuple[str, str], ...] = ()


def judge_planned(planned: Planned, judge: Judge) -> Outcome:
    """Judge one item, and compare its run if necessary."""
    if planned.unreadable is not None:
        return _failed(f"could not tell: {planned.unreadable.path}: {planned.unreadable.reason}")

    if planned.item == ALONE:
        return _judge_alone(planned, judge)

    assert planned.group is not None
    try:
        group, broken_files = judge.group(planned.group)
    except CheckpointError as error:
        return _failed(f"could not tell: {error}")

    if broken_files:
        files = "; ".join([f"{file.path}: {file.reason}" for file in broken_files])
        return _failed(f"could not tell: unreadable since the run began: {files}")

    return _judge_group(group, planned)


def _judge_group(group: Group, planned: Planned) -> Outcome:
    """Judge one item of a compared group."""
    part, reason = judge_item(group, planned.item, planned.siblings)
    properties = _properties(group, planned, part)
    if part.verdict == "out_of_sync":
        failing = [finding for finding in part.findings if finding.fails]
        return _failed(headline(failing), properties, failure.group_text(part, Hint.ALL_ROWS_IN_HTML))

    if not reason:
        return Outcome("passed", properties=properties)

    if group.verdict == "undecided":
        return _failed(f"could not tell: {reason}", properties)

    text = shorten(reason, _MOST)
    return Outcome("skipped", headline=text, body=text, properties=properties)


def _judge_alone(planned: Planned, judge: Judge) -> Outcome:
    """Return the outcome for a file without a replica."""
    assert planned.group is not None
    replicas = judge.checkpoints.groups[planned.group]
    path = replicas.ranks[0][1].path
    headline = f"could not tell: no replica to compare with: {path}"
    grouping = "; ".join([str(sentence) for sentence in replicas.grouping])
    links = [alias.path for alias in judge.checkpoints.aliases if alias.of == path]
    if links:
        grouping += f"; links to this file: {names_text(links)}"

    advice = str(Hint.GROUP_FILES())
    return _failed(headline, body=f"{headline}\n{shorten(grouping, _MOST)}\n{advice}")


def _failed(
    headline: str, properties: tuple[tuple[str, str], ...] = (("syncheck_verdict", "undecided"),), body: str = ""
) -> Outcome:
    headline = shorten(headline, _MOST)
    return Outcome(
        "failed",
        headline=headline,
        body=body or headline,
        properties=properties,
    )


def _properties(group: Group, planned: Planned, part: Group) -> tuple[tuple[str, str], ...]:
    """Return the properties of an item. part: the compared part of the group."""
    properties = {"verdict": part.verdict, "replicas": str(len(group.replicas))}
    if group.fixed:
        properties["fixed"] = shorten("; ".join(words.fixed_lines([group])), 1000)

    notes = [str(note) for note in group.notes]
    not_finite = words.describe_not_finite(group)
    if not_finite is not None:
        notes.insert(0, str(not_finite))

    if notes:
        properties["notes"] = shorten("; ".join(notes), 500)

    properties |= _unjudged(group, planned)
    properties |= _list_codes(part)
    for name in ("tensors", "identical", "equal", "close", "different", "not_compared"):
        properties[name] = str(getattr(part.counts, name))

    # Tensors of other dtypes or shapes differ without a measured difference.
    measured = [diff for diff in tables.sort_worst_first(part.tensors) if diff.max_abs is not None]
    if measured:
        properties["max_abs"] = f"{measured[0].max_abs:.6g}"
        properties["worst"] = shorten(measured[0].name, _MOST)

    return tuple((f"syncheck_{name}", value) for name, value in properties.items())


def _list_codes(part: Group) -> dict[str, str]:
    """Return the properties with codes: of all findings, and of those that do not fail."""
    # The keys of a dict are an ordered set.
    codes: dict[str, dict[str, None]] = defaultdict(dict)
    for finding in part.findings:
        codes["findings"][finding.code] = None
        for label in ("allowed", "accepted"):
            if getattr(finding, label):
                codes[label][finding.code] = None

    return {name: ",".join(codes_of_name) for name, codes_of_name in codes.items()}


def _unjudged(group: Group, planned: Planned) -> dict[str, str]:
    """Return the properties about tensors and values that belong to no item."""
    parts = []
    for kind, counts in group.kinds.items():
        if counts.not_compared and item_of(kind) not in planned.siblings:
            parts.append(f"{kind} {counts.not_compared}/{counts.tensors} not compared")

    if group.left_out:
        parts.append(f"{group.left_out} tensors excluded by options")

    properties = {}
    if parts:
        properties["not_judged"] = "; ".join(parts)

    values = tables.values_text([value for value in group.values if not value.counts])
    if values:
        properties["values_that_differ"] = shorten(values, 500)

    return properties
