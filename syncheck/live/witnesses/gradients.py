"""The witness of gradients: after the reduction, replicas step with equal gradients."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from syncheck.live.watching.changes import read_state
from syncheck.live.witnesses.copies import COPIES, CopiesWitness, Details, list_differing, select_digests
from syncheck.live.witnesses.rules import Seen, UnequalGradients
from syncheck.live.witnesses.samples import Samples, sample
from syncheck.live.witnesses.shifts import History
from syncheck.live.witnesses.witness import Suspicion, find_minority
from syncheck.records import largest_first
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.live.witnesses.witness import Ask
    from syncheck.sentences import Message

# Each float32 gradient is rounded once by a factor.
_ROUNDING = 1e-5
# Within this part of one, a factor may be the effect of a common clip after a change of elements that are not compared.
_NEAR = 0.05
# The factor of tensors that differ in none of their compared elements.
_UNKNOWN = 1.0
# The suffix of the sentences for gradients that show no cause, by whether reductions number the steps.
_UNCOUNTED = "_UNCOUNTED"
_UNKNOWN_CAUSES = {True: "", False: _UNCOUNTED}
# For gradients that agree within groups of ranks.
_WITHIN = "_WITHIN"
_OF_DIFFERENCES = (_UNCOUNTED, _WITHIN)


class GradientWitness(CopiesWitness):
    """The gradients that this rank steps with."""

    name: ClassVar[str] = "gradients"
    key: ClassVar[str] = "g"
    code: ClassVar[str] = "SYN410"

    def __init__(self) -> None:
        super().__init__()
        # The state of each gradient after the last reduction, by the identity of the parameter.
        self._reduced: dict[str, dict[int, tuple[int, ...]]] = {}
        # The steps that were judged, by layout.
        self._histories: defaultdict[str, History] = defaultdict(History)

    def read(self, parameter: Any) -> Any:
        """Return the gradient."""
        return parameter.grad

    def sample(self, tensors: Mapping[int, Any]) -> Samples:
        """Return a few elements of the gradients, which show a factor between ranks, and most gradients with NaN."""
        return sample(tensors)

    def see_reduction(self, clock: Any) -> None:
        """Note the gradients that a reduction left."""
        states = self._reduced[clock.name] = {}
        for parameter in clock.list_reduced():
            # Operations on a list of DTensors, as in clip_grad_norm_, change no version.
            if parameter.grad is not None and not hasattr(parameter, "placements"):
                states[id(parameter)] = read_state(parameter.grad)

    def holds_reduced(self, layout: Any) -> bool:
        """Whether the gradients are those that the last reduction left; False without a reduction, and for shards."""
        states = self._reduced.get(layout.clock.name, {})
        gradients = {id(parameter): parameter.grad for parameter in layout.parameters if parameter.grad is not None}
        return bool(gradients) and all(
            states.get(identity) == read_state(gradient) for identity, gradient in gradients.items()
        )

    def is_unreduced(self, layout: Any) -> bool:
        """Whether the step is not the first one after a reduction."""
        if layout.hides_reductions:
            return False
        return bool(layout.clock.reduces and layout.posted == layout.clock.ticks)

    def judge(self, layout: Any, observations: Mapping[int, Any], ask: Ask) -> list[Suspicion]:
        """Return SYN410 if gradients differ; without a wrapper SYN214, if they are those of another step."""
        suspicions = super().judge(layout, observations, ask)
        facts = () if layout.numbers_steps else self._histories[layout.key].add(observations)
        if not facts:
            return suspicions
        return [Suspicion("SYN214", suspicion.ranks, facts, variant="_UNEQUAL") for suspicion in suspicions]

    def describe(self, layout: Any, details: Mapping[int, Details], indices: Sequence[int]) -> Suspicion:
        """Return SYN410, or SYN212 and SYN214 for parameters outside of the wrapper and for ranks without gradient."""
        suspicion = describe_disagreement(layout, compare_details(details, indices))
        are_partial = getattr(self.learned.get(f"{layout.key}/{COPIES}"), "are_partial", False)
        # The sentence of a factor between all tensors tells more.
        if are_partial and suspicion.variant in _OF_DIFFERENCES:
            return suspicion._replace(variant="_NEVER")
        return suspicion

    def show_copies(self, layout: Any, earlier: Mapping[int, Details], details: Mapping[int, Details]) -> bool:
        """Whether most gradients are equal at both steps, and not the same, or all differ by one factor.

        A copy of a parameter is equal before the first step, and a shard or an expert of each rank usually is not.
        """
        indices = layout.copied
        first, second = select_digests(earlier, indices), select_digests(details, indices)
        differing = {*list_differing(first, indices), *list_differing(second, indices)}
        rank = min(details)
        # Without a gradient, the digest is empty at both steps.
        changing = list_differing({0: first[rank], 1: second[rank]}, indices)
        has_most = len(set(changing) - differing) >= max(len(differing), 1)
        if not has_most and not all(_is_scaled(compare_details(seen, indices)) for seen in (earlier, details)):
            return False
        return self.follower is not None and self.follower.were_equal(layout, details, sorted(differing))

    def describe_digests(self) -> Message:
        """Return that the digests differ."""
        return UnequalGradients.DIGESTS()


class Disagreement(NamedTuple):
    """How the gradients of the ranks differ at one step."""

    ranks: tuple[int, ...]
    """The ranks outside the largest set of equal ranks. If two sets are the largest, the ranks that have changed their
    gradients after the reduction; all ranks if this is unknown."""
    tensors: tuple[int, ...]
    """The indices of the parameters whose gradients differ."""
    missing: tuple[int, ...]
    """The indices of parameters without a gradient on some ranks only."""
    ratio: float | None
    """The factor between two sets of ranks in most of the tensors that differ; None if most have no constant factor."""
    scaled: tuple[int, ...]
    """The ranks whose gradients the factor is of."""
    is_local: bool
    """Whether every rank has gradients of its own, without a reduction before the step."""
    empty: tuple[int, ...] = ()
    """The ranks that have no gradient at all, while other ranks have."""
    suspicion: str = ""
    """The name of the fact about the ranks if two sets are the largest; empty if one is."""
    others: tuple[int, ...] = ()
    """The indices of the tensors that differ by another factor, or by none."""
    unsampled: tuple[int, ...] = ()
    """The indices of the tensors that differ, and whose factor is unknown."""
    not_finite: tuple[int, ...] = ()
    """The indices of the tensors that hold NaN or infinity on the ranks of the factor only."""
    total: int = 0
    """The number of gradients that must be equal."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The sets of several ranks with equal gradients, if there is more than one."""
    local_passes: dict[int, int] | None = None
    """The backward passes of each rank between the reduction and the step, if only the ranks named have any."""


