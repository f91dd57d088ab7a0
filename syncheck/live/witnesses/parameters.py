"""The witness of parameters: now and then, replicas have equal parameters before a step.

Equal gradients keep equal parameters equal, so this finds what changes parameters outside of the optimizer: a fault of
the memory, a file that one rank loads. The comparison of all replicas names the cause; this one needs no collective, so
it also sees ranks without a wrapper, and the last steps of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from syncheck.live.witnesses.copies import CopiesWitness, Details, list_differing, read_answers, select_digests
from syncheck.live.witnesses.rules import PARAMETERS_DIFFER, UnequalParameters
from syncheck.live.witnesses.witness import Suspicion, find_minority

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from syncheck.live.witnesses.witness import Ask
    from syncheck.sentences import Message

# The number of a step whose parameters are compared is a multiple. Each time costs as much as the gradients of a step.
_PERIOD = 8
# The marks of an observation before the first step, and after the last one.
_AT_START, _AT_END = "start", "end"


class ParameterWitness(CopiesWitness):
    """The parameters of this rank before some steps."""

    name: ClassVar[str] = "parameters"
    key: ClassVar[str] = "w"
    code: ClassVar[str] = PARAMETERS_DIFFER

    def read(self, parameter: Any) -> Any:
        """Return the value."""
        return parameter.detach()

    def __init__(self) -> None:
        super().__init__()
        # The number of the last step before which parameters were equal, by layout and first rank of the copies.
        self._equal: dict[tuple[str, int], int] = {}
        # The copies with a difference in their last comparison.
        self._unequal: set[tuple[str, int]] = set()
        # The layouts whose parameters were equal before the first step.
        self._equal_starts: set[str] = set()
        # The parameters of all ranks before the first step, if they differed, by layout.
        self._starts: dict[str, dict[int, Details]] = {}

    def observe(self, key: str, layout: Any) -> list[Any] | None:
        """Return the digests of copies and of shards at some steps, and the number; None at the other ones."""
        number = layout.clock.ticks + layout.repeated
        # Of these parameters: an optimizer may train further ones later.
        marks = [] if layout.posted else [_AT_START]
        is_due = bool(marks) or number % _PERIOD == 0
        # Each rank may have moved them within its step.
        if layout.is_moved or not is_due:
            return None
        return [*super().observe(key, layout), layout.find_place(), *marks]

    def observe_end(self, key: str, layout: Any) -> list[Any]:
        """Return the digests of copies and of shards at the end of training, the number of a next step, and a mark."""
        return [*super().observe(key, layout), layout.find_place() + bool(layout.clock.ticks), _AT_END]

    def judge(self, layout: Any, observations: Mapping[int, Any], ask: Ask) -> list[Suspicion]:
        """Return SYN411 if parameters differ, with the steps between which they became unequal."""
        # The digests come first, and marks are last.
        number, *marks = next(iter(observations.values()))[2:]
        if _AT_START in marks:
            self._note_start(layout, observations, ask)
        earlier = self.comparisons
        suspicions = super().judge(layout, observations, ask)
        copies = _identify(layout), layout.find_replicas(min(observations))[0]
        equal = self._equal.get(copies, 0)
        is_lasting = copies in self._unequal
        if suspicions:
            self._unequal.add(copies)
        elif self.comparisons > earlier:
            self._equal[copies] = number
            self._unequal.discard(copies)
        # Further steps after one reduction have its number.
        if 0 < equal < number:
            before_step = UnequalParameters.SINCE(equal=equal, unequal=number)
            fact = UnequalParameters.SINCE_AT_END(equal=equal, last=number - 1) if _AT_END in marks else before_step
            suspicions = [suspicion._replace(facts=(*suspicion.facts, fact)) for suspicion in suspicions]
        return [suspicion._replace(is_lasting=is_lasting) for suspicion in suspicions]

    def _note_start(self, layout: Any, observations: Mapping[int, Any], ask: Ask) -> None:
        """Note the parameters before the first step; without a wrapper, it is unknown which ranks hold copies."""
        distinct = {tuple(observation) for observation in observations.values()}
        if len(distinct) == 1:
            first = min(observations)
            self._equal[_identify(layout), layout.find_replicas(first)[0]] = observations[first][2]
            self._equal_starts.add(_identify(layout))
        else:
            self._starts[_identify(layout)] = read_answers(ask())

    def began_equal(self, layouts: Iterable[Any]) -> bool:
        """Whether all parameters of some layouts were equal before the first step; False if unknown."""
        keys = set(map(_identify, layouts))
        return bool(keys) and keys <= self._equal_starts - self._starts.keys()

    def were_equal(self, layout: Any, ranks: Collection[int], indices: Sequence[int]) -> bool:
        """Whether some parameters were equal before the first step; False if unknown."""
        is_known = set(ranks) <= set(self._starts.get(_identify(layout), {}))
        return self.began_equal([layout]) or (is_known and not self._find_start(layout, ranks, indices))

    def _find_start(self, layout: Any, ranks: Iterable[int], indices: Sequence[int]) -> list[int]:
        """Return the indices of the parameters that differed between some ranks before the first step."""
        start = self._starts.get(_identify(layout), {})
        if not set(ranks) <= set(start):
            return []
        return list_differing(select_digests({rank: start[rank] for rank in ranks}, indices), indices)

    def describe(self, layout: Any, details: Mapping[int, Details], indices: Sequence[int]) -> Suspicion:
        """Return SYN411 with the parameters that differ."""
        columns = select_digests(details, indices)
        differing = list_differing(columns, indices)
        unequal_at_start = set(differing).intersection(self._find_start(layout, columns, indices))
        names = tuple(map(layout.names.__getitem__, differing))
        facts = [UnequalParameters.FACT(count=len(names), total=len(indices), names=names)]
        # Without a wrapper, no comparison of all replicas follows.
        variant = "" if layout.clock.reduces else "_ALONE"
        if unequal_at_start:
            facts.append(UnequalParameters.START(names=tuple(map(layout.names.__getitem__, sorted(unequal_at_start)))))
        if len(unequal_at_start) == len(differing):
            variant = "_START"
        return Suspicion(
            self.code,
            find_minority(columns),
            tuple(facts),
            names,
            variant,
        )

    def describe_digests(self) -> Message:
        """Return that the digests differ."""
        return UnequalParameters.DIGESTS()


def _identify(layout: Any) -> str:
    """Return a key of a layout with its parameters, which may become more."""
    return f"{layout.key}/{layout.signature}"
