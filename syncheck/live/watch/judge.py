"""The judge of a replica group: a thread of its first rank that reads the records of each step and compares them.

A step is judged when all ranks have posted it or a later one. The judge never holds up the run: it may be steps behind.
If ranks disagree, it asks them for details of the step, and a thread on each rank answers from what the rank has kept.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.live.watch.board import PAUSE
from syncheck.live.witnesses.gradients import Details, compare_details

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from syncheck.live.watch.board import Board
    from syncheck.live.watch.watcher import Step, Watcher
    from syncheck.live.witnesses.gradients import Disagreement

# Seconds for the ranks to tell details; a rank that has ended never does.
_ANSWER_SECONDS = 5.0
# Seconds between two looks of a rank for questions.
_LOOK_SECONDS = 0.1
# Steps that may be incomplete before a later one: a rank skips few in a row.
_LOOK_AHEAD = 8
_ASK = "ask"


class Judgement(NamedTuple):
    """What the judge found at one step.

    step: with the clock, its number and the names of the parameters.
    since: the first step that a rank skipped before this one; without any, this one.
    disagreement: of the gradients, None if a rank did not tell its details.
    """

    step: Step
    since: int
    code: str
    ranks: tuple[int, ...]
    disagreement: Disagreement | None

    @property
    def reduction(self) -> int:
        """The number of the reduction that ranks stepped differently after."""
        return self.since if self.code == "SYN214" else self.step.number


@contextmanager
def _errors_end_watching(watcher: Watcher) -> Iterator[None]:
    """End a thread at an error: the store has ended with the process that serves it, or syncheck has a fault."""
    try:
        yield
    except RuntimeError:
        return
    except Exception as error:  # noqa: BLE001 - the script goes on as if it were not watched
        watcher.stop(f"watching ends: {type(error).__name__}: {error}")


class Judge(threading.Thread):
    """Judges the steps of one rank's replica groups.

    report: called with each new judgement.
    """

    def __init__(self, watcher: Watcher, board: Board, report: Callable[[Judgement], None]) -> None:
        super().__init__(name="syncheck-judge", daemon=True)
        self._watcher, self._board, self._report = watcher, board, report
        # Of each clock, as the responders count them.
        self._questions: Counter[str] = Counter()
        self._deadline = 0.0
        self._finishing = threading.Event()
        self.judged: Counter[str] = Counter()
        """The number of judged steps by outcome: in sync, or out of sync."""
        # How many steps each rank is behind, and the first step that a rank skipped since then, by layout.
        self._lags: dict[str, dict[int, int]] = {}
        self._skipped: dict[str, int] = {}

    def finish(self, seconds: float) -> None:
        """Judge the posted steps within a limited time, and end."""
        self._deadline = time.monotonic() + seconds
        self._finishing.set()
        self.join(seconds + _ANSWER_SECONDS)

    def run(self) -> None:
        """Judge step by step, in the order of this rank."""
        with _errors_end_watching(self._watcher):
            while not self._is_over():
                if not self._judge_next():
                    time.sleep(PAUSE)

    def _is_over(self) -> bool:
        if not self._finishing.is_set():
            return False
        return not self._watcher.steps or time.monotonic() > self._deadline

    def _judge_next(self) -> bool:
        """Judge the steps up to the first complete one; return whether there was any."""
        steps = self._watcher.steps
        count = self._count_posted()
        if not count:
            return False
        for step in steps[:count]:
            records = self._read_complete(step)
            if records:
                self._judge(step, records)
            else:
                self._skipped.setdefault(step.layout.key, step.number)
            self._board.delete(step.key)
        del steps[:count]
        return True

    def _count_posted(self) -> int:
        """Return the number of steps that all ranks have posted or skipped: up to the first complete one."""
        for position, step in enumerate(self._watcher.steps[:_LOOK_AHEAD]):
            if self._read_complete(step):
                return position + 1
        return 0

    def _read_complete(self, step: Step) -> dict[int, dict[str, Any]]:
        """Return the records of a step by rank, empty if a rank has not posted it."""
        records = {record["r"]: record for record in self._board.read(step.key)}
        return records if len(records) == len(step.layout.clock.ranks) else {}

    def _judge(self, step: Step, records: dict[int, dict[str, Any]]) -> None:
        """Judge a complete step."""
        since = self._skipped.pop(step.layout.key, step.number)
        counts = {rank: record["s"] for rank, record in records.items()}
        lags = {rank: max(counts.values()) - count for rank, count in counts.items()}
        lags_before = self._lags.get(step.layout.key, dict.fromkeys(lags, 0))
        self._lags[step.layout.key] = lags
        skipping = tuple(rank for rank in step.layout.clock.ranks if lags[rank] > lags_before[rank])
        outcome = "in sync"
        if skipping:
            outcome = "out of sync"
            self._report(Judgement(step, since, "SYN214", skipping, None))
        if len({record["g"] for record in records.values()}) > 1:
            outcome = "out of sync"
            details = self._ask(step)
            disagreement = compare_details(details) if len(details) == len(records) else None
            ranks = disagreement.ranks if disagreement else tuple(sorted(records))
            self._report(Judgement(step, since, "SYN410", ranks, disagreement))
        self.judged[outcome] += 1

    def _ask(self, step: Step) -> dict[int, Details]:
        """Return the details of a step from all ranks that answer in time."""
        clock = step.layout.clock.name
        question = f"{_ASK}/{clock}/{self._questions[clock]}"
        self._questions[clock] += 1
        self._board.post(question, {"key": step.key})
        deadline = time.monotonic() + _ANSWER_SECONDS
        answers: dict[int, Details] = {}
        while len(answers) < len(step.layout.clock.ranks) and time.monotonic() < deadline:
            time.sleep(PAUSE)
            for row in self._board.read(f"{question}/answers"):
                elements = {int(index): values for index, values in row["e"].items()}
                answers[row["r"]] = Details(row["d"], elements)
        return answers


class Responder(threading.Thread):
    """Answers the questions of the judges with what this rank has kept."""

    def __init__(self, watcher: Watcher, board: Board, rank: int) -> None:
        super().__init__(name="syncheck-responder", daemon=True)
        self._watcher, self._board, self.rank = watcher, board, rank
        self._answered: Counter[str] = Counter()
        self._ended = threading.Event()

    def stop(self) -> None:
        """End the thread: one that still runs at the end of the interpreter would abort the process."""
        self._ended.set()
        self.join()

    def run(self) -> None:
        """Look for questions until `stop`, or until the store ends."""
        with _errors_end_watching(self._watcher):
            while not self._ended.wait(_LOOK_SECONDS):
                for clock in self._watcher.clocks:
                    self._answer(clock.name)

    def _answer(self, clock: str) -> None:
        question = f"{_ASK}/{clock}/{self._answered[clock]}"
        for row in self._board.read(question):
            details = self._watcher.gradients.tell(row["key"])
            if details is not None:
                answer = {"r": self.rank, "d": details.digests, "e": details.elements}
                self._board.post(f"{question}/answers", answer)
            self._answered[clock] += 1
