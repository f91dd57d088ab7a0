"""The judge of a watched run: a thread of its first rank that reads the records of each step and compares them.

A step is judged when all ranks have told of it, or of a later step. The judge never holds up the run: it may be steps
behind. If ranks disagree, it asks them for details of the step, and a thread on each rank answers from what the rank
has kept.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.live.watching.board import PAUSE
from syncheck.live.watching.ends import TrainedParameters, covers_all
from syncheck.live.watching.records import (
    NO_STEP,
    RANK,
    SIGNATURE,
    OptimizerCounts,
    Turns,
    compare_repetitions,
    compare_steps,
    find_changed,
    name_optimizer,
)
from syncheck.live.witnesses.parameters import ParameterWitness
from syncheck.live.witnesses.rules import CHANGED_AT_THE_END, PARAMETERS_DIFFER
from syncheck.live.witnesses.settings import relate
from syncheck.text import group_ranks, ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from syncheck.live.watching.board import Board
    from syncheck.live.watching.layouts import Layout, Step
    from syncheck.live.watching.watcher import Watcher
    from syncheck.live.witnesses.witness import Suspicion

    Record = Mapping[str, Any]

# Seconds for the ranks to tell details; a rank that has ended never does.
_ANSWER_SECONDS = 5.0
# Seconds after the deadline to judge the steps that all ranks told of, without further questions.
_POSTED_SECONDS = 0.5
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
    unit: the word before the number, such as "reduction".
    layout: the parameters that step; None if they are unknown.
    """

    number: int
    unit: str
    suspicion: Suspicion
    layout: Layout | None = None


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
        # At the end: the looks without a new record, and how many of them end the judge; the records at the last look.
        self._vain_looks = 0
        self._most_looks = 0
        self._pending_records = 0
        self._finishing = threading.Event()
        self.ended_key = "ended"
        """The key of the ranks without further steps."""
        self.telling: set[int] = set()
        """The ranks with records of steps which could not be judged at the end."""
        self.judged: Counter[str] = Counter()
        """The number of judged steps, of forward passes whose inputs must be equal, of steps out of sync, of compared
        sets of copies, and of models with equal parameters at the end; and the last step with equal parameters."""
        self.steps: Counter[str] = Counter()
        """The number of judged steps, or of forward passes, by the key of the layout."""
        self.uncompared: dict[str, tuple[str, ...]] = {}
        """By layout, the parameters of which no rank was found to hold a copy."""
        self.layouts: dict[str, dict[str, Layout]] = defaultdict(dict)
        """The layouts that were judged, by "steps" and "passes", and by key."""
        self.ranks: set[int] = set()
        """The ranks whose steps are judged here."""
        self._trained = TrainedParameters()
        self._counts = OptimizerCounts()
        self._turns = Turns()
        # The clocks whose ranks have different optimizers.
        self._unlike: set[str] = set()
        # The layouts with further steps after their last reduction, by key.
        self._ended: set[str] = set()
        # The keys of judged steps, to delete, by ranks.
        self._spent: dict[tuple[int, ...], deque[str]] = defaultdict(deque)

    def finish(self, looks: int, seconds: float) -> None:
        """Judge the steps to the last one, as long as records of other ranks arrive, and end.

        looks: for the next record, 50 in a second. On a busy machine they take longer, as the other ranks do.
        seconds: in all.
        """
        self._most_looks = looks
        self._deadline = time.monotonic() + seconds
        self._finishing.set()
        self.join(seconds + 1)
        # The records of other ranks came too late.
        for step in self._watcher.steps:
            self.uncompared.setdefault(step.layout.key, tuple(step.layout.names))
            # The end of one model says nothing about the end of another model.
            if step.is_end:
                self.judged["ends"] = 0
        # A parameter that left its optimizer was last compared before.
        if self.judged["ends"] and not self._trained.are_equal_at_end:
            self.judged["ends"] = self.judged["compared"] = 0

    def hasten(self, looks: int, seconds: float) -> None:
        """End earlier than `finish` allows, from another thread. The arguments are those of `finish`."""
        self._most_looks = min(looks, self._most_looks)
        self._deadline = min(time.monotonic() + seconds, self._deadline)

    def list_unjudged(self) -> tuple[str, ...]:
        """Return the steps whose records other ranks posted too late, or never, such as "reduction 4"."""
        places: dict[str, None] = {}
        for step in list(self._watcher.steps):
            if not step.is_end:
                places[f"{step.unit} {step.place}"] = None
        return tuple(places)

    def list_uncompared(self) -> tuple[str, ...]:
        """Return the names of the parameters of which no rank was found to hold a copy."""
        names: dict[str, None] = {}
        for key, uncompared in self.uncompared.items():
            if key not in self._watcher.outdated:
                names.update(dict.fromkeys(uncompared))
        return tuple(names)

    def _list_shards_without_copy(self, layout: Layout) -> tuple[str, ...]:
        """Return the names of the shards of a layout of which no copy is known, although other parameters have copies.

        A wrapper states which ranks hold copies of shards; without one, the ranks may not have shown it.
        """
        are_known = []
        for witness in self._watcher.witnesses.values():
            learned = getattr(witness, "learned", {}).get(f"{layout.key}/shards")
            if learned is not None:
                are_known.append(learned.are_known)
        return tuple(layout.list_sharded()) if are_known and not any(are_known) else ()

    def is_behind(self, after_step: bool) -> bool:
        """Whether steps of earlier reductions are to be judged. after_step: also of the last reduction."""
        if not (self.is_alive() and self._watcher.is_on):
            return False
        return any(step.number < step.layout.clock.ticks + after_step for step in list(self._watcher.steps))

    def run(self) -> None:
        """Judge step by step, in the order of this rank."""
        with _errors_end_watching(self._watcher):
            is_over = False
            while not is_over:
                is_finishing = self._finishing.is_set()
                # The last records of ended ranks are judged now.
                have_ended = is_finishing and self._have_ended()
                is_idle = not self._judge_next()
                is_over = is_finishing and (self._is_over(is_idle) or (is_idle and have_ended))
                if is_idle:
                    time.sleep(PAUSE)
            for layout in self.layouts["steps"].values():
                self._judge_further_steps(layout)

    def _judge_further_steps(self, layout: Layout) -> None:
        """Judge the steps after the last reduction of a model, once: a rank may go on alone."""
        if layout.key in self._ended:
            return
        without_steps: Record = {}
        records = dict.fromkeys(layout.clock.ranks, without_steps)
        most = 0
        while posted := self._board.read(f"{layout.key}/{layout.posted}+{most + 1}"):
            most += 1
            records.update({record[RANK]: record for record in posted})
        # A script may take several steps after each reduction, and a rank may end before the others take them.
        if most > layout.most_repeated:
            self._ended.add(layout.key)
            for suspicion in compare_repetitions(layout.posted, records, is_last=True):
                self._report(Judgement(layout.posted, layout.clock.unit, suspicion, layout))

    def _is_over(self, is_idle: bool) -> bool:
        """Whether to end, maybe with steps that are incomplete. is_idle: no step was complete."""
        # A judged step leaves the list with its records, so their number changes with each judged step, too.
        telling: list[int] = []
        for step in list(self._watcher.steps)[:_LOOK_AHEAD]:
            telling += self._read(step)
        self.telling = set(telling)
        self._vain_looks = self._vain_looks + 1 if len(telling) == self._pending_records else 0
        self._pending_records = len(telling)
        # A rank that has ended answers no question until the deadline, and has told of further steps before.
        deadline = self._deadline if is_idle else self._deadline + _POSTED_SECONDS
        if not self._watcher.steps or time.monotonic() > deadline:
            return True
        return self._vain_looks > self._most_looks

    def _have_ended(self) -> bool:
        """Whether the ranks of the remaining steps have ended, after all of their steps."""
        ranks: set[int] = set()
        for step in list(self._watcher.steps):
            ranks.update(step.layout.clock.ranks)
        return ranks.issubset(row[RANK] for row in self._board.read(self.ended_key))

    def _judge_next(self) -> bool:
        """Judge the steps of each set of ranks up to the first complete one; return whether there was any."""
        # A rank with a record of a step has told of the earlier steps of the same ranks, or passed them.
        steps_of_ranks: dict[tuple[int, ...], list[Step]] = defaultdict(list)
        for step in list(self._watcher.steps):
            steps_of_ranks[step.layout.clock.ranks].append(step)
        count = 0
        for ranks, steps in steps_of_ranks.items():
            self.ranks.update(ranks)
            posted = steps[: self._count_posted(steps)]
            count += len(posted)
            records_of_steps = []
            for step in posted:
                if step.is_end:
                    # All ranks have told of their further steps, which explain different parameters at the end.
                    self._judge_further_steps(step.layout)
                records_of_steps.append(self._read(step))
                self._note_optimizers(step, records_of_steps[-1])
            for step, records in zip(posted, records_of_steps, strict=True):
                self._judge(step, records)
                self._watcher.steps.remove(step)
                self._delete_later(ranks, step)
        return count > 0

    def _delete_later(self, ranks: tuple[int, ...], step: Step) -> None:
        spent = self._spent[ranks]
        spent.append(step.key)
        if len(spent) > _KEPT_STEPS:
            self._board.delete(spent.popleft())

    def _count_posted(self, steps: Sequence[Step]) -> int:
        """Return the number of steps that all stepping ranks told of or passed: up to the first complete one."""
        for position, step in enumerate(steps[:_LOOK_AHEAD]):
            records = self._read(step)
            # At the end, no rank creates an optimizer.
            number = step.number * (not step.is_end)
            if len(records) >= len(self._counts.list_stepping(step.layout, number)):
                return position + 1
            # A later step may show that a rank has fewer optimizers.
            self._note_optimizers(step, records)
        return 0

    def _note_optimizers(self, step: Step, records: Mapping[int, Record]) -> None:
        if not step.is_end:
            self._counts.add(step.layout, records, step.number)

    def _read(self, step: Step) -> dict[int, dict[str, Any]]:
        """Return the records of a step by rank."""
        return {record[RANK]: record for record in self._board.read(step.key)}

    def _judge(self, step: Step, records: Mapping[int, Record]) -> None:
        """Judge a step that no rank will tell more of."""
        clock = step.layout.clock
        if step.is_end:
            self._judge_end(step, records)
            return
        if self._counts.differ(step.layout):
            self._note_unlike(step.layout)
        stepping = {rank: record for rank, record in records.items() if NO_STEP not in record}
        # Backward passes without a step on any rank, as in accumulation, are no steps.
        if not stepping:
            return
        suspicions: list[Suspicion] = []
        # How often each rank steps without a reduction is told with its next step.
        if clock.reduces and not step.repeated:
            # A rank that has no parameters outside of the wrapper never tells of their steps, and skips no step.
            ranks = self._counts.list_stepping(step.layout) if step.layout.is_reduced else tuple(records)
            suspicions += self._turns.explain(step.layout.key, ranks, compare_steps(step.number, ranks, records))
        suspicions += self._ask_witnesses(step, stepping)
        for found in relate(suspicions, step.layout):
            suspicion = name_optimizer(found, step.layout) if self._has_several(step.layout) else found
            self._report(Judgement(step.place, step.unit, suspicion, step.layout))
        # Parameters outside of the wrapper step together with the parameters inside.
        if not step.layout.is_beside:
            kind = "steps" if clock.counts_steps else "passes"
            self.judged[kind] += 1
            self.layouts[kind][step.layout.key] = step.layout
            self.steps[step.layout.key] += 1
        self._trained.note_step(step.layout)

    def _has_several(self, layout: Layout) -> bool:
        """Whether the wrapper of a layout, or a run without wrappers, has several optimizers."""
        unwrapped = 0 if layout.clock.reduces else len(self.layouts["steps"])
        return max(unwrapped, layout.optimizers) > 1

    def _judge_end(self, step: Step, records: Mapping[int, Record]) -> None:
        """Judge the parameters after the last step."""
        suspicions = self._ask_witnesses(step, records)
        changed = find_changed(records)
        # All ranks may load parameters of their own.
        variant = "_ALL" if len(changed) == len(records) else ""
        for suspicion in suspicions:
            found = suspicion
            # A script may load its best parameters on one rank, to test them. Parameters that differed before the last
            # step have another cause.
            is_new = suspicion.code == PARAMETERS_DIFFER and not suspicion.is_lasting
            if changed and is_new and suspicion.agrees_beside(changed):
                found = suspicion._replace(
                    code=CHANGED_AT_THE_END,
                    ranks=changed,
                    variant=variant,
                )
            self._report(Judgement(step.place, step.unit, found, step.layout))
        if not suspicions and self.judged["compared"] == step.place:
            self.judged["ends"] += 1
            self._trained.note_equal_end(step.layout)

    def _ask_witnesses(self, step: Step, records: Mapping[int, Record]) -> list[Suspicion]:
        """Return what the witnesses find among the ranks that hold the same parameters."""
        suspicions: list[Suspicion] = []
        earlier = self._count_comparisons(ParameterWitness.name)
        signatures = {rank: record[SIGNATURE] for rank, record in sorted(records.items())}
        ranks_by_signature = group_ranks(signatures)
        if len(ranks_by_signature) > 1:
            self._note_unlike(step.layout)
        for witness in self._watcher.witnesses.values():
            for ranks in witness.join_parts(step.layout, list(ranks_by_signature.values())):
                observations = {rank: records[rank][witness.key] for rank in ranks if witness.key in records[rank]}
                suspicions += witness.compare(
                    step.layout,
                    observations,
                    lambda name=witness.name: self._ask(step, name),  # type: ignore[misc]
                )
        has_equal_copies = not suspicions and self._count_comparisons(ParameterWitness.name) > earlier
        if has_equal_copies and covers_all(step.layout, ranks_by_signature.values()):
            self.judged["compared"] = step.place
        comparisons = self._count_comparisons(*self._watcher.witnesses)
        layout = step.layout
        names = self.uncompared.setdefault(layout.key, tuple(layout.names))
        has_compared = comparisons > self.judged["comparisons"]
        self.uncompared[layout.key] = self._list_shards_without_copy(layout) if has_compared else names
        self.judged["comparisons"] = comparisons
        return suspicions

    def _note_unlike(self, layout: Layout) -> None:
        """Print once that ranks train different parameters of one model, so that their steps have no copy."""
        clock = layout.clock
        if not layout.is_reduced or clock.name in self._unlike:
            return
        self._unlike.add(clock.name)
        self._watcher.print_line(
            f"the optimizers of {ranks_text(clock.ranks)} train different parameters of one model, so the witnesses "
            "do not compare all of their steps; create the same optimizers in the same order on all ranks"
        )

    def _count_comparisons(self, *names: str) -> int:
        """Return how often the witnesses with these names compared copies so far."""
        return sum(getattr(self._watcher.witnesses.get(name), "comparisons", 0) for name in names)

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
