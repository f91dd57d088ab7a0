"""The processes of the ranks: kept between tests that pass, ended as soon as one does not."""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from syncheck.pytest_plugin.ranks.process import Guard, RankProcess, wait_for_stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    import pytest

    from syncheck.pytest_plugin.ranks.results import Result

# Seconds for python, pytest and torch to be loaded and the process group to be ready; not the test's own time.
STARTUP = 120.0
# Seconds that the others have to end by themselves after a rank failed: most wait for it in a collective.
GRACE = 2.0
# Seconds that a rank which failed has for the teardown of its fixtures, once the others have ended or were given up.
TEARDOWN = 20.0
# Seconds to let go of a process group whose test has passed.
RELEASE = 10.0
# Seconds between looks at processes that say nothing.
TICK = 0.05


class Pool:
    """Processes by number; a test on n ranks takes the first n. start_in: the folder they work in."""

    def __init__(self, start_in: Path, report: Callable[[Any], pytest.TestReport]) -> None:
        self._start_in, self._report = start_in, report
        self._processes: list[RankProcess | None] = []
        self._guard: Guard | None = None

    def run(
        self, tasks: Sequence[dict[str, Any]], results: Sequence[Result], limit: float, tail: Callable[[], None]
    ) -> str:
        """Run one test on as many ranks as there are tasks, and wait for all of them.

        results: each rank's, filled in. limit: seconds after which all are ended. tail: called now and then.
        Returns the limit that was passed, in words, or "". Whatever is raised while it waits (Ctrl-C, pytest-timeout)
        ends the processes first.
        """
        numbers = range(len(tasks))
        running: list[RankProcess] = []
        try:
            running = self._started(results)
            for process, task in zip(running, tasks, strict=True):
                process.send({"run": task})
            late = self._wait(running, results, limit, tail)
            _take_stacks(running, results)
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                _take_stacks(running, results)
            self._kill(numbers)
            raise
        if all(result.clean and result.reusable for result in results):
            for process in running:
                process.send({"release": True})  # only now: a group that goes early may take a late peer with it
        else:
            self._kill(numbers)
        return late

    def close(self) -> None:
        """End all processes."""
        self._kill(range(len(self._processes)))
        if self._guard is not None:
            self._guard.close()

    def _started(self, results: Sequence[Result]) -> list[RankProcess]:
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
                process = RankProcess(self._start_in, out, err, self._guard)
                self._processes[number] = process
            else:
                result.reused = True
            running.append(process)
        return running

    def _wait(
        self, running: Sequence[RankProcess], results: Sequence[Result], limit: float, tail: Callable[[], None]
    ) -> str:
        """Take in messages until all ranks are done, one has failed and the others do not follow, or time is up."""
        by_socket = {process.socket: i for i, process in enumerate(running)}
        started, began = time.monotonic(), False
        while not all(result.over for result in results):
            readable = wait([s for s, i in by_socket.items() if not results[i].over], timeout=TICK)
            for number in {by_socket[s] for s in readable}:  # type: ignore[index]
                self._take(running[number], results[number])
            for process, result in zip(running, results, strict=True):
                # A grandchild may hold the connection open when the rank itself is gone.
                if not result.over and process.ended():
                    self._take(process, result)
                    if not result.over:
                        self._gone(process, result)
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
            elif not began and not left:  # as one: no rank runs code of the test that another rank never reaches
                began = True
                for process in running:
                    process.send({"begin": True})
            elif began and now > max(ready) + limit:
                return f"time limit of {limit:g} s passed (syncheck(timeout=...) or --syncheck-timeout)"
        return ""

    def _take(self, process: RankProcess, result: Result) -> None:
        messages = process.receive()
        if messages is None:
            self._gone(process, result)
        for message in messages or ():
            if "report" in message:
                result.add(self._report(message["report"]))
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

    def _gone(self, process: RankProcess, result: Result) -> None:
        result.cut_off = process.lost_connection()
        result.left_with = process.kill()
        result.fail()

    def _kill(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            process = self._processes[number]
            if process is not None:
                process.kill()
                self._processes[number] = None


def _take_stacks(running: Sequence[RankProcess], results: Sequence[Result]) -> None:
    stuck = [(process, result) for process, result in zip(running, results, strict=False) if not result.over]
    for process, _ in stuck:
        process.ask_for_stack()
    if stuck:
        wait_for_stacks([result.folder / "stacks" for _, result in stuck])
