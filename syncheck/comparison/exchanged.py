"""Find tensors of one rank that hold the values of another tensor of the other ranks.

For example, two layers exchange their contents if a rank registers its modules in another order, or if an optimizer
state is loaded by position. Equal bytes are a proof, unless all elements are equal: constants are the same everywhere.
After more steps, the tensors only have nearly the direction of each other.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from syncheck.comparison.vectors import block_size, compute_cosine
from syncheck.records import sets_within

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.records import TensorDiff
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Largest cosine of replicas with different directions, and least cosine of tensors with nearly the same direction.
TURNED, ALIKE = 0.6, 0.8
# Least number of elements with a direction of their own.
_LARGE = 64
# Maximum number of tensors of one shape whose directions are compared pairwise.
_MOST_ALIKE = 32
# Elements at the start of a tensor that choose the tensors to compare whole.
_FIRST = 1024
# Maximum number of differing tensors: after a long divergence all of them differ, and exchanged tensors are among many.
_MOST = 2048


class _Content(NamedTuple):
    """The values of a tensor in a set of equal replicas."""

    name: str
    ranks: tuple[int, ...]
    tensor: Tensor


def find_exchanged(
    differing: Sequence[TensorDiff], replicas: Mapping[str, Mapping[int, Tensor]], files: Files
) -> dict[str, dict[int, str]]:
    """Return, by tensor and rank, the tensor of other ranks whose values the rank holds.

    Raises CheckpointError if a file can no longer be read.
    """
    by_start: dict[tuple[object, ...], list[_Content]] = defaultdict(list)
    odd: list[_Content] = []
    for diff in _with_partners(differing):
        for sets in sets_within(diff):
            for position, ranks in enumerate(sets):
                content = _Content(diff.name, ranks, replicas[diff.name][ranks[0]])
                by_start[_describe_start(content.tensor, files)].append(content)
                if position:
                    odd.append(content)
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for content in odd:
        for other in by_start[_describe_start(content.tensor, files)]:
            elsewhere = other.name != content.name and not set(other.ranks) & set(content.ranks)
            if elsewhere and _hold_equal_values(content.tensor, other.tensor, files):
                found[content.name].update(dict.fromkeys(content.ranks, other.name))
                break
    return dict(found)


def _with_partners(differing: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Return the tensors of several elements that have the dtype and shape of another differing tensor."""
    alike: dict[tuple[object, ...], list[TensorDiff]] = defaultdict(list)
    for diff in differing:
        # A rank without the tensor, or a tensor of the optimizer of another shape, was not compared.
        if diff.reason is None and diff.numel > 1 and diff.extent != "one":
            alike[diff.dtype, diff.shape].append(diff)
    return [diff for diffs in alike.values() if len(diffs) > 1 for diff in diffs][:_MOST]


def _describe_start(tensor: Tensor, files: Files) -> tuple[object, ...]:
    """Return the dtype, the shape and the first bytes of a tensor."""
    return (tensor.dtype, tensor.shape, bytes(files.read(tensor, 0, min(_FIRST, tensor.numel), 0)))


def _hold_equal_values(one: Tensor, other: Tensor, files: Files) -> bool:
    """Whether two tensors have equal bytes that are not all the same element."""
    size = one.numel
    step = block_size(2)
    is_constant = True
    for start in range(0, size, step):
        count = min(step, size - start)
        block = bytes(files.read(one, start, count, 0))
        if block != bytes(files.read(other, start, count, 1)):
            return False
        width = len(block) // count
        is_constant = is_constant and block == block[:width] * count
    return not is_constant


def find_resembling(
    differing: Sequence[TensorDiff],
    cosines: Mapping[str, float | None],
    replicas: Mapping[str, Mapping[int, Tensor]],
    files: Files,
) -> dict[str, dict[int, str]]:
    """Return pairs of tensors of one rank that nearly have each other's direction, by tensor and rank.

    cosines: between the replicas of each tensor. Raises CheckpointError if a file can no longer be read.
    """
    turned = [diff for diff in differing if _has_turned(diff, cosines.get(diff.name))]
    by_shape: dict[tuple[object, ...], list[TensorDiff]] = defaultdict(list)
    for diff in _with_partners(turned):
        by_shape[diff.dtype, diff.shape].append(diff)
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for diffs in by_shape.values():
        for one, other in combinations(diffs[:_MOST_ALIKE], 2):
            for rank in _odd_ranks(one) & _odd_ranks(other):
                # Exchanged tensors are alike in both directions.
                if _is_alike(one, rank, other, replicas, files) and _is_alike(other, rank, one, replicas, files):
                    found[one.name][rank] = other.name
                    found[other.name][rank] = one.name
    return dict(found)


def _has_turned(diff: TensorDiff, cosine: float | None) -> bool:
    """Whether the replicas of a parameter have different directions. Moments of two layers may be alike by chance."""
    # Vectors begin as constants, and have the same direction by chance.
    is_parameter = diff.kind == "parameter" and diff.reason is None and len(diff.shape) > 1 and diff.numel >= _LARGE
    return is_parameter and cosine is not None and cosine < TURNED and diff.mismatched == diff.numel


def _odd_ranks(diff: TensorDiff) -> set[int]:
    """Return the ranks outside the first set of equal replicas, of each replica group."""
    return {rank for sets in sets_within(diff) for ranks in sets[1:] for rank in ranks}


def _is_alike(
    diff: TensorDiff, rank: int, other: TensorDiff, replicas: Mapping[str, Mapping[int, Tensor]], files: Files
) -> bool:
    """Whether a tensor of a rank has nearly the direction of another tensor of the first set of equal replicas."""
    first = next((sets[0][0] for sets in sets_within(other) if any(rank in ranks for ranks in sets)), None)
    if first is None:
        return False
    cosine = compute_cosine(replicas[diff.name][rank], replicas[other.name][first], files)
    return cosine is not None and cosine >= ALIKE
