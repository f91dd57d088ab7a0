"""The judge of a watched run: a thread of its first rank that reads the records of each step and compares them.

A step is judged when all ranks have told of it, or of a later one. The judge never holds up the run: it may be steps
behind. If ranks disagree, it asks them for details of the step, and a thread on each rank answers from what the rank
has kept.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.live.watching.board import PAUSE
from syncheck.live.watching.records import NO_STEP, RANK, SIGNATURE, compare_steps
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from syncheck.live.watching.board import Board
    from syncheck.live.watching.layouts import Step
    from syncheck.live.watching.watcher import Watcher
    from syncheck.live.witnesses.witness import Suspicion

    Record = Mapping[str, Any]

# Seconds for the ranks to tell details; a rank that has ended never does.
_ANSWER_SECONDS = 5.0
# Seconds between two looks of a rank for questions.
_LOOK_SECONDS = 0.1
# Steps that may be incomplete before a later one: a rank skips few in a row.
_LOOK_AHEAD = 8
# Steps whose records stay on the board: ranks that wait for each other may still read them.
_KEPT_STEPS = 2
_ASK = "ask"


class Judgement(NamedTuple):
    """What the judge found at one step.

    number: of the reduction before the step, or of the step without a wrapper.
    reduces: whether it is the number of a reduction.
    """

    number: int
    reduces: bool
    suspicion: Suspicion


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
    """Judges the steps of one rank's clocks.

    report: called with each judgement.
    """

    def __init__(self, watcher: Watcher, board: Board, report: Callable[[Judgement], None]) -> None:
        super().__init__(name="syncheck-judge", daemon=True)
        self._watcher, self._board, self._report = watcher, board, report
        # Counts for each clock, as the responders count.
        self._questions: Counter[str] = Counter()
        self._deadline = math.inf
        self._finishing = threading.Event()
        self.judged: Counter[str] = Counter()
        """The number of judged steps, and of steps out of sync."""
        # The keys of judged steps, to delete.
        self._spent: deque[str] = deque()

    def finish(self, seconds: float) -> None:
        """Judge the posted steps within a limited time, and end."""
        self._deadline = time.monotonic() + seconds
        self._finishing.set()
        self.join(seconds + 1)

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
            self._judge(step, self._read(step))
            self._spent.append(step.key)
            if len(self._spent) > _KEPT_STEPS:
                self._board.delete(self._spent.popleft())
        del steps[:count]
        return True

    def _count_posted(self) -> int:
        """Return the number of steps that all ranks told of or passed: up to the first complete one of a layout."""
        for position, step in enumerate(self._watcher.steps[:_LOOK_AHEAD]):
            if len(self._read(step)) == len(step.layout.clock.ranks):
                return position + 1
        return 0

    def _read(self, step: Step) -> dict[int, dict[str, Any]]:
        """Return the records of a step by rank."""
        return {record[RANK]: record for record in self._board.read(step.key)}

    def _judge(self, step: Step, records: Mapping[int, Record]) -> None:
        """Judge a step that no rank will tell more of."""
        clock = step.layout.clock
        stepping = {rank: record for rank, record in records.items() if NO_STEP not in record}
        # Backward passes without a step on any rank, as in accumulation, are no steps.
        if not stepping:
            return
        suspicions: list[Suspicion] = []
        if clock.reduces:
            suspicions += compare_steps(step.number, clock.ranks, records)
        suspicions += self._ask_witnesses(step, stepping)
        for suspicion in suspicions:
            self._report(Judgement(step.number, clock.reduces, suspicion))
        # Parameters outside of the wrapper step together with the parameters inside.
        if step.layout.is_reduced or not clock.reduces:
            self.judged["steps"] += 1
        self.judged["out of sync"] += bool(suspicions)

    def _ask_witnesses(self, step: Step, records: Mapping[int, Record]) -> list[Suspicion]:
        """Return what the witnesses find among the ranks that hold the same parameters."""
        suspicions: list[Suspicion] = []
        signatures = {rank: record[SIGNATURE] for rank, record in sorted(records.items())}
        for ranks in group_ranks(signatures).values():
            for witness in self._watcher.witnesses.values():
                observations = {rank: records[rank][witness.key] for rank in ranks if witness.key in records[rank]}
                if len(observations) > 1:
                    suspicions += witness.judge(
                        step.layout,
                        observations,
                        lambda name=witness.name: self._ask(step, name),  # type: ignore[misc]
                    )
        return suspicions

    def _ask(self, step: Step, witness: str) -> dict[int, Any]:
        """Return the details of a step from all ranks that answer in time."""
        clock = step.layout.clock
        question = f"{_ASK}/{clock.name}/{self._questions[clock.name]}"
        self._questions[clock.name] += 1
        self._board.post(question, {"key": step.key, "witness": witness})
        answers: dict[int, Any] = {}
        begin = time.monotonic()
        while len(answers) < len(clock.ranks) and time.monotonic() < min(begin + _ANSWER_SECONDS, self._deadline):
            time.sleep(PAUSE)
            for row in self._board.read(f"{question}/answers"):
                answers[row[RANK]] = row["details"]
        return {rank: details for rank, details in answers.items() if details is not None}


class Responder(threading.Thread):
    """Answers the questions of the judges with what this rank has kept.

    board: of this thread; after `stop`, of the thread that called it.
    """

    def __init__(self, watcher: Watcher, board: Board, rank: int) -> None:
        super().__init__(name="syncheck-responder", daemon=True)
        self._watcher, self.board, self.rank = watcher, board, rank
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
                for name in dict.fromkeys(clock.name for clock in self._watcher.clocks):
                    self._answer(name)

    def _answer(self, clock: str) -> None:
        question = f"{_ASK}/{clock}/{self._answered[clock]}"
        for row in self.board.read(question):
            details = self._watcher.witnesses[row["witness"]].tell(row["key"])
            self.board.post(f"{question}/answers", {RANK: self.rank, "details": details})
            self._answered[clock] += 1
