"""Comparing what was found, once in a process, and not before a test item asks for it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck import api, baseline
from syncheck.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from syncheck.records import Group, Report, Unreadable


@contextlib.contextmanager
def folder(start: Path) -> Iterator[None]:
    """Be in a folder for a while: paths are relative to where pytest was started, and tests may have moved."""
    try:
        before = os.getcwd()
    except OSError:  # a test moved into a folder that is gone
        before = None
    if before == str(start):
        yield
        return
    os.chdir(start)
    try:
        yield
    finally:
        if before is not None:
            os.chdir(before)


class Judge:
    """Compares the checkpoints when it is asked, and keeps the answers.

    whole: compare all at once, because the whole report will be needed; else run by run, so that processes that run
    some of the items compare only what these need. width: columns of the terminal on which failures are shown.
    histograms: gather those of what differs most, for a page. accepting: whether every finding is accepted, for the
    baseline is to have what is found.
    """

    def __init__(
        self,
        found: api.GroupedCheckpoints,
        options: api.Options,
        start: Path,
        *,
        whole: bool,
        width: int,
        histograms: bool = False,
        accepting: bool = False,
    ) -> None:
        self.found = found
        self._accepting = accepting
        self._histograms = histograms
        self.options = options
        self.width = width
        self._start = start
        self._whole = whole
        self._report: Report | CheckpointError | None = None
        self._runs: dict[str, Report | CheckpointError] = {}
        self._numbers: dict[str, list[int]] = {}
        for number, replicas in enumerate(found.groups):
            self._numbers.setdefault(replicas.run, []).append(number)

    def report(self) -> Report:
        """Return the report on everything. Raises CheckpointError where no file of a group can be read any more."""
        if self._report is None:
            self._report = self._judged(self.found)
        return _or_raise(self._report)

    def group(self, number: int) -> tuple[Group, list[Unreadable]]:
        """Return one of the groups found, compared, and those of its files that broke since they were opened.

        Raises CheckpointError where no file of its run can be read any more.
        """
        found = self.found.groups[number]
        report, at = self._holding(number)
        paths = {snapshot.path for _, snapshot in found.ranks}
        return report.groups[at], [file for file in report.unreadable if file.path in paths]

    def here(self) -> contextlib.AbstractContextManager[None]:
        """Be in the folder in which pytest was started."""
        return folder(self._start)

    def _holding(self, number: int) -> tuple[Report, int]:
        """Return a report that holds a group, and where it stands in it."""
        if self._whole or self._report is not None:
            with contextlib.suppress(CheckpointError):
                return self.report(), number
        # Steps of one run are judged together: some findings need all of them.
        run = self.found.groups[number].run
        numbers = self._numbers[run]
        if run not in self._runs:
            part = replace(self.found, groups=tuple(self.found.groups[i] for i in numbers), unreadable=())
            self._runs[run] = self._judged(part)
        return _or_raise(self._runs[run]), numbers.index(number)

    def _judged(self, found: api.GroupedCheckpoints) -> Report | CheckpointError:
        with folder(self._start):
            try:
                report = api.judge(found, self.options, histograms=self._histograms)
                return baseline.accept_known(report, baseline.list_failing(report)) if self._accepting else report
            except CheckpointError as error:
                return error


def _or_raise(kept: Report | CheckpointError) -> Report:
    if isinstance(kept, CheckpointError):
        raise kept
    return kept
