"""Measurements of differing tensors: their evidence, shares of elements, and cosines between replicas."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

from syncheck.records import Evidence, sets_within

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from syncheck.findings import RelationKind
    from syncheck.records import TensorDiff

_Default = TypeVar("_Default", float, None)
_Item = TypeVar("_Item", bound="Hashable")
# Share of elements. Gradients of different batches change every element of a parameter; damage changes few elements.
TOUCHED = 0.1
# Extents of differences that damage explains, unlike the updates of a whole tensor.
_CONFINED = ("one", "contiguous")


def count_mismatched(diff: TensorDiff) -> int:
    """Return the number of differing elements; 0 if only digests were compared."""
    return 0 if diff.mismatched is None else diff.mismatched


def share_of(diff: TensorDiff) -> float:
    """Return the share of differing elements of a tensor with elements; 0 if only digests were compared."""
    return count_mismatched(diff) / diff.numel


def evidence_of(diff: TensorDiff) -> Evidence:
    """Return the evidence of a tensor, without any content if it was not collected."""
    return diff.evidence or Evidence()


def median(numbers: Iterable[float]) -> float:
    """Return the median of one number or more. `statistics.median` takes a while to import."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def most_common(items: Iterable[_Item]) -> _Item:
    """Return the most common of one item or more; of equally common items, the first."""
    ((item, _),) = Counter(items).most_common(1)
    return item


def median_or(numbers: Sequence[float], default: _Default) -> float | _Default:
    """Return the median of numbers, or the default without any number."""
    return median(numbers) if numbers else default


def relation_of(diff: TensorDiff) -> RelationKind | None:
    """Return how a tensor of model B follows from A; None if no relation was found."""
    relation = evidence_of(diff).relation
    return None if relation is None else relation.kind


def parameters_of(diff: TensorDiff) -> Mapping[str, Any]:
    """Return the parameters of the relation of a tensor, empty without one."""
    relation = evidence_of(diff).relation
    return {} if relation is None else relation.parameters


def list_parameter(diffs: Iterable[TensorDiff], name: str) -> list[Any]:
    """Return one parameter of the relation of each tensor; None for a relation without this parameter."""
    return [parameters_of(diff).get(name) for diff in diffs]


def differing_share(diffs: Iterable[TensorDiff]) -> float | None:
    """Return the median share of differing elements, or None if only digests were compared."""
    shares = []
    for diff in diffs:
        # A tensor without elements has no share.
        if diff.mismatched is not None and diff.numel:
            shares.append(share_of(diff))
    return median_or(shares, None)


def is_share_below(diffs: Iterable[TensorDiff], least: float) -> bool:
    """Whether a smaller share of the elements than `least` differs. False if the share is unknown."""
    return is_below(differing_share(diffs), least)


def is_below(measure: float | None, limit: float) -> bool:
    """Whether a measure is known and below a limit."""
    return measure is not None and measure < limit


def is_at_least(measure: float | None, limit: float) -> bool:
    """Whether a measure is known and reaches a limit."""
    return measure is not None and measure >= limit


def is_confined(diff: TensorDiff) -> bool:
    """Whether a single element or a run of adjacent elements differs."""
    return diff.extent in _CONFINED


def cosines(diffs: Iterable[TensorDiff]) -> list[float]:
    """Return the measured cosines between replicas, without tensors of one element."""
    measured = []
    for diff in diffs:
        cosine = evidence_of(diff).cosine
        # The cosine of two numbers shows their signs only.
        is_number = diff.numel <= 1
        if cosine is not None and not is_number:
            measured.append(cosine)
    return measured


def median_cosine(diffs: Iterable[TensorDiff]) -> float | None:
    """Return the median of the cosines between replicas; None if none was measured."""
    return median_or(cosines(diffs), None)


def largest_norm(diff: TensorDiff, default: float) -> float:
    """Return the largest Euclidean norm of a replica. default: if no norm was measured."""
    return max(evidence_of(diff).norms.values(), default=default)


def values_by_rank(diff: TensorDiff) -> dict[int, int | float | str]:
    """Return the value of the differing element by rank, in the order of the ranks; empty if it is unknown."""
    return dict(sorted(evidence_of(diff).values.items()))


def is_partly_nonfinite(diff: TensorDiff) -> bool:
    """Whether the replicas have different numbers of NaN and infinite elements."""
    return len(set(diff.nonfinite.values())) > 1


def agrees_within(diff: TensorDiff, locations: Mapping[int, Hashable]) -> bool:
    """Whether ranks of one location hold the same bytes of a differing tensor, within each replica group.

    locations: by rank, a host or a mesh coordinate.
    """
    clusters_of_groups = sets_within(diff)
    if not clusters_of_groups:
        return False
    return all(_is_one_cluster_each(clusters, locations) for clusters in clusters_of_groups)


def _is_one_cluster_each(clusters: Sequence[Sequence[int]], locations: Mapping[int, Hashable]) -> bool:
    """Whether all ranks of a location are in the same cluster."""
    seen_locations: set[Hashable] = set()
    for ranks in clusters:
        locations_of_cluster = {locations[rank] for rank in ranks}
        # Another cluster has ranks of the same location.
        if not seen_locations.isdisjoint(locations_of_cluster):
            return False
        seen_locations |= locations_of_cluster
    return True
