"""The witness of gradients: after the reduction, replicas step with equal gradients.

A digest of the gradients of copies is posted with each step, and one of the gradients of shards. With a wrapper that
reduces gradients, copies must agree at every step. Without one, nobody states which ranks reduce together, so ranks are
held to what they showed: ranks with equal gradients at several steps belong together.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from syncheck.live.digest import digest_all, hash_digests
from syncheck.live.witnesses.rules import Seen, UnequalGradients
from syncheck.live.witnesses.witness import Suspicion, Witness, find_minority
from syncheck.records import largest_first
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.live.witnesses.witness import Ask

# Elements to recognize a factor between ranks: of the first tensors, the first elements.
_SAMPLED_TENSORS = 4
_SAMPLED_ELEMENTS = 4
# Steps with equal and changing gradients after which ranks without a wrapper are held to be copies.
_LEARNED_STEPS = 3


class Details(NamedTuple):
    """The gradients of one step, to tell other ranks about."""

    digests: list[str]
    """The digest of each tensor, as text; empty for a parameter without gradient."""
    elements: dict[int, list[float]]
    """The first elements of the first tensors, by the index of the tensor."""


class GradientWitness(Witness):
    """The gradients that this rank steps with."""

    name: ClassVar[str] = "gradients"
    key: ClassVar[str] = "g"

    def __init__(self) -> None:
        super().__init__()
        # What ranks without a wrapper have shown, by layout and by copies or shards.
        self._learned: dict[str, _LearnedSets] = {}
        # The findings so far, by layout and suspects.
        self._explained: dict[tuple[str, tuple[int, ...]], Suspicion] = {}

    def observe(self, key: str, layout: Any) -> list[str]:
        """Return the digests of the gradients of copies and of shards, and keep the details.

        The parameters of the layout are in an order that is equal on all ranks. Without gradients, the digest is empty.
        """
        parameters = layout.parameters
        tensors: list[Any] = []
        indices: list[int] = []
        sharded: set[int] = set()
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                parts = _list_tensors(parameter.grad)
                tensors += parts
                indices += [index] * len(parts)
                if _is_sharded(parameter):
                    sharded.add(index)
        # One thread: the others belong to the training.
        hashed = digest_all(tensors, threads=1)
        digests = [""] * len(parameters)
        for index, (_, digest) in zip(indices, hashed, strict=True):
            digests[index] += digest[:8].hex()
        elements: dict[int, list[float]] = {}
        for index, tensor in zip(indices[:_SAMPLED_TENSORS], tensors, strict=False):
            if tensor.is_floating_point():
                elements[index] = tensor.detach().flatten()[:_SAMPLED_ELEMENTS].tolist()
        self._keep(key, Details(digests, elements))
        copies = [index for index in range(len(parameters)) if index not in sharded]
        return [_hash_texts(digests, copies), _hash_texts(digests, sorted(sharded))]

    def tell(self, key: str) -> list[Any] | None:
        """Return the details of a step, or None for an old step."""
        details = super().tell(key)
        return None if details is None else list(details)

    def judge(self, layout: Any, observations: Mapping[int, Any], ask: Ask) -> list[Suspicion]:
        """Return SYN410 if ranks that hold copies have different gradients."""
        differing = self._find_differing(layout, observations)
        if not differing:
            return []
        key = (layout.key, find_minority({rank: tuple(observations[rank]) for rank in differing}))
        # A fault that lasts is explained once, so that the judge keeps up with the run.
        if key not in self._explained:
            answers = ask()
            details = {rank: _read_details(answers[rank]) for rank in differing if rank in answers}
            if len(details) < len(differing):
                return [Suspicion("SYN410", differing, (UnequalGradients.DIGESTS(),))]
            self._explained[key] = describe_disagreement(layout, compare_details(details))
        return [self._explained[key]]

    def _find_differing(self, layout: Any, observations: Mapping[int, Any]) -> tuple[int, ...]:
        """Return the first set of ranks whose gradients must be equal and are not; empty without any."""
        differing: list[tuple[int, ...]] = []
        for position, kind in enumerate(("copies", "shards")):
            digests = {rank: observation[position] for rank, observation in observations.items()}
            for ranks in self._list_sets(layout, kind, digests):
                if len({digests[rank] for rank in ranks}) > 1:
                    differing.append(ranks)
        return differing[0] if differing else ()

    def _list_sets(self, layout: Any, kind: str, digests: Mapping[int, str]) -> list[tuple[int, ...]]:
        """Return the sets of ranks whose gradients must be equal."""
        if layout.clock.keeps_gradients_local():
            return []
        # Beside a wrapper, parameters outside of it are copies too, unless the ranks keep them apart.
        if layout.clock.reduces:
            return [tuple(digests)] if kind == "copies" else []
        learned = self._learned.setdefault(f"{layout.key}/{kind}", _LearnedSets())
        return learned.learn(digests)


def _read_details(answer: Sequence[Any]) -> Details:
    """Return details as a rank told them: JSON has texts as keys."""
    digests, elements = answer
    return Details(digests, {int(index): values for index, values in elements.items()})


class _LearnedSets:
    """The ranks that had equal gradients at several steps."""

    def __init__(self) -> None:
        self._sets: list[tuple[int, ...]] = []
        self._steps = 0
        self._last: Mapping[int, str] = {}

    def learn(self, digests: Mapping[int, str]) -> list[tuple[int, ...]]:
        """Return the sets of ranks that must agree now; empty while this is not known."""
        if self._steps >= _LEARNED_STEPS:
            return self._sets
        # Gradients that do not change, such as zeros, are equal by chance; an empty digest is of no gradient.
        changed = {rank: digest for rank, digest in sorted(digests.items()) if digest != self._last.get(rank, "")}
        sets = [tuple(ranks) for ranks in group_ranks(changed).values() if len(ranks) > 1]
        if sets != self._sets:
            self._steps = 0
        if sets:
            self._steps += 1
        self._sets, self._last = sets, digests
        return []


def _hash_texts(digests: Sequence[str], indices: Sequence[int]) -> str:
    """Return the digest of some gradients; empty if none of the parameters has one."""
    parts = []
    for index in indices:
        # Another parameter without gradient is another set of gradients, whatever their bytes are.
        if digests[index]:
            parts.append((f"{index}", bytes.fromhex(digests[index])))
    return hash_digests(parts)[:12].hex() if parts else ""


def _list_tensors(gradient: Any) -> list[Any]:
    """Return the tensors whose bytes count: of a sparse gradient, also the indices; of a DTensor, the shard."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return [gradient.indices(), gradient.values()]
    return [getattr(gradient, "_local_tensor", gradient)]


