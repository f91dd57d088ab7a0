"""Compare differing tensors as vectors: norms, cosines, and the shares of smaller and of zero elements.

One pass over the first `MEASURED` elements of a replica of each set of equal replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from syncheck.findings import FIRST_MOMENTS, MEASURED, SECOND_MOMENTS
from syncheck.records import sets_within
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from syncheck.records import TensorDiff
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

    Array = NDArray[Any]

# Maximum number of measured tensors of each kind: they are enough to show a cause.
MOST = 512
_BLOCK = 1 << 16  # elements
_ALL_BLOCKS = 1 << 20  # elements of the blocks of all replicas


def select_vectors(differing: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Return the first `MOST` floating-point parameters, buffers, first and second moments each."""
    by_kind: dict[str, list[TensorDiff]] = {"parameter": [], "buffer": [], "first": [], "second": []}
    for diff in differing:
        kind = _moment_of(diff) or diff.kind
        if kind in by_kind and DTYPES[diff.dtype].family == "float" and len(by_kind[kind]) < MOST:
            by_kind[kind].append(diff)

    return list(chain.from_iterable(by_kind.values()))


def _moment_of(diff: TensorDiff) -> str | None:
    """Return "first" or "second" for a running average of gradients or of their squares, else None."""
    state = diff.name.rpartition(".")[2] if diff.kind == "optimizer" else ""
    return "first" if state in FIRST_MOMENTS else "second" if state in SECOND_MOMENTS else None


def compare_vectors(diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files) -> dict[str, Any]:
    """Return the fields norms, cosine, smaller and zeroed of the evidence on a tensor. tensors: by rank."""
    norms: dict[int, float] = {}
    cosines: list[float] = []
    shares: dict[str, dict[int, float]] = {"smaller": {}, "zeroed": {}}
    for sets in sets_within(diff):
        sums = _sum_over_blocks([tensors[ranks[0]] for ranks in sets], files)
        for position, ranks in enumerate(sets):
            if (norm := sums.norm(position)) is not None:
                norms.update(dict.fromkeys(ranks, norm))

            if position == 0:
                continue

            if (cosine := sums.cosine(position)) is not None:
                cosines.append(cosine)

            if not (differing := sums.differing[position]):
                continue

            if _moment_of(diff) == "second":
                shares["smaller"].update(dict.fromkeys(ranks, sums.smaller[position] / differing))

            if diff.kind == "parameter":
                _add_zeros(shares["zeroed"], sets[0], sums.zeros_of_first[position] / differing)
                _add_zeros(shares["zeroed"], ranks, sums.zeros[position] / differing)

    ordered = {name: dict(sorted(by_rank.items())) for name, by_rank in shares.items()}
    return {"norms": dict(sorted(norms.items())), "cosine": min(cosines, default=None), **ordered}


def _add_zeros(zeroed: dict[int, float], ranks: Sequence[int], share: float) -> None:
    """Keep the largest share of zeros of these ranks, if there are any."""
    for rank in ranks:
        if share > zeroed.get(rank, 0.0):
            zeroed[rank] = share


@dataclass
class _Sums:
    """Sums over the elements of several tensors, by their position. The tensor at position 0 is the first.

    differing, smaller, zeros: numbers of elements that differ from the first tensor, are smaller, and are zero instead.
    zeros_of_first: differing elements that are zero in the first tensor.
    """

    count: int
    squares: list[float] = field(init=False)
    products: list[float] = field(init=False)
    differing: list[int] = field(init=False)
    smaller: list[int] = field(init=False)
    zeros: list[int] = field(init=False)
    zeros_of_first: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.squares, self.products = [0.0] * self.count, [0.0] * self.count
        self.differing, self.smaller = [0] * self.count, [0] * self.count
        self.zeros, self.zeros_of_first = [0] * self.count, [0] * self.count

    def add(self, position: int, first: Array, array: Array) -> None:
        """Add a block of elements of a tensor, and the same block of the first tensor."""
        self.squares[position] += float(array @ array)
        self.products[position] += float(first @ array)
        if position:
            differs = first != array
            self.differing[position] += int(differs.sum())
            self.smaller[position] += int((array < first).sum())
            self.zeros[position] += int((differs & (array == 0)).sum())
            self.zeros_of_first[position] += int((differs & (first == 0)).sum())

    def norm(self, position: int) -> float | None:
        """Return the Euclidean norm of a tensor; None on overflow."""
        square = self.squares[position]
        return math.sqrt(square) if math.isfinite(square) else None

    def cosine(self, position: int) -> float | None:
        """Return the cosine between a tensor and the first tensor; None for a zero tensor, and on overflow."""
        scale = math.sqrt(self.squares[0]) * math.sqrt(self.squares[position])
        if not scale or not math.isfinite(self.products[position] / scale):
            return None

        return max(-1.0, min(1.0, self.products[position] / scale))


def _sum_over_blocks(tensors: Sequence[Tensor], files: Files) -> _Sums:
    """Return the sums over the elements that are finite in all tensors."""
    import numpy as np

    from syncheck.tensors.differences import read_float64

    sums = _Sums(len(tensors))
    size = min(tensors[0].numel, MEASURED)
    step = block_size(len(tensors))
    for start in range(0, size, step):
        arrays = [read_float64(t, files, start, min(step, size - start), slot) for slot, t in enumerate(tensors)]
        with np.errstate(over="ignore", invalid="ignore"):  # products may overflow to infinities of both signs
            if not all(math.isfinite(float(array @ array)) for array in arrays):
                finite = np.logical_and.reduce([np.isfinite(array) for array in arrays])
                arrays = [array[finite] for array in arrays]

            for position, array in enumerate(arrays):
                sums.add(position, arrays[0], array)

    return sums


def block_size(replicas: int) -> int:
    """Return the number of elements to read at a time from each replica."""
    return max(1024, min(_BLOCK, _ALL_BLOCKS // replicas))
