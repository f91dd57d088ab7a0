"""The processes of the ranks, reused unless a test ended differently on the ranks or had side effects."""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from syncheck.pytest_plugin.ranks.process import Guard, RankProcess, wait_for_stacks
from syncheck.pytest_plugin.texts import PytestText

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import pytest

    from syncheck.pytest_plugin.ranks.results import Result

# Seconds until Python, pytest and torch are imported and the process group is ready. Not part of the test's time limit.
STARTUP = 120.0
# Seconds for the other ranks to end after a rank failed. Most wait for the failed rank in a collective.
GRACE = 2.0
# Seconds for the teardown of fixtures on a failed rank.
TEARDOWN = 20.0
# Seconds for leaving a process group after a test has passed.
RELEASE = 10.0
# Seconds between two checks of the processes.
TICK = 0.05


class Pool:
    """Processes by rank; a test on n ranks uses the first n.

    folder: their working folder.
    load_report: deserializes a report of pytest.
    """

    def __init__(self, folder: Path, load_report: Callable[[Any], pytest.TestReport]) -> None:
        self._folder = folder
        self._load_report = load_report
        self._recorders = {**_RECORDERS, "report": self._add_report}
        self._processes: list[RankProcess | None] = []
        self._guard: Guard | None = None

    def run(
        self, tasks: Sequence[dict[str, Any]], results: Sequence[Result], limit: float, tail: Callable[[], None]
    ) -> str:
        """Run one test on as many ranks as there are tasks, and wait for all ranks.

        results: one per rank, filled in by this method.
        limit: the time limit in seconds.
        tail: called regularly.

        Returns the message about an exceeded time limit, or "". On any exception (Ctrl-C, pytest-timeout) the
        processes are killed.
        """
        running: list[RankProcess] = []
        try:
            running = self._start(results)
            for process, task in zip(running, tasks, strict=True):
                process.send({"run": task})

            time_limit = self._wait(running, results, limit, tail)
            _collect_stacks(running, results)
        except BaseException as error:
            # Ctrl-C ends the run at once.
            if not isinstance(error, KeyboardInterrupt):
                _collect_stacks(running, results)
            self._kill(len(tasks))
            raise

        if not _may_reuse(results):
            self._kill(len(tasks))
            return time_limit

        # After all ranks have ended, because leaving a process group may break it for other ranks.
        for process in running:
            process.send({"release": True})

        return time_limit

    def close(self) -> None:
        """Kill all processes."""
        self._kill(len(self._processes))
        if self._guard is not None:
            self._guard.close()

    def _start(self, results: Sequence[Result]) -> list[RankProcess]:
        """Return one process per result, reused or new."""
        running = []
        self._processes += [None] * (len(results) - len(self._processes))
        for number, result in enumerate(results):
            process = self._find_idle(number)
            result.reused = process is not None
            if process is None:
                process = self._start_process(result.folder)

            self._processes[number] = process
            running.append(process)

        return running

    def _find_idle(self, number: int) -> RankProcess | None:
        """Return the process of a rank if it is ready for a test; a process that is not is killed."""
        process = self._processes[number]
        if process is None or process.wait_until_idle(RELEASE):
            return process

        process.kill()
        return None

    def _start_process(self, folder: Path) -> RankProcess:
        """Start a process. folder: for its output before the first task."""
        if self._guard is None:
            self._guard = Guard()

        return RankProcess(
            self._folder,
            out=folder / "stdout",
            err=folder / "stderr",
            watched_by=self._guard,
        )

    def _wait(
        self, running: Sequence[RankProcess], results: Sequence[Result], limit: float, tail: Callable[[], None]
    ) -> str:
        """Receive messages until all ranks are done, the grace period after a failure is over, or time is up."""
        started = time.monotonic()
        has_begun = False
        while not all(result.over for result in results):
            self._receive_all(running, results)
            tail()
            now = time.monotonic()
            if _has_grace_passed(results, now):
                break

            ready = [result.ready for result in results if result.ready is not None]
            if len(ready) < len(results):
                if now > started + STARTUP:
                    return f"the ranks' process groups were not ready in {STARTUP:g} s"
            elif has_begun:
                if now > max(ready) + limit:
                    return str(PytestText.TIME_LIMIT(seconds=limit))
            # No rank may run the test alone.
            elif all(result.left_early_at is None for result in results):
                has_begun = True
                for process in running:
                    process.send({"begin": True})

        return ""

    def _receive_all(self, running: Sequence[RankProcess], results: Sequence[Result]) -> None:
        """Wait for the next messages, but not longer than TICK, and record which ranks have ended."""
        by_socket = {}
        for process, result in zip(running, results, strict=True):
            if not result.over:
                by_socket[process.socket] = process, result

        for connection in wait(list(by_socket), timeout=TICK):
            self._receive(*by_socket[connection])  # type: ignore[index]

        # A grandchild may keep the connection open after the rank has ended.
        for process, result in by_socket.values():
            if process.ended() and not result.over:
                self._receive(process, result)
                self._record_exit(process, result)

    def _receive(self, process: RankProcess, result: Result) -> None:
        """Read the messages of a rank. Without a connection, the rank has ended."""
        messages = process.receive()
        if messages is None:
            self._record_exit(process, result)
            return
        for message in messages:
            self._apply_message(message, result)

    def _apply_message(self, message: dict[str, Any], result: Result) -> None:
        """Add a message to the result of its rank."""
        for kind, content in message.items():
            record = self._recorders.get(kind, _ignore)
            record(result, content)

    def _add_report(self, result: Result, data: Any) -> None:
        result.add(self._load_report(data))

    def _record_exit(self, process: RankProcess, result: Result) -> None:
        """Record the exit code of a rank that has ended during the test."""
        if not result.over:
            result.left_with = process.kill_disconnected()
            result.fail()

    def _kill(self, number: int) -> None:
        """Kill the processes of the first ranks. number: of ranks."""
        for rank, process in enumerate(self._processes[:number]):
            if process is not None:
                process.kill()
                self._processes[rank] = None


