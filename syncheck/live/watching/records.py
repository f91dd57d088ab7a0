"""The records of a step on the board: their keys, and ranks with other steps than other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.live.watching.layouts import AGAIN, REPEATED
from syncheck.live.witnesses.rules import Seen
from syncheck.live.witnesses.witness import Suspicion, find_minority
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.live.watching.layouts import Layout

# The keys of a record beside the keys of the witnesses.
RANK = "r"
SIGNATURE = "p"
NO_STEP = "x"
# The number of optimizers that train parameters of the wrapper, unless a single optimizer trains all.
OPTIMIZERS = "o"
# At the end, how a rank has changed parameters after its last step, as `Layout.describe_change` returns it.
CHANGED = "c"
# Why a rank tells of a step that its optimizer did not take.
SKIPPED = "skipped"
INFINITE = "infinite"
# In a context of uneven inputs (`ddp.join()`), a rank without data takes part in reductions, and does not step.
JOINED = "joined"

# The suffix of the sentences for ranks without a step after a reduction.
_SKIPPING = "_REDUCTION"
# The findings about one optimizer.
_OF_OPTIMIZER = ("SYN107", "SYN214", "SYN216")
# By whether ranks step in turn.
_CAUSES = {True: "_TURN", False: _SKIPPING}
# Why a rank did not step, and what is found then.
_REASONS = (
    (INFINITE, "SYN216", Seen.INFINITE, ""),
    (SKIPPED, "SYN214", Seen.SKIPPED, _SKIPPING),
)


class Last(Sentence, topic="watch"):
    """Steps after the last reduction of a run, which no later reduction follows."""

    REPEATED_AT_END = (
        "optimizer steps with other gradients and without a reduction after reduction {reduction}: {steps:by_rank}"
    )
    AGAIN_AT_END = "further optimizer steps with the same gradients after reduction {reduction}: {steps:by_rank}"


class _Count(NamedTuple):
    """The number of optimizers of a rank for the parameters of a wrapper, as its records show it."""

    optimizers: int = 1
    since: int = 0
    """The number of the first reduction with it."""
    last: int = -1
    """The number of the last reduction with a record; -1 without one."""


class OptimizerCounts:
    """How many optimizers each rank has for the parameters of each wrapper.

    A rank may have an additional optimizer, for example for a layer with another learning rate. The remaining ranks
    never step with this optimizer, so no rank skips a step.
    """

    def __init__(self) -> None:
        # By the name of the clock and the rank.
        self._counts: dict[tuple[str, int], _Count] = {}

    def add(self, layout: Layout, records: Mapping[int, Mapping[str, Any]], number: int) -> None:
        """Note the numbers in the records of a step of a layout. number: of its reduction."""
        for rank, record in records.items():
            count = self._find(layout, rank)
            optimizers = record.get(OPTIMIZERS, 1)
            if optimizers > count.optimizers:
                count = _Count(optimizers, number)
            self._counts[layout.clock.name, rank] = count._replace(last=max(number, count.last))

    def _find(self, layout: Layout, rank: int) -> _Count:
        return self._counts.get((layout.clock.name, rank), _Count())

    def list_stepping(self, layout: Layout, number: int = 0) -> tuple[int, ...]:
        """Return the ranks that have an optimizer with the number of the layout's, or may have one.

        number: of a reduction: a rank without a record of it may have created an optimizer since its last record.
        """
        ranks = []
        for rank in layout.clock.ranks:
            count = self._find(layout, rank)
            # Before the first record of a rank, it is expected.
            if count.optimizers > layout.number or count.last < number:
                ranks.append(rank)
        return tuple(ranks)

    def differ(self, layout: Layout) -> bool:
        """Whether ranks have different numbers of optimizers, as far as their records show."""
        counts = [self._find(layout, rank) for rank in layout.clock.ranks]
        most = max(count.optimizers for count in counts)
        since = min(count.since for count in counts if count.optimizers == most)
        # The other ranks may create the optimizer at the same step, and not have told of this step yet.
        return any(count.optimizers < most and count.last >= since for count in counts)


def find_changed(records: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the ranks that changed parameters after their last step, as no rank or not all ranks did after each step.

    records: of the end.
    """
    ranks_by_change: dict[int, list[int]] = {}
    for rank, record in records.items():
        ranks_by_change.setdefault(record[CHANGED], []).append(rank)
    new: list[int] = []
    changed: list[int] = []
    for change, ranks in ranks_by_change.items():
        changed += ranks * bool(change)
        new += ranks * (change < 0)
    # What all ranks did belongs to the step.
    if len(ranks_by_change) < 2:
        changed = new
    return tuple(sorted(new or changed))


