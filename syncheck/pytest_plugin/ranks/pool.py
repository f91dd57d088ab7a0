"""The processes of the ranks, reused unless a test ended differently on the ranks or had side effects."""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from syncheck.pytest_plugin.ranks.process import Guard, RankProcess, wait_for_stacks
from syncheck.pytest_plugin.texts import PytestText

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
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
    """Processes by rank; a test on n ranks uses the first n. folder: their working folder.

    load_report: deserializes a report of pytest.
    """

    def __init__(self, folder: Path, load_report: Callable[[Any], pytest.TestReport]) -> None:
        self._folder, self._load_report = folder, load_report
        self._processes: list[RankProcess | None] = []
        self._guard: Guard | None = None

    def run(
        self, tasks: Sequence[dict[str, Any]], results: Sequence[Result], limit: float, tail: Callable[[], None]
    ) -> str:
        """Run one test on as many ranks as there are tasks, and wait for all ranks.

        results: one per rank, filled in by this method. limit: the time limit in seconds. tail: called regularly.
        Returns the message about an exceeded time limit, or "". On any exception (Ctrl-C, pytest-timeout) the
        processes are killed.
        """
        numbers = range(len(tasks))
        running: list[RankProcess] = []
        try:
            running = self._start(results)
            for process, task in zip(running, tasks, strict=True):
                process.send({"run": task})
            time_limit = self._wait(running, results, limit, tail)
            _collect_stacks(running, results)
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                _collect_stacks(running, results)
            self._kill(numbers)
            raise
        # After a failure on some ranks only, collectives of other ranks may be pending.
        have_same_outcome = len({result.failed for result in results}) == 1
        if have_same_outcome and all(result.done and result.reusable for result in results):
            # After all ranks have ended, because leaving a process group may break it for other ranks.
            for process in running:
                process.send({"release": True})
        else:
            self._kill(numbers)
        return time_limit

    def close(self) -> None:
        """Kill all processes."""
        self._kill(range(len(self._processes)))
        if self._guard is not None:
            self._guard.close()

    def _start(self, results: Sequence[Result]) -> list[RankProcess]:
        """Return one process per result, reused or new."""
        running = []
        self._processes += [None] * (len(results) - len(self._processes))
        for number, result in enumerate(results):
            process = self._processes[number]
            # Killed or stuck since its last test.
            if process is not None and not process.wait_until_idle(RELEASE):
                process.kill()
                process = None
            if process is None:
                self._guard = self._guard or Guard()
                out, err = result.folder / "stdout", result.folder / "stderr"
                process = RankProcess(self._folder, out, err, self._guard)
                self._processes[number] = process
            else:
                result.reused = True
            running.append(process)
        return running

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
        for process, result in by_socket.values():
            # A grandchild may keep the connection open after the rank has ended.
            if not result.over and process.ended():
                self._receive(process, result)
                if not result.over:
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
        if "report" in message:
            result.add(self._load_report(message["report"]))
        if "joining" in message:
            result.joining = True
        if "ready" in message:
            result.ready = time.monotonic()
        if "problem" in message:
            result.problems.append(message["problem"])
            result.fail()
        if "warning" in message:
            result.warnings.append(message["warning"])
        if "done" in message:
            result.done = True
            result.reusable = message["done"]["reusable"]

    def _record_exit(self, process: RankProcess, result: Result) -> None:
        result.left_with = process.kill_disconnected()
        result.fail()

    def _kill(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            process = self._processes[number]
            if process is not None:
                process.kill()
                self._processes[number] = None


def _has_grace_passed(results: Sequence[Result], now: float) -> bool:
    """Whether the other ranks have had enough time to end after a rank has left the test early."""
    ends = [result.left_early_at for result in results if result.left_early_at is not None]
    if not ends or now <= min(ends) + GRACE:
        return False
    # A rank that has left the test may still tear its fixtures down.
    in_teardown = any(result.left_early_at is not None and not result.over for result in results)
    return not in_teardown or now > min(ends) + TEARDOWN


def _collect_stacks(running: Sequence[RankProcess], results: Sequence[Result]) -> None:
    stack_files = []
    # After an error while the ranks were started, there are fewer processes than results.
    for process, result in zip(running, results, strict=False):
        if not result.over:
            process.ask_for_stack()
            stack_files.append(result.folder / "stacks")
    if stack_files:
        wait_for_stacks(stack_files)
