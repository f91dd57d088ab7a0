"""What came back from the ranks of one test."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

# Bytes of a stream that are shown; the middle of more is left out.
MOST_OUTPUT = 100_000


@dataclass
class Result:
    """One rank's. Times are seconds of time.monotonic."""

    rank: int
    folder: Path
    reused: bool = False
    """Whether the process ran a test before, and so has imported this one."""
    joining: bool = False
    """Whether the rank began to join the process group, the last thing before the test."""
    ready: float | None = None
    """When its process group was ready, None before. The test begins when all are."""
    reports: list[pytest.TestReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What went wrong outside the test: an import that failed, no process group, `pytest.exit`."""
    warnings: list[dict[str, Any]] = field(default_factory=list)
    failed_at: float | None = None
    left_early_at: float | None = None
    """When it failed, skipped or failed as expected: the others may be waiting for it."""
    done: bool = False
    left_with: int | None = None
    """Exit code, or minus a signal, of a process that ended by itself in the middle of the test."""
    cut_off: bool = False
    """Whether the process lost its connection to pytest, which then ended it."""
    reusable: bool = False

    def add(self, report: pytest.TestReport) -> None:
        """Take in the report on a phase of the test."""
        self.reports.append(report)
        if report.outcome == "failed" and not is_strict_xpass(report):
            self.fail()
        elif report.outcome == "skipped" and is_whole(report) and self.left_early_at is None:
            self.left_early_at = time.monotonic()

    def fail(self) -> None:
        """Note that it failed, now if it had not before."""
        if self.failed_at is None:
            self.failed_at = time.monotonic()
        if self.left_early_at is None:
            self.left_early_at = self.failed_at

    @property
    def over(self) -> bool:
        """Whether nothing more will come from it."""
        return self.done or self.left_with is not None

    @property
    def failed(self) -> bool:
        """Whether the rank failed by itself; one that was only ended with the others did not."""
        return self.failed_at is not None

    @property
    def clean(self) -> bool:
        """Whether the rank finished the test without a failure."""
        return self.done and not self.failed

    def output(self, stream: str) -> str:
        """Return what it wrote to `stdout`, `stderr` or, when it was asked for them, `stacks`; bounded."""
        half = MOST_OUTPUT // 2
        try:
            with (self.folder / stream).open("rb") as file:
                left_out = file.seek(0, os.SEEK_END) - MOST_OUTPUT
                file.seek(0)
                data = file.read(MOST_OUTPUT if left_out <= 0 else half)
                if left_out > 0:
                    file.seek(-half, os.SEEK_END)
                    data += f"\n... {left_out} bytes left out ...\n".encode() + file.read(half)
        except OSError:
            return ""
        return data.decode(errors="replace")

    def fate(self) -> str:
        """Say how the process ended."""
        assert self.left_with is not None
        when = "in the middle of the test" if self.ready is not None else "before the test began"
        if self.cut_off:
            return f"its process lost its connection to pytest {when}: was a file descriptor closed by its number?"
        if self.left_with >= 0:
            return f"its process left with exit code {self.left_with} {when}"
        try:
            name = signal.Signals(-self.left_with).name
        except ValueError:
            name = f"signal {-self.left_with}"
        hint = " (if you did not send it, the machine may have run out of memory)" if name == "SIGKILL" else ""
        return f"its process was ended by {name} {when}{hint}"


def failed_start(results: Sequence[Result]) -> str:
    """Return why the ranks could not be started; "" if they could, or if code of the test may have failed."""
    failed = [result for result in results if result.failed]
    at_start = all(r.joining or (r.reused and not r.problems) for r in failed) and any(r.ready is None for r in results)
    reasons = (f"rank {r.rank}: {r.problems[0].strip() if r.problems else r.fate()}" for r in failed)
    return "; ".join(reasons) if at_start else ""


def is_whole(report: pytest.TestReport) -> bool:
    """Whether a report is on a phase of the test itself, and not on a subtest."""
    return type(report).__name__ == "TestReport"


def is_strict_xpass(report: pytest.TestReport) -> bool:
    """Whether all that failed is that a test passed which is marked xfail(strict=True)."""
    return report.outcome == "failed" and str(report.longrepr).startswith("[XPASS(strict)]")