def _ignore(_result: Result, _content: Any) -> None:
    """Ignore a message of another kind, which only code of the test can send."""


def _record_joining(result: Result, _content: Any) -> None:
    result.joining = True


def _record_ready(result: Result, _content: Any) -> None:
    result.ready = time.monotonic()


def _record_problem(result: Result, text: str) -> None:
    result.problems.append(text)
    result.fail()


def _record_warning(result: Result, warning: dict[str, Any]) -> None:
    result.warnings.append(warning)


def _record_end(result: Result, end: dict[str, Any]) -> None:
    result.done = True
    result.reusable = end["reusable"]


# What to do with the messages of a rank, by their kind.
_RECORDERS: dict[str, Callable[[Result, Any], None]] = {
    "joining": _record_joining,
    "ready": _record_ready,
    "problem": _record_problem,
    "warning": _record_warning,
    "done": _record_end,
}


def _may_reuse(results: Sequence[Result]) -> bool:
    """Whether the processes can run another test."""
    # After a failure on some ranks only, collectives of other ranks may be pending.
    have_same_outcome = len({result.failed for result in results}) == 1
    return have_same_outcome and all(result.reusable for result in results)


def _has_grace_passed(results: Sequence[Result], now: float) -> bool:
    """Whether the other ranks have had enough time to end after a rank has left the test early."""
    early = [result for result in results if result.left_early_at is not None]
    if not early:
        return False

    # A rank that has left the test may still tear its fixtures down.
    in_teardown = any(not result.over for result in early)
    first_end = min(result.left_early_at or 0.0 for result in early)
    return now > first_end + (TEARDOWN if in_teardown else GRACE)


def _collect_stacks(running: Sequence[RankProcess], results: Sequence[Result]) -> None:
    """Ask the ranks that are not done for their stacks, and wait until the stacks are written."""
    stack_files = []
    # After an error while the ranks were started, there are fewer processes than results.
    for process, result in zip(running, results, strict=False):
        if not result.over:
            process.ask_for_stack()
            stack_files.append(result.folder / "stacks")

    if stack_files:
        wait_for_stacks(stack_files)
