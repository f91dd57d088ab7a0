"""Comparisons of checkpoints, made when the first test item needs them, and updates of the baseline."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from syncheck import api, baseline
from syncheck.errors import CheckpointError, OptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from syncheck.api import Options
    from syncheck.baseline import Known
    from syncheck.pytest_plugin.checkpoints.arguments import Selection
    from syncheck.pytest_plugin.checkpoints.plan import Planned
    from syncheck.records import Group, Report, Unreadable


@contextlib.contextmanager
def working_folder(start: Path) -> Iterator[None]:
    """Change the working folder: paths are relative to the folder in which pytest was started; tests may change it."""
    try:
        before = os.getcwd()
    except OSError:  # the working folder was deleted
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
    """Compares checkpoints on demand and caches the results.

    whole: compare all checkpoints at once, because the whole report is needed. Otherwise each run is compared
    separately, because a worker of pytest-xdist may run the items of some runs only.
    width: columns of the terminal. histograms: compute histograms for an HTML page.
    accepting: accept all findings, because they become the baseline.
    """

    def __init__(
        self,
        found: api.Found,
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

    def start_folder(self) -> contextlib.AbstractContextManager[None]:
        """Change to the folder in which pytest was started."""
        return working_folder(self._start)

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
        with working_folder(self._start):
            try:
                report = api.judge(found, self.options, histograms=self._histograms)
                return baseline.apply_baseline(report, baseline.find_failing(report)) if self._accepting else report
            except CheckpointError as error:
                return error


def _raise_error(result: Report | CheckpointError) -> Report:
    if isinstance(result, CheckpointError):
        raise result
    return result


@dataclass(frozen=True, slots=True)
class Update:
    """An update of the baseline at the end of a run (--syncheck-update-baseline). known: its previous content."""

    path: str
    known: Known

    def write(self, judge: Judge, not_run: Sequence[Planned]) -> str:
        """Write the baseline and return a description of the change. not_run: tests whose findings are unknown.

        Raises SyncheckError if the baseline is not written.
        """
        if not_run:
            raise UsageError(
                f"the baseline was not updated, because {len(not_run)} tests of checkpoints did not run, for example "
                f"{not_run[0].nodeid}"
            )
        updated = baseline.update_baseline(judge.report(), self.known)
        with judge.start_folder():
            baseline.write(self.path, updated)
        return f"{self.path}: {baseline.describe_change(self.known, updated)}"


def start_update(options: Options, selection: Selection) -> tuple[Options, Update]:
    """Return the options without the baseline, and the update of the baseline.

    Must be called in the folder in which pytest was started. Raises UsageError if the update is impossible.
    """
    if options.baseline is None:
        raise OptionError(
            "requires {baseline} FILE, or baseline in the table tool.syncheck", "baseline", update_baseline=True
        )
    if selection.ids:
        raise OptionError(f"requires the tests of all checkpoints: remove {selection.ids[0]}", update_baseline=True)
    return replace(options, baseline=None), Update(options.baseline, baseline.read_for_update(options.baseline))
