"""Find tensors of one rank that hold the values of another tensor of the other ranks.

For example, two layers exchange their contents if a rank registers its modules in another order, or if an optimizer
state is loaded by position. Equal bytes are a proof, unless the elements are equal: constants are the same everywhere.
After more steps, the tensors only have nearly the direction of each other.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.comparison.vectors import block_size
from syncheck.records import sets_within

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from syncheck.records import TensorDiff
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

    Vector = NDArray[Any]
    # The differing tensors of one dtype and shape.
    Partners = list[TensorDiff]

# Largest cosine of replicas with different directions, and least cosine of tensors with nearly the same direction.
TURNED, ALIKE = 0.6, 0.8
# Least number of elements with a direction of their own.
_LARGE = 64
# Elements at the start of a tensor that show its direction. They are a sample; a whole tensor takes longer to read.
_SAMPLE = 4096
# Maximum number of tensors of one shape whose directions are compared pairwise.
_MOST_ALIKE = 32
# Elements at the start of a tensor that choose the tensors to compare whole.
_FIRST = 1024
# Maximum number of differing tensors: after a long divergence all of them differ, and exchanged tensors are among many.
_MOST = 2048


class _Content(NamedTuple):
    """The values of a tensor in a set of equal replicas. is_odd: whether it is not the first set of its group."""

    name: str
    ranks: tuple[int, ...]
    tensor: Tensor
    is_odd: bool


def find_exchanged(
    differing: Sequence[TensorDiff], replicas: Mapping[str, Mapping[int, Tensor]], files: Files
) -> dict[str, dict[int, str]]:
    """Return, by tensor and rank, the tensor of other ranks whose values the rank holds.

    Raises CheckpointError if a file can no longer be read.
    """
    by_start: dict[int, list[_Content]] = defaultdict(list)
    for diff in chain.from_iterable(_group_partners(differing)):
        for content in _list_contents(diff, replicas[diff.name]):
            start = _hash_start(content.tensor, files)
            if start is not None:
                by_start[start].append(content)

    exchanged: dict[str, dict[int, str]] = defaultdict(dict)
    for contents in by_start.values():
        for content in contents:
            source = _find_source(content, contents, files)
            if source is not None:
                exchanged[content.name].update(dict.fromkeys(content.ranks, source.name))

    return dict(exchanged)


def _group_partners(differing: Iterable[TensorDiff]) -> list[Partners]:
    """Return the tensors of several elements by dtype and shape, at least two of each."""
    by_shape: dict[tuple[str, tuple[int, ...]], Partners] = defaultdict(list)
    for diff in list(differing)[:_MOST]:
        # A tensor with a reason was not compared by value on all ranks.
        if diff.reason is not None:
            continue

        # Tensors of one element, or with one different element, may be equal to other tensors by chance.
        if diff.numel > 1 and diff.extent != "one":
            by_shape[diff.dtype, diff.shape].append(diff)

    return [partners for partners in by_shape.values() if len(partners) > 1]


def _list_contents(diff: TensorDiff, tensors: Mapping[int, Tensor]) -> list[_Content]:
    """Return the contents of each set of equal replicas. tensors: by rank."""
    contents = []
    for sets in sets_within(diff):
        for position, ranks in enumerate(sets):
            content = _Content(
                diff.name,
                ranks,
                tensors[ranks[0]],
                is_odd=position > 0,
            )
            contents.append(content)

    return contents


def _hash_start(tensor: Tensor, files: Files) -> int | None:
    """Return a hash of the dtype, the shape and the first elements of a tensor; None if these are a constant."""
    count = min(_FIRST, tensor.numel)
    data = bytes(files.read(tensor, 0, count, 0))
    first_element = data[: len(data) // count]
    if data == first_element * count:
        return None

    # All bytes are compared later, so two starts with one hash only cost time.
    return hash((tensor.dtype, tensor.shape, data))


def _find_source(content: _Content, candidates: Sequence[_Content], files: Files) -> _Content | None:
    """Return another tensor of other ranks with the bytes that a rank may have moved: those outside the majority."""
    if not content.is_odd:
        return None

    for candidate in candidates:
        if candidate.name == content.name:
            continue

        # Tensors of one rank may be equal by design, for example tied weights.
        if not set(candidate.ranks).isdisjoint(content.ranks):
            continue

        if _hold_equal_bytes(content.tensor, candidate.tensor, files):
            return candidate

    return None


def _hold_equal_bytes(first: Tensor, second: Tensor, files: Files) -> bool:
    """Whether two tensors of one dtype and shape have equal bytes."""
    step = block_size(2)
    for start in range(0, first.numel, step):
        count = min(step, first.numel - start)
        block = bytes(files.read(first, start, count, 0))
        if block != bytes(files.read(second, start, count, 1)):
            return False

    return True


class _Directions(NamedTuple):
    """The first elements of a tensor of an odd rank, and of the first set of equal replicas, as unit vectors."""

    vector: Vector
    reference: Vector


def find_resembling(
    differing: Sequence[TensorDiff],
    cosines: Mapping[str, float | None],
    replicas: Mapping[str, Mapping[int, Tensor]],
    files: Files,
) -> dict[str, dict[int, str]]:
    """Return pairs of tensors of one rank that nearly have each other's direction, by tensor and rank.

    cosines: between the replicas of each tensor. Raises CheckpointError if a file can no longer be read.
    """
    resembling: dict[str, dict[int, str]] = defaultdict(dict)
    turned = [diff for diff in differing if _has_turned(diff, cosines.get(diff.name))]
    for partners in _group_partners(turned):
        by_name: dict[str, dict[int, _Directions]] = {}
        for diff in partners[:_MOST_ALIKE]:
            by_name[diff.name] = _read_directions(diff, replicas[diff.name], files)

        for name, partner in combinations(by_name, 2):
            for rank in _find_exchanging(by_name[name], by_name[partner]):
                resembling[name][rank] = partner
                resembling[partner][rank] = name

    return dict(resembling)


def _find_exchanging(first: Mapping[int, _Directions], second: Mapping[int, _Directions]) -> list[int]:
    """Return the ranks on which each of two tensors has nearly the direction of the other tensor on other ranks."""
    exchanging = []
    for rank, directions in first.items():
        partner = second.get(rank)
        if partner is None:
            continue

        # Exchanged tensors are alike in both directions.
        is_like_partner = float(directions.vector @ partner.reference) >= ALIKE
        if is_like_partner and float(partner.vector @ directions.reference) >= ALIKE:
            exchanging.append(rank)

    return exchanging


def _has_turned(diff: TensorDiff, cosine: float | None) -> bool:
    """Whether the replicas of a parameter have different directions. Moments of two layers may be alike by chance."""
    if cosine is None or cosine >= TURNED:
        return False

    if diff.kind != "parameter":
        return False

    # The contents of another tensor differ in all elements.
    if diff.mismatched != diff.numel:
        return False

    # Vectors begin as constants, and have the same direction by chance.
    if len(diff.shape) < 2:
        return False

    return diff.numel >= _LARGE


def _read_unit_vector(tensor: Tensor, files: Files) -> Vector:
    """Return the first elements of a tensor with a norm of 1; not finite numbers and zero vectors stay as they are."""
    import numpy as np

    from syncheck.tensors.differences import read_float64

    count = min(_SAMPLE, tensor.numel)
    vector = read_float64(tensor, files, 0, count, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.sqrt(vector @ vector))
        # A comparison with NaN is false, so a vector that is not finite is like no other vector.
        unit: Vector = vector / norm if norm else vector

    return unit


def _read_directions(diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files) -> dict[int, _Directions]:
    """Return the directions of a tensor by odd rank."""
    directions: dict[int, _Directions] = {}
    for first, *odd_sets in sets_within(diff):
        reference = _read_unit_vector(tensors[first[0]], files)
        for ranks in odd_sets:
            vector = _read_unit_vector(tensors[ranks[0]], files)
            directions |= dict.fromkeys(ranks, _Directions(vector, reference))

    return directions
