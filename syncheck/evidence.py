"""A second look at tensors that differ, for what points to a cause: who is damaged, which bits, in what direction.

It costs little beside the comparison: large tensors are looked at in part, and of very many only the first.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from syncheck.dtypes import DTYPES
from syncheck.records import Evidence

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.blocks import Files
    from syncheck.records import TensorDiff
    from syncheck.snapshots import Tensor

# The running averages of the gradients in torch's optimizers, and in those that follow its names.
FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer"})
# Tensors of a kind whose norms, or single values, are taken; a cause that shows in these shows in all.
MOST = 512
ELEMENTS = 1 << 20
# Bytes of tensors that differ nearly everywhere whose checksums are computed: a damaged file seldom looks like that,
# a run that went apart always does. What differs in less than half of its elements is always looked at.
CHECKED = 256 << 20
_BLOCK = 1 << 16  # elements


def gather(
    diffs: Sequence[TensorDiff], found: Mapping[str, Mapping[int, Tensor]], files: Files
) -> tuple[TensorDiff, ...]:
    """Return the diffs, those that were compared by their bytes and differ with evidence. found: tensors by name, rank.

    Raises CheckpointError when a file can no longer be read.
    """
    apart = [diff for diff in diffs if diff.status == "different" and diff.mismatched]
    if not apart:
        return tuple(diffs)
    fields: dict[str, dict[str, Any]] = {diff.name: {} for diff in apart}
    for diff in _to_check(apart):
        damaged = _damaged(diff, found[diff.name], files)
        if damaged:
            fields[diff.name]["damaged"] = damaged
    for diff in [diff for diff in apart if diff.extent == "one" or diff.numel == 1][:MOST]:
        fields[diff.name] |= _single(diff, found[diff.name], files)
    for diff in _first_of_each(apart):
        fields[diff.name] |= _directions(diff, found[diff.name], files)
    return tuple(
        replace(diff, evidence=Evidence(**fields[diff.name])) if fields.get(diff.name) else diff for diff in diffs
    )


def _first_of_each(apart: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Return the floating-point parameters and first moments, so many of each that a pattern shows."""
    by_kind: dict[str, list[TensorDiff]] = {"parameter": [], "moment": []}
    for diff in apart:
        kind = "moment" if diff.kind == "optimizer" and diff.name.rpartition(".")[2] in FIRST_MOMENTS else diff.kind
        if kind in by_kind and DTYPES[diff.dtype].family == "float" and len(by_kind[kind]) < MOST:
            by_kind[kind].append(diff)
    return [diff for diffs in by_kind.values() for diff in diffs]


def _to_check(apart: Sequence[TensorDiff]) -> list[TensorDiff]:
    chosen, left = [], CHECKED
    for diff in apart:
        if 2 * (diff.mismatched or 0) >= diff.numel:
            size = diff.numel * DTYPES[diff.dtype].size * sum(map(len, diff.clusters))
            if size > left:
                continue
            left -= size
        chosen.append(diff)
    return chosen


def _damaged(diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files) -> tuple[int, ...]:
    """Return the ranks whose bytes are not those that were saved. A stored 0 proves nothing."""
    told = (rank for ranks in diff.clusters for rank in ranks)
    return tuple(
        sorted(rank for rank in told if tensors[rank].crc32 and _crc32(tensors[rank], files) != tensors[rank].crc32)
    )


def _crc32(tensor: Tensor, files: Files) -> int:
    """Compute the CRC-32 of a tensor's record as it lies in the file, whatever its strides are."""
    size = tensor.numel * DTYPES[tensor.dtype].size
    raw = replace(tensor, dtype="uint8", shape=(size,), strides=(1,), lazy="", big_endian=False)
    crc = 0
    for start in range(0, size, 4 * _BLOCK):
        crc = zlib.crc32(files.read(raw, start, min(4 * _BLOCK, size - start), 0), crc)
    return crc


def _single(diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files) -> dict[str, Any]:
    """Read the one element that differs, of each rank of which the comparison told."""
    import numpy as np

    row = DTYPES[diff.dtype]
    flat = 0
    for at, size in zip(diff.index or (0,) * len(diff.shape), diff.shape, strict=True):
        flat = flat * size + at
    bits = {ranks: bytes(files.read(tensors[ranks[0]], flat, 1, 0)) for ranks in diff.clusters if ranks[0] in tensors}
    numbers = {ranks: int.from_bytes(data, "little") for ranks, data in bits.items()}
    flipped = max(((a ^ b).bit_count() for a, b in combinations(numbers.values(), 2)), default=None)
    if row.family == "complex":
        return {"flipped_bits": flipped}
    values = {}
    for ranks, data in bits.items():
        value: Any = np.frombuffer(data, row.dtype())[0]
        if row.family == "float":
            value = float(value)
            value = value if math.isfinite(value) else str(value)
        else:
            value = int(value)
        values.update(dict.fromkeys(ranks, value))
    return {"values": dict(sorted(values.items())), "flipped_bits": flipped}


def _directions(diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files) -> dict[str, Any]:
    """Compute norms, and how far the replicas point in one direction, of a majority's replica against each other."""
    import numpy as np

    from syncheck.float_gaps import widened

    row = DTYPES[diff.dtype]
    norms: dict[int, float] = {}
    cosines = []
    for group in diff.replica_groups:
        sets = [ranks for ranks in diff.clusters if set(ranks) <= set(group)]
        if len(sets) < 2:
            continue
        first, *others = (tensors[ranks[0]] for ranks in sets)
        squares, products = [0.0] * len(sets), [0.0] * len(others)
        for start in range(0, min(first.numel, ELEMENTS), _BLOCK):
            count = min(_BLOCK, first.numel - start)
            blocks = [bytes(files.read(t, start, count, 0)) for t in (first, *others)]
            arrays = [widened(row, np.frombuffer(block, row.dtype())).astype(np.float64) for block in blocks]
            finite = np.logical_and.reduce([np.isfinite(array) for array in arrays])
            arrays = [array[finite] for array in arrays]
            with np.errstate(over="ignore", invalid="ignore"):
                squares = [total + float(a @ a) for total, a in zip(squares, arrays, strict=True)]
                products = [total + float(arrays[0] @ a) for total, a in zip(products, arrays[1:], strict=True)]
        for ranks, square in zip(sets, squares, strict=True):
            if math.isfinite(square):
                norms.update(dict.fromkeys(ranks, math.sqrt(square)))
        for product, square in zip(products, squares[1:], strict=True):
            scale = math.sqrt(squares[0]) * math.sqrt(square)
            if scale and math.isfinite(product / scale):
                cosines.append(max(-1.0, min(1.0, product / scale)))
    return {"norms": dict(sorted(norms.items())), "cosine": min(cosines, default=None)}
