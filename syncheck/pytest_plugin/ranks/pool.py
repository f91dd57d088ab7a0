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
        alike = len({result.failed for result in results}) == 1
        if alike and all(result.done and result.reusable for result in results):
            for process in running:
                # After all ranks have ended, because leaving a process group may break it for other ranks.
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
            if process is not None and not process.wait_until_idle(RELEASE):  # killed or stuck since its last test
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
        by_socket = {process.socket: i for i, process in enumerate(running)}
        started, began = time.monotonic(), False
        while not all(result.over for result in results):
            readable = wait([s for s, i in by_socket.items() if not results[i].over], timeout=TICK)
            for number in {by_socket[s] for s in readable}:  # type: ignore[index]
                self._receive(running[number], results[number])
            for process, result in zip(running, results, strict=True):
                # A grandchild may keep the connection open after the rank has ended.
                if not result.over and process.ended():
                    self._receive(process, result)
                    if not result.over:
                        self._record_exit(process, result)
            tail()
            now = time.monotonic()
            left = [result.left_early_at for result in results if result.left_early_at is not None]
            if left and now > min(left) + GRACE:
                in_teardown = any(result.left_early_at is not None and not result.over for result in results)
                if not in_teardown or now > min(left) + TEARDOWN:
                    break
            ready = [result.ready for result in results if result.ready is not None]
            if len(ready) < len(results):
                if now > started + STARTUP:
                    return f"the ranks' process groups were not ready in {STARTUP:g} s"
            elif not began and not left:  # no rank may run the test alone
                began = True
                for process in running:
                    process.send({"begin": True})
            elif began and now > max(ready) + limit:
                return str(PytestText.TIME_LIMIT(seconds=limit))
        return ""

    def _receive(self, process: RankProcess, result: Result) -> None:
        messages = process.receive()
        if messages is None:
            self._record_exit(process, result)
        for message in messages or ():
            if "report" in message:
                result.add(self._load_report(message["report"]))
            result.joining = result.joining or "joining" in message
            if "ready" in message:
                result.ready = time.monotonic()
            if "problem" in message:
                result.problems.append(message["problem"])
                result.fail()
            if "warning" in message:
                result.warnings.append(message["warning"])
            if "done" in message:
                result.done, result.reusable = True, message["done"]["reusable"]

    def _record_exit(self, process: RankProcess, result: Result) -> None:
        result.left_with = process.kill_disconnected()
        result.fail()

    def _kill(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            process = self._processes[number]
            if process is not None:
                process.kill()
                self._processes[number] = None


def _collect_stacks(running: Sequence[RankProcess], results: Sequence[Result]) -> None:
    stuck = [(process, result) for process, result in zip(running, results, strict=False) if not result.over]
    for process, _ in stuck:
        process.ask_for_stack()
    if stuck:
        wait_for_stacks([result.folder / "stacks" for _, result in stuck])