def name_optimizer(suspicion: Suspicion, layout: Layout) -> Suspicion:
    """Return a suspicion about steps or settings with the class and parameters of the optimizer: a run has several."""
    # A switch of torch affects no parameter.
    conditions = (suspicion.code in _OF_OPTIMIZER, suspicion.affected != (), layout.optimizer is not None)
    if not all(conditions):
        return suspicion
    fact = Seen.OPTIMIZER(kind=type(layout.optimizer).__name__, names=tuple(layout.names))
    return suspicion._replace(facts=(*suspicion.facts, fact))


class Turns:
    """Whether ranks step in turn: ranks skip a step and take the next step, which the other ranks skip."""

    def __init__(self) -> None:
        # The ranks without the last step, by the key of the layout.
        self._skipping: dict[str, set[int]] = {}

    def explain(self, key: str, ranks: Sequence[int], suspicions: Sequence[Suspicion]) -> list[Suspicion]:
        """Return the findings of a step, with another cause if ranks step in turn.

        key: of the layout.
        ranks: of the optimizer.
        """
        earlier = self._skipping.pop(key, set())
        explained = []
        for suspicion in suspicions:
            found = suspicion
            if suspicion.variant == _SKIPPING:
                self._skipping[key] = set(suspicion.ranks)
                # Three ranks may step one after the other.
                are_in_turn = earlier.issuperset(set(ranks).difference(suspicion.ranks))
                found = suspicion._replace(variant=_CAUSES[are_in_turn])
            explained.append(found)
        return explained


# A rank that goes around the wrapper, or calls the optimizer twice, steps more often between two reductions.
_REPETITIONS = (
    (REPEATED, "SYN410", (Seen.REPEATED, Last.REPEATED_AT_END), "_UNREDUCED"),
    (AGAIN, "SYN214", (Seen.AGAIN, Last.AGAIN_AT_END), "_EXTRA"),
)


def compare_steps(number: int, ranks: Sequence[int], records: Mapping[int, Mapping[str, Any]]) -> list[Suspicion]:
    """Return SYN214, SYN216 or SYN410 if ranks did not step as other ranks did.

    number: of the reduction.
    ranks: that step with the optimizer. A rank without a record has gone on to a later reduction.
    """
    reasons = {rank: records.get(rank, {NO_STEP: SKIPPED}).get(NO_STEP) for rank in ranks}
    suspicions = []
    for reason, code, sentence, variant in _REASONS:
        suspects = tuple(rank for rank in ranks if reasons[rank] == reason)
        # If no rank steps, as in accumulation, none deviates.
        if 0 < len(suspects) < len(ranks):
            fact = sentence(ranks=suspects, reduction=number)
            suspicions.append(Suspicion(code, suspects, (fact,), variant=variant))
    return suspicions + compare_repetitions(number, records)


def compare_repetitions(
    number: int, records: Mapping[int, Mapping[str, Any]], *, is_last: bool = False
) -> list[Suspicion]:
    """Return SYN214 or SYN410 if ranks took further steps before a reduction.

    number: of this reduction.
    is_last: the steps come after this reduction, and no later reduction follows.
    """
    suspicions = []
    for field, code, sentences, variant in _REPETITIONS:
        counts = {rank: records[rank].get(field, 0) for rank in sorted(records)}
        suspects = find_minority(counts)
        most = max(counts.values(), default=0)
        # If two ranks differ, the one that steps more often is named.
        if len(suspects) == len(counts):
            suspects = tuple(rank for rank in counts if counts[rank] == most)
        if len(set(counts.values())) > 1:
            fact = sentences[is_last](steps=counts, reduction=number)
            has_most = counts[suspects[0]] == most
            suspicions.append(Suspicion(code, suspects, (fact,), variant=variant * has_most))
    return suspicions
