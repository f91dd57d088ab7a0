"""What a witness is: it observes the steps of one rank, and compares the observations of all ranks.

An observation is a small JSON value, which is posted with each step. The judge asks all ranks for their details only if
the observations disagree; each rank keeps the details of its last steps.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from syncheck.records import largest_first, minority_of
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from syncheck.sentences import Message

    Ask = Callable[[], Mapping[int, Any]]

# Steps whose details a rank keeps: the judge is at most a few steps behind.
_KEPT_STEPS = 64


class Suspicion(NamedTuple):
    """A finding before it gets the texts of its rule.

    code: of the finding.
    ranks: the suspects; all ranks without a majority.
    facts: the evidence.
    names: of the tensors.
    variant: the suffix of other sentences for cause and fix.
    affected: the parameters with a different step; None for the tensors, or for all parameters without tensors.
    clusters: the ranks with equal observations, if that is known.
    is_lasting: the ranks differed at the last comparison before this one, too.
    """

    code: str
    ranks: tuple[int, ...]
    facts: tuple[Message, ...]
    names: tuple[str, ...] = ()
    variant: str = ""
    affected: tuple[str, ...] | None = None
    clusters: tuple[tuple[int, ...], ...] = ()
    is_lasting: bool = False

    def agrees_beside(self, ranks: Iterable[int]) -> bool:
        """Whether differing tensors are equal on all ranks except the given ranks."""
        excluded = set(ranks)
        if not self.clusters:
            return set(self.ranks) <= excluded
        agreeing = [cluster for cluster in self.clusters if not set(cluster) <= excluded]
        return len(agreeing) < 2


class Witness:
    """Observes one kind of thing that must agree between ranks.

    name: of the option `--witnesses`.
    key: of its observations in a record.
    """

    name: ClassVar[str]
    key: ClassVar[str]
    spans_parts: ClassVar[bool] = False
    """Whether ranks that hold other parts of the model must agree, too."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Any] = OrderedDict()

    def install(self, _guard: Callable[..., None]) -> None:
        """Install hooks of its own. _guard: calls a function with arguments, and keeps its errors from the script."""

    def see_forward(self, module: Any, inputs: Sequence[Any]) -> None:
        """See the inputs of a forward pass in training mode, before it."""

    def see_output(self, module: Any) -> None:
        """See the end of a forward pass in training mode."""

    def see_reduction(self, clock: Any) -> None:
        """See the gradients right after a reduction. clock: of the wrapper."""

    def observe(self, key: str, layout: Any) -> Any:
        """Return the observation of a step, a JSON value; None for nothing. Called before the optimizer's step.

        key: of the step.
        layout: the parameters and modules that step.
        """
        raise NotImplementedError

    def compare(self, layout: Any, observations: Mapping[int, Any], ask: Ask) -> list[Suspicion]:
        """Judge each set of ranks that must agree in a step. The arguments are those of `judge`, of all ranks."""
        suspicions: list[Suspicion] = []
        for ranks in self.list_sets(layout, observations):
            observed = {rank: observations[rank] for rank in ranks if rank in observations}
            if len(observed) > 1:
                suspicions += self.judge(layout, observed, ask)
        return suspicions

    def join_parts(self, _layout: Any, sets: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the sets of ranks to compare in a step. sets: the ranks that hold the same part of the model."""
        return sets

    def list_sets(self, layout: Any, observations: Mapping[int, Any]) -> Sequence[tuple[int, ...]]:
        """Return the sets of ranks that must agree in a step. The arguments are those of `judge`, of all ranks."""
        sets: Sequence[tuple[int, ...]] = [tuple(observations)] if self.spans_parts else layout.replicas
        return sets

    def judge(self, layout: Any, observations: Mapping[int, Any], ask: Ask) -> list[Suspicion]:
        """Compare the observations of ranks that must agree in a step, on the rank that judges.

        ask: returns the details of the ranks that answer.
        """
        raise NotImplementedError

    def tell(self, key: str) -> Any:
        """Return the details of a step as a JSON value, or None for an old step."""
        return self._kept.get(key)

    def _keep(self, key: str, details: Any) -> None:
        self._kept[key] = details
        if len(self._kept) > _KEPT_STEPS:
            self._kept.popitem(last=False)


def find_minority(values: Mapping[int, Any]) -> tuple[int, ...]:
    """Return the ranks outside the largest set of ranks with equal values; all ranks if two sets are the largest."""
    ordered = dict(sorted(values.items()))
    sets = largest_first(group_ranks(ordered).values())
    return minority_of(sets) or tuple(ordered)
