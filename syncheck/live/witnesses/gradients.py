"""The witness of gradients: after the reduction, replicas step with equal gradients.

A digest of all gradients of a step is posted with the step. If the digests of two ranks differ, each rank tells the
digests of its tensors and a few of their elements, which it keeps for the last steps.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.live.digest import digest_all, hash_digests
from syncheck.records import largest_first, minority_of
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Steps whose details a rank keeps: the judge is at most a few steps behind.
_KEPT_STEPS = 16
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
        tensors: list[Any] = []
        indices: list[int] = []
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                parts = _list_tensors(parameter.grad)
                tensors += parts
                indices += [index] * len(parts)
        # One thread: the others belong to the training.
        hashed = digest_all(tensors, threads=1)
        digests = [""] * len(parameters)
        for index, (_, digest) in zip(indices, hashed, strict=True):
            digests[index] += digest[:8].hex()
        elements: dict[int, list[float]] = {}
        for index, tensor in zip(indices[:_SAMPLED_TENSORS], tensors, strict=False):
            if tensor.is_floating_point():
                elements[index] = tensor.detach().flatten()[:_SAMPLED_ELEMENTS].tolist()
        self._kept[key] = Details(digests, elements)
        if len(self._kept) > _KEPT_STEPS:
            self._kept.popitem(last=False)
        # Another parameter without gradient is another set of gradients, whatever their bytes are.
        return hash_digests([*hashed, (repr(indices), b"")]).hex()

    def tell(self, key: str) -> Details | None:
        """Return the details of a step, or None for an old step."""
        return self._kept.get(key)


def _list_tensors(gradient: Any) -> list[Any]:
    """Return the tensors whose bytes count: of a sparse gradient, also the indices; of a DTensor, the shard."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return [gradient.indices(), gradient.values()]
    return [getattr(gradient, "_local_tensor", gradient)]


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
    minority = minority_of(sets)
    ratio = None
    if len(minority) == 1:
        samples = [details[rank].elements for rank in (minority[0], sets[0][0])]
        ratio = _find_ratio(tensors, *samples)
    return Disagreement(minority or tuple(columns), tuple(tensors), tuple(missing), ratio)


def _find_ratio(
    tensors: Sequence[int], elements: Mapping[int, Sequence[float]], reference: Mapping[int, Sequence[float]]
) -> float | None:
    """Return the factor between two samples of gradients, or None if it is not constant or no sample differs.

    tensors: the indices of the tensors that differ.
    """
    ratios: list[float] = []
    for index in tensors:
        for value, expected in zip(elements.get(index, ()), reference.get(index, ()), strict=False):
            if expected:
                ratios.append(value / expected)
    # Each float32 gradient is rounded once by the factor.
    if ratios and max(ratios) - min(ratios) <= 1e-5 * abs(ratios[0]):
        return ratios[0]
    return None