class _Factors(NamedTuple):
    """The factors between two samples of gradients."""

    ratio: float | None = None
    others: tuple[int, ...] = ()
    unsampled: tuple[int, ...] = ()


def compare_details(details: Mapping[int, Details], indices: Sequence[int]) -> Disagreement:
    """Compare the details of all ranks at one step. indices: of the gradients that must be equal."""
    columns = select_digests(details, indices)
    sets = largest_first(group_ranks(columns).values())
    tensors: list[int] = []
    missing: list[int] = []
    for index, digests in zip(indices, zip(*columns.values(), strict=True), strict=True):
        if len(set(digests)) > 1:
            tensors.append(index)
            if "" in digests:
                missing.append(index)
    ranks = find_minority(columns)
    is_even = len(ranks) == len(columns)
    reduced = {columns[rank] for rank in columns if details[rank].is_reduced}
    suspicion = "UNDECIDED" if is_even else ""
    # Equally large sets have no majority, but a reduction leaves equal gradients on all ranks.
    if is_even and len(reduced) == 1:
        suspicion = "CHANGED"
        ranks = tuple(rank for rank in columns if columns[rank] not in reduced)
    scaled, reference = sets[-1], sets[0]
    if reference == ranks:
        scaled, reference = reference, scaled
    # A reduction leaves NaN and infinity on all ranks, so the ranks that alone hold them have changed their gradients.
    broken = _find_not_finite(details, sets) if suspicion == "UNDECIDED" else ()
    if broken:
        suspicion, ranks, scaled = "", broken, broken
        reference = next(similar for similar in sets if similar != broken)
    groups = tuple(similar for similar in sets if len(similar) > 1)
    factors = _Factors()
    # Two ranks have no majority, but one factor between all of their gradients shows a clip too.
    if len(sets) == 2 and len(sets[-1]) == 1:
        factors = _find_factors(tensors, details[scaled[0]].elements, details[reference[0]].elements)
    not_finite = set(details[scaled[0]].not_finite).difference(details[reference[0]].not_finite)
    return Disagreement(
        ranks,
        tuple(tensors),
        tuple(missing),
        factors.ratio,
        scaled,
        empty=tuple(rank for rank in columns if not any(details[rank].digests)),
        is_local=(
            # Within a compiled program, reductions are not seen. Without one, all gradients differ, by no factor.
            details[scaled[0]].is_unreduced
            and len(sets) == len(columns)
            and len(tensors) == len(indices)
            and factors.ratio is None
        ),
        suspicion=suspicion,
        others=factors.others,
        unsampled=factors.unsampled,
        not_finite=tuple(sorted(not_finite.intersection(indices))),
        total=len(indices),
        # A group that alone changed its gradients had reduced them with the other ranks.
        groups=groups * (len(groups) > 1) * (suspicion != "CHANGED"),
        local_passes=_count_local_passes(details, ranks),
    )


