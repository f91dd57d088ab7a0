"""The witness of gradients: after the reduction, replicas step with equal gradients.

A digest of all gradients of a step is posted with the step. If the digests of two ranks differ, each rank tells the
digests of its tensors and a few of their elements, which it keeps for the last steps.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from syncheck.live.digest import digest_all, hash_digests

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

T = TypeVar("T")
# Steps whose details a rank keeps: the judge is at most a few steps behind.
KEPT_STEPS = 16
# Elements to recognize a factor between ranks: of the first tensors, the first elements.
_SAMPLED_TENSORS = 4
_SAMPLED_ELEMENTS = 4


class Details(NamedTuple):
    """The gradients of one step, to tell other ranks about."""

    digests: list[str]
    """Of each tensor, as text; empty for a parameter without gradient."""
    elements: dict[int, list[float]]
    """The first elements of the first tensors, by the index of the tensor."""


class GradientWitness:
    """The gradients that this rank steps with."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Details] = OrderedDict()

    def observe(self, key: str, parameters: Sequence[Any]) -> str:
        """Return the digest of the gradients of a step, and keep its details.

        key: of the step. parameters: in an order that is equal on all ranks.
        """
        gradients: list[Any] = []
        indices: list[int] = []
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                gradients.append(_get_values(parameter.grad))
                indices.append(index)
        # One thread: the others belong to the training.
        hashed = digest_all(gradients, threads=1)
        digests = [""] * len(parameters)
        for index, (_, digest) in zip(indices, hashed, strict=True):
            digests[index] = digest[:8].hex()
        elements: dict[int, list[float]] = {}
        for index, gradient in zip(indices[:_SAMPLED_TENSORS], gradients, strict=False):
            elements[index] = gradient.detach().flatten()[:_SAMPLED_ELEMENTS].tolist()
        self._kept[key] = Details(digests, elements)
        if len(self._kept) > KEPT_STEPS:
            self._kept.popitem(last=False)
        # Another parameter without gradient is another set of gradients, whatever their bytes are.
        return hash_digests([*hashed, (repr(indices), b"")]).hex()

    def tell(self, key: str) -> Details | None:
        """Return the details of a step, or None for an old step."""
        return self._kept.get(key)


def _get_values(gradient: Any) -> Any:
    """Return the tensor whose bytes count: the values of a sparse gradient, the shard of a DTensor."""
    if gradient.is_sparse:
        return gradient.coalesce().values()
    return getattr(gradient, "_local_tensor", gradient)


class Disagreement(NamedTuple):
    """How the gradients of the ranks differ at one step."""

    ranks: tuple[int, ...]
    """The ranks that differ from the majority; all ranks without a majority."""
    tensors: tuple[int, ...]
    """The indices of the parameters whose gradients differ."""
    missing: tuple[int, ...]
    """Those of them that have no gradient on some ranks only."""
    ratio: float | None
    """The gradients of `ranks` are the gradients of the majority times this factor, in all sampled elements."""


def compare_details(details: Mapping[int, Details]) -> Disagreement:
    """Compare the details of all ranks at one step."""
    columns = {rank: tuple(details[rank].digests) for rank in sorted(details)}
    majority = find_majority(columns.values())
    agreeing: list[int] = []
    deviating: list[int] = []
    for rank, column in columns.items():
        if column == majority:
            agreeing.append(rank)
        else:
            deviating.append(rank)
    tensors: list[int] = []
    missing: list[int] = []
    for index, digests in enumerate(zip(*columns.values(), strict=True)):
        if len(set(digests)) > 1:
            tensors.append(index)
            if "" in digests:
                missing.append(index)
    ratio = None
    if agreeing and len(deviating) == 1:
        ratio = _find_ratio(details[deviating[0]].elements, details[agreeing[0]].elements)
    return Disagreement(tuple(deviating), tuple(tensors), tuple(missing), ratio)


def find_majority(values: Collection[T]) -> T | None:
    """Return the value of more than half of the ranks, or None. values: of all ranks."""
    ((value, count),) = Counter(values).most_common(1)
    return value if 2 * count > len(values) else None


def _find_ratio(elements: Mapping[int, Sequence[float]], reference: Mapping[int, Sequence[float]]) -> float | None:
    """Return the factor between two samples of gradients, or None if it is not constant."""
    ratios: list[float] = []
    for index, values in elements.items():
        for value, expected in zip(values, reference.get(index, ()), strict=False):
            if expected:
                ratios.append(value / expected)
    # Each float32 gradient is rounded once by the factor.
    if ratios and max(ratios) - min(ratios) <= 1e-5 * abs(ratios[0]):
        return ratios[0]
    return None
