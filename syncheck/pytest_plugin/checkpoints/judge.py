"""Comparisons of checkpoints, made when the first test item needs them. Paths are relative to the start folder."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck import api, baseline
from syncheck.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Group, Report, Unreadable


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
                return baseline.apply_baseline(report, baseline.find_failing(report)) if self._accepting else report
            except CheckpointError as error:
                return error


def _raise_error(result: Report | CheckpointError) -> Report:
    if isinstance(result, CheckpointError):
        raise result
    return result
