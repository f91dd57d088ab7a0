"""Compare differing tensors as vectors: norms, cosines, and the shares of smaller and of zero elements.

One pass over the first `MEASURED` elements of a replica of each set of equal replicas.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from syncheck.findings import FIRST_MOMENTS, MEASURED, SECOND_MOMENTS
from syncheck.frozen import mutable_record
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
# The last parts of the names of running averages of gradients, and of their squares.
_MOMENTS = dict.fromkeys(FIRST_MOMENTS, "first") | dict.fromkeys(SECOND_MOMENTS, "second")
_BLOCK = 1 << 16  # elements
_ALL_BLOCKS = 1 << 20  # elements of the blocks of all replicas


def select_vectors(differing: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Return the first `MOST` floating-point parameters, buffers, first and second moments each."""
    by_kind: dict[str, list[TensorDiff]] = {
        "parameter": [],
        "buffer": [],
        "first": [],
        "second": [],
    }
    for diff in differing:
        kind = _moment_of(diff) or diff.kind
        if kind in by_kind and DTYPES[diff.dtype].family == "float":
            by_kind[kind].append(diff)

    selected = []
    for diffs in by_kind.values():
        selected += diffs[:MOST]

    return selected


def _moment_of(diff: TensorDiff) -> str | None:
    """Return "first" or "second" for a running average of gradients or of their squares, else None."""
    if diff.kind != "optimizer":
        return None

    state = diff.name.rpartition(".")[2]
    return _MOMENTS.get(state)


def compare_vectors(diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files) -> dict[str, Any]:
    """Return the fields norms, cosine, smaller and zeroed of the evidence on a tensor. tensors: by rank."""
    norms: dict[int, float] = {}
    cosines: list[float] = []
    smaller: dict[int, float] = {}
    zeroed: dict[int, float] = {}
    for sets in sets_within(diff):
        sums_of_sets = _sum_over_blocks([tensors[ranks[0]] for ranks in sets], files)
        for ranks, sums in zip(sets, sums_of_sets, strict=True):
            if math.isfinite(sums.square):
                norms |= dict.fromkeys(ranks, math.sqrt(sums.square))

        for ranks, sums in zip(sets[1:], sums_of_sets[1:], strict=True):
            cosine = sums.cosine(sums_of_sets[0])
            if cosine is not None:
                cosines.append(cosine)

            if not sums.differing:
                continue

            if _moment_of(diff) == "second":
                smaller |= dict.fromkeys(ranks, sums.smaller / sums.differing)

            if diff.kind == "parameter":
                _add_zeros(zeroed, sets[0], sums.zeros_of_first / sums.differing)
                _add_zeros(zeroed, ranks, sums.zeros / sums.differing)

    return {
        "norms": dict(sorted(norms.items())),
        "cosine": min(cosines, default=None),
        "smaller": dict(sorted(smaller.items())),
        "zeroed": dict(sorted(zeroed.items())),
    }


def _add_zeros(zeroed: dict[int, float], ranks: Sequence[int], share: float) -> None:
    """Keep the largest share of zeros of these ranks, if there are any."""
    for rank in ranks:
        if share > zeroed.get(rank, 0.0):
            zeroed[rank] = share


@mutable_record
class _Sums:
    """Sums over the elements of one tensor, and beside the elements of the first tensor of its replica group.

    square: of the tensor with itself.
    product: with the first tensor.
    differing: number of elements that differ from the first tensor.
    smaller: differing elements that are smaller than in the first tensor.
    zeros: differing elements that are zero.
    zeros_of_first: differing elements that are zero in the first tensor.
    """

    square: float = 0.0
    product: float = 0.0
    differing: int = 0
    smaller: int = 0
    zeros: int = 0
    zeros_of_first: int = 0

    def add(self, first: Array, array: Array) -> None:
        """Add a block of elements of a tensor, and the same block of the first tensor."""
        self.square += float(array @ array)
        self.product += float(first @ array)
        # The first tensor does not differ from itself.
        if array is first:
            return

        differs = first != array
        self.differing += int(differs.sum())
        self.smaller += int((array < first).sum())
        self.zeros += int((differs & (array == 0)).sum())
        self.zeros_of_first += int((differs & (first == 0)).sum())

    def cosine(self, first: _Sums) -> float | None:
        """Return the cosine between a tensor and the first tensor; None for a zero tensor, and on overflow."""
        scale = math.sqrt(first.square) * math.sqrt(self.square)
        if not scale or not math.isfinite(self.product / scale):
            return None

        return max(-1.0, min(1.0, self.product / scale))


def _sum_over_blocks(tensors: Sequence[Tensor], files: Files) -> list[_Sums]:
    """Return the sums of each tensor over the elements that are finite in all tensors."""
    import numpy as np

    from syncheck.tensors.differences import read_float64

    sums = [_Sums() for _ in tensors]
    size = min(tensors[0].numel, MEASURED)
    step = block_size(len(tensors))
    for start in range(0, size, step):
        count = min(step, size - start)
        arrays = [read_float64(tensor, files, start, count, slot) for slot, tensor in enumerate(tensors)]
        # Products may overflow to infinities of both signs.
        with np.errstate(over="ignore", invalid="ignore"):
            if not all(math.isfinite(float(array @ array)) for array in arrays):
                finite = np.logical_and.reduce([np.isfinite(array) for array in arrays])
                arrays = [array[finite] for array in arrays]

            for sums_of_tensor, array in zip(sums, arrays, strict=True):
                sums_of_tensor.add(arrays[0], array)

    return sums


def block_size(replicas: int) -> int:
    """Return the number of elements to read at a time from each replica."""
    return max(1024, min(_BLOCK, _ALL_BLOCKS // replicas))
