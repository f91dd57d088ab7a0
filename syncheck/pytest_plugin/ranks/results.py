"""Results of the ranks of one test."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from syncheck.pytest_plugin.ranks.process import LOST_CONNECTION

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import BinaryIO

    import pytest

# Bytes shown of a stream. The middle of longer streams is omitted.
MOST_OUTPUT = 100_000


@dataclass
class Result:
    """Result of one rank. Times are seconds of time.monotonic."""

    rank: int
    folder: Path
    reused: bool = False
    """Whether the process has run a test before."""
    joining: bool = False
    """Whether the rank has started to join the process group, the last step before the test."""
    ready: float | None = None
    """When its process group was ready. The test starts when all ranks are ready."""
    reports: list[pytest.TestReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Errors outside the test: a failed import, no process group, `pytest.exit`."""
    warnings: list[dict[str, Any]] = field(default_factory=list)
    failed_at: float | None = None
    left_early_at: float | None = None
    """When it failed, was skipped or failed as expected. Other ranks may wait for it from then on."""
    done: bool = False
    left_with: int | None = None
    """Exit code, or negative signal number, if the process ended during the test."""
    reusable: bool = False

    def add(self, report: pytest.TestReport) -> None:
        """Add the report of a phase of the test."""
        self.reports.append(report)
        if report.outcome == "failed" and not is_strict_xpass(report):
            self.fail()
        elif report.outcome == "skipped" and is_main_report(report):
            self._leave_early()

    def fail(self) -> None:
        """Record the time of the first failure."""
        if self.failed_at is None:
            self.failed_at = time.monotonic()

        self._leave_early()

    def _leave_early(self) -> None:
        """Record when the rank left the test before its end."""
        if self.left_early_at is None:
            self.left_early_at = time.monotonic()

    @property
    def sections(self) -> list[tuple[str, str]]:
        """The titles and texts that pytest captured. The last report includes the sections of all earlier reports."""
        return self.reports[-1].sections if self.reports else []

    @property
    def over(self) -> bool:
        """Whether no more messages will follow."""
        return self.done or self.left_with is not None

    @property
    def failed(self) -> bool:
        """Whether the rank failed itself, and was not killed because another rank failed."""
        return self.failed_at is not None

    @property
    def clean(self) -> bool:
        """Whether the rank finished the test without a failure."""
        return self.done and not self.failed

    @property
    def stuck(self) -> bool:
        """Whether the rank neither finished the test nor failed."""
        return not self.over and not self.failed

    def output(self, stream: str) -> str:
        """Return at most MOST_OUTPUT bytes of `stdout`, `stderr` or `stacks`."""
        try:
            with (self.folder / stream).open("rb") as file:
                data = _read_ends(file)
        except OSError:
            return ""

        return data.decode(errors="replace")

    def describe_exit(self) -> str:
        """Return how the process ended."""
        assert self.left_with is not None
        when = "before the test started" if self.ready is None else "during the test"
        if self.left_with == LOST_CONNECTION:
            return f"its process lost the connection to pytest {when}; check for code closing file descriptors"

        if self.left_with >= 0:
            return f"its process exited with code {self.left_with} {when}"

        name = _name_signal(-self.left_with)
        hint = " (unless you sent it, the machine may have run out of memory)" if name == "SIGKILL" else ""
        return f"its process was killed by {name} {when}{hint}"

    @property
    def was_importing(self) -> bool:
        """Whether the process may have failed in the import of the test module, before it joined the process group."""
        # A process that has run a test has imported the module, unless it reports a problem.
        may_import = len(self.problems) > 0 or not self.reused
        return may_import and not self.joining

    def describe_failed_start(self) -> str:
        """Return why the rank did not start."""
        reason = self.problems[0].strip() if self.problems else self.describe_exit()
        return f"rank {self.rank}: {reason}"


def _read_ends(file: BinaryIO) -> bytes:
    """Return the bytes of a file; of a long file, the beginning and the end."""
    half = MOST_OUTPUT // 2
    omitted = file.seek(0, os.SEEK_END) - MOST_OUTPUT
    file.seek(0)
    if omitted <= 0:
        return file.read(MOST_OUTPUT)

    beginning = file.read(half)
    file.seek(-half, os.SEEK_END)
    return beginning + f"\n... {omitted} bytes omitted ...\n".encode() + file.read(half)


def _name_signal(number: int) -> str:
    """Return the name of a signal; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def failed_start(results: Sequence[Result]) -> str:
    """Return why the ranks did not start; "" if they did, or if code of the test may have failed."""
    have_started = all(result.ready is not None for result in results)
    failed = [result for result in results if result.failed]
    if have_started or any(result.was_importing for result in failed):
        return ""

    return "; ".join([result.describe_failed_start() for result in failed])


def is_main_report(report: pytest.TestReport) -> bool:
    """Whether a report is about a phase of the test itself, not about a subtest."""
    return type(report).__name__ == "TestReport"


def is_strict_xpass(report: pytest.TestReport) -> bool:
    """Whether a test marked xfail(strict=True) passed unexpectedly."""
    return report.outcome == "failed" and str(report.longrepr).startswith("[XPASS(strict)]")