def _count_local_passes(details: Mapping[int, Details], ranks: Sequence[int]) -> dict[int, int] | None:
    """Return the backward passes between the reduction and the step by rank; None unless some ranks alone have any."""
    passes = {rank: details[rank].local_passes for rank in sorted(details)}
    adding = tuple(rank for rank in passes if passes[rank])
    # With a majority or not: a pass after the reduction adds gradients of one rank's own batch.
    is_explained = set(adding) <= set(ranks) and 0 < len(adding) < len(passes)
    return passes if is_explained else None


def _find_not_finite(details: Mapping[int, Details], sets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the set of ranks that alone holds NaN or infinity after a reduction; empty if none or several do."""
    broken = []
    for ranks in sets:
        # The ranks of a set have equal gradients.
        if details[ranks[0]].not_finite:
            broken.append(ranks)
    # Unreduced gradients are of each rank alone.
    if len(broken) != 1 or details[broken[0][0]].is_unreduced:
        return ()
    return broken[0]


def describe_disagreement(layout: Any, disagreement: Disagreement) -> Suspicion:
    """Return the finding of a disagreement."""
    names = _name(layout, disagreement.tensors)
    if layout.clock.reduces and not layout.is_reduced:
        fact = Seen.OUTSIDE(count=len(layout.names), names=names)
        return Suspicion(
            "SYN212",
            layout.clock.ranks,
            (fact,),
            names,
            variant="_OUTSIDE",
        )
    if disagreement.empty:
        # An optimizer without gradients changes nothing, so these ranks skip the step, also without a majority.
        fact = Seen.NO_GRADIENT(ranks=disagreement.empty)
        return Suspicion("SYN214", disagreement.empty, (fact,), variant="_CLEARED")
    facts = [UnequalGradients.FACT(count=len(names), total=disagreement.total, names=names)]
    variant = _choose_variant(disagreement, _UNKNOWN_CAUSES[layout.numbers_steps])
    if disagreement.not_finite:
        # It counts more than how many gradients differ.
        facts.insert(
            0, UnequalGradients.NOT_FINITE(ranks=disagreement.scaled, names=_name(layout, disagreement.not_finite))
        )
    elif disagreement.missing:
        facts.append(UnequalGradients.MISSING(names=_name(layout, disagreement.missing)))
    elif disagreement.ratio is not None:
        sentence = UnequalGradients["FACTOR_OF_MOST" if disagreement.others else "FACTOR"]
        fact = sentence(
            ranks=disagreement.scaled,
            factor=disagreement.ratio,
            names=_name(layout, disagreement.others),
        )
        facts.append(fact)
    if disagreement.local_passes is not None:
        facts.append(UnequalGradients.LOCAL_PASSES(passes=disagreement.local_passes))
    if disagreement.groups:
        facts.append(UnequalGradients.GROUPS(groups=sorted(disagreement.groups)))
    elif disagreement.suspicion and variant != "_LOCAL":
        facts.append(UnequalGradients[disagreement.suspicion](ranks=disagreement.ranks))
    return Suspicion(
        "SYN410",
        disagreement.ranks,
        tuple(facts),
        names,
        variant,
    )


def _name(layout: Any, indices: Sequence[int]) -> tuple[str, ...]:
    return tuple(map(layout.names.__getitem__, indices))


def _choose_variant(disagreement: Disagreement, unknown: str) -> str:
    """Return the suffix of the sentences for cause and fix. unknown: for gradients that show no cause."""
    if disagreement.not_finite:
        return "_NOT_FINITE"
    if disagreement.missing:
        return "_MISSING"
    if disagreement.local_passes is not None:
        return "_ADDED"
    if disagreement.is_local:
        # Between two reductions there was none.
        return "_LOCAL"
    if disagreement.ratio == 0 and not disagreement.others:
        return "_ZERO"
    if not _is_scaled(disagreement):
        return _WITHIN if disagreement.groups else unknown
    is_near = math.isclose(disagreement.ratio or 0, 1, rel_tol=_NEAR)
    return "_SAMPLED" if disagreement.unsampled or is_near else "_SCALED"


def _is_scaled(disagreement: Disagreement) -> bool:
    """Whether all gradients differ by one factor: one of some tensors only is no clip."""
    is_scaled = disagreement.ratio is not None and len(disagreement.tensors) == disagreement.total
    return is_scaled and not disagreement.others


def _find_factors(
    tensors: Sequence[int], elements: Mapping[int, Sequence[float]], reference: Mapping[int, Sequence[float]]
) -> _Factors:
    """Return the factor that most tensors have between two samples of gradients.

    tensors: the indices of the tensors that differ.
    """
    factors = {}
    known: list[int] = []
    unsampled: list[int] = []
    for index in tensors:
        factors[index] = _find_factor(elements.get(index, []), reference.get(index, []))
        found = unsampled if factors[index] == _UNKNOWN else known
        found.append(index)
    # If most have one factor, it is the median.
    known.sort(key=factors.__getitem__)
    most = factors[known[len(known) // 2]] if known else _UNKNOWN
    others = tuple(index for index in sorted(known) if not math.isclose(factors[index], most, rel_tol=_ROUNDING))
    is_clear = math.isfinite(most) and 2 * len(others) < len(known)
    # A factor so near to one may be rounding.
    if not is_clear or math.isclose(most, 1, rel_tol=_ROUNDING):
        return _Factors()
    return _Factors(most, others, tuple(unsampled))


def _find_factor(values: Sequence[float], reference: Sequence[float]) -> float:
    """Return the factor between the elements of two tensors: infinite if it is not constant, 1 if none differs."""
    if values == reference:
        return _UNKNOWN
    _, value, expected = max(zip(map(abs, reference), values, reference, strict=False), default=(0, 0, 0))
    factor = value / expected if expected else math.inf
    is_constant = True
    for value, expected in zip(values, reference, strict=False):
        is_constant &= math.isclose(value, factor * expected, rel_tol=_ROUNDING)
    return factor if is_constant else math.inf