def _is_sharded(parameter: Any) -> bool:
    """Whether a parameter is a DTensor with a shard on each rank."""
    return any(not placement.is_replicate() for placement in getattr(parameter, "placements", ()))


class Disagreement(NamedTuple):
    """How the gradients of the ranks differ at one step."""

    ranks: tuple[int, ...]
    """The ranks outside the largest set of equal ranks; all ranks if two sets are the largest."""
    tensors: tuple[int, ...]
    """The indices of the parameters whose gradients differ."""
    missing: tuple[int, ...]
    """The indices of parameters without a gradient on some ranks only."""
    ratio: float | None
    """The factor of a single deviating rank, if it is the same in all sampled elements that differ; else None."""
    is_local: bool
    """Whether every rank has gradients of its own."""
    is_empty: bool = False
    """Whether the deviating ranks have no gradient at all."""


def compare_details(details: Mapping[int, Details]) -> Disagreement:
    """Compare the details of all ranks at one step."""
    columns = {rank: tuple(details[rank].digests) for rank in sorted(details)}
    sets = largest_first(group_ranks(columns).values())
    tensors: list[int] = []
    missing: list[int] = []
    for index, digests in enumerate(zip(*columns.values(), strict=True)):
        if len(set(digests)) > 1:
            tensors.append(index)
            if "" in digests:
                missing.append(index)
    ranks = find_minority(columns)
    ratio = None
    if len(ranks) == 1:
        samples = [details[rank].elements for rank in (ranks[0], sets[0][0])]
        ratio = _find_ratio(tensors, *samples)
    return Disagreement(
        ranks,
        tuple(tensors),
        tuple(missing),
        ratio,
        is_empty=not any(any(columns[rank]) for rank in ranks),
        is_local=len(sets) == len(columns) and len(tensors) == len(next(iter(columns.values()))),
    )


def describe_disagreement(layout: Any, disagreement: Disagreement) -> Suspicion:
    """Return the finding of a disagreement."""
    names = tuple(layout.names[index] for index in disagreement.tensors)
    if layout.clock.reduces and not layout.is_reduced:
        fact = Seen.OUTSIDE(count=len(layout.names), names=names)
        return Suspicion("SYN212", layout.clock.ranks, (fact,), names)
    if disagreement.is_empty:
        # An optimizer without gradients changes nothing.
        fact = Seen.NO_GRADIENT(ranks=disagreement.ranks)
        return Suspicion("SYN214", disagreement.ranks, (fact,))
    facts = [UnequalGradients.FACT(count=len(names), total=len(layout.names), names=names)]
    variant = ""
    if disagreement.missing:
        variant = "_MISSING"
        facts.append(UnequalGradients.MISSING(names=tuple(layout.names[index] for index in disagreement.missing)))
    elif disagreement.ratio is not None:
        # A factor of zero, and one of some tensors only, is no clip.
        if disagreement.ratio and len(names) == len(layout.names):
            variant = "_SCALED"
        facts.append(UnequalGradients.FACTOR(ranks=disagreement.ranks, factor=disagreement.ratio))
    elif disagreement.is_local:
        variant = "_LOCAL"
    return Suspicion("SYN410", disagreement.ranks, tuple(facts), names, variant)


def _find_ratio(
    tensors: Sequence[int], elements: Mapping[int, Sequence[float]], reference: Mapping[int, Sequence[float]]
) -> float | None:
    """Return the factor between two samples of gradients, or None if it is not constant or no sample differs.

    tensors: the indices of the tensors that differ.
    """
    ratios: list[float] = []
    for index in tensors:
        pairs = zip(elements.get(index, ()), reference.get(index, ()), strict=False)
        ratios += [value / expected for value, expected in pairs if expected]
    largest, least = max(ratios, default=math.inf), min(ratios, default=0.0)
    # Each float32 gradient is rounded once by the factor.
    return ratios[0] if largest - least <= 1e-5 * abs(least) else None
