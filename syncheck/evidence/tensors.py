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
from syncheck.evidence.suspects import sets_within
from syncheck.kernel.blocks import is_plain
from syncheck.records import FIRST_MOMENTS, MEASURED, Evidence
from syncheck.snapshots import flat_index

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.dtypes import DType
    from syncheck.kernel.blocks import Files
    from syncheck.records import TensorDiff
    from syncheck.snapshots import Tensor

# Tensors of a kind whose norms, or single values, are taken; a cause that shows in these shows in all.
MOST = 512
# Bytes of tensors that differ nearly everywhere whose checksums are computed: a damaged file seldom looks like that,
# a run that went apart always does. What differs in less than half of its elements is always looked at.
CHECKED = 256 << 20
# Sets of equal replicas of which every two are held against each other, bit by bit; of more, none.
_PAIRED = 64
_BLOCK = 1 << 16  # elements
_ALL_BLOCKS = 1 << 20  # elements of all replicas' blocks together


def add_evidence(
    diffs: Sequence[TensorDiff], found: Mapping[str, Mapping[int, Tensor]], files: Files
) -> tuple[TensorDiff, ...]:
    """Return the diffs, those that were compared by their bytes and differ with evidence. found: tensors by name, rank.

    Raises CheckpointError when a file can no longer be read.
    """
    apart = [diff for diff in diffs if diff.status == "different" and diff.mismatched]
    if not apart:
        return tuple(diffs)
    fields: dict[str, dict[str, Any]] = {diff.name: {} for diff in apart}
    for name, ranks in _damage(apart, found, files).items():
        fields[name]["damaged"] = ranks
    for diff in [diff for diff in apart if diff.extent == "one" or diff.numel == 1][:MOST]:
        fields[diff.name] |= _single(diff, found[diff.name], files)
    for diff in [diff for diff in apart if diff.extent == "contiguous"][:MOST]:
        fields[diff.name] |= _start(diff, found[diff.name], files)
    for diff in _first_of_each(apart):
        fields[diff.name] |= _directions(diff, found[diff.name], files)
    return tuple(
        replace(diff, evidence=Evidence(**fields[diff.name])) if fields.get(diff.name) else diff for diff in diffs
    )


def _first_of_each(apart: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Return the floating-point parameters, buffers and first moments, so many of each that a pattern shows."""
    by_kind: dict[str, list[TensorDiff]] = {"parameter": [], "buffer": [], "moment": []}
    for diff in apart:
        kind = "moment" if diff.kind == "optimizer" and diff.name.rpartition(".")[2] in FIRST_MOMENTS else diff.kind
        if kind in by_kind and DTYPES[diff.dtype].family == "float" and len(by_kind[kind]) < MOST:
            by_kind[kind].append(diff)
    return [diff for diffs in by_kind.values() for diff in diffs]


def _damage(
    apart: Sequence[TensorDiff], found: Mapping[str, Mapping[int, Tensor]], files: Files
) -> dict[str, tuple[int, ...]]:
    """Return the ranks whose records are not those that were saved, by tensor. A stored 0 proves nothing."""
    damaged: dict[str, tuple[int, ...]] = {}
    shared: dict[tuple[str, int], bool] = {}  # whether a record of several tensors is what was saved, by its place
    left = CHECKED
    for diff in apart:
        tensors = {rank: found[diff.name][rank] for ranks in diff.clusters for rank in ranks}
        # torch.save stores checksums, and others do not: of most formats nothing is left here.
        records = {rank: (tensor.path, tensor.record) for rank, tensor in tensors.items() if tensor.record}
        if 2 * (diff.mismatched or 0) >= diff.numel:
            size = sum(record[2] for path, record in records.values() if (path, record[1]) not in shared)
            if size > left:
                continue
            left -= size
        wrong = []
        for rank, (path, record) in records.items():
            sound = shared.get((path, record[1]))
            if sound is None:
                sound = _crc32(tensors[rank], record, files) == record[0]
                if tensors[rank].crc32 is None:  # others lie in it too
                    shared[path, record[1]] = sound
            if not sound:
                wrong.append(rank)
        if wrong:
            damaged[diff.name] = tuple(sorted(wrong))
    return damaged


def _crc32(tensor: Tensor, record: tuple[int, int, int], files: Files) -> int:
    """Compute the CRC-32 of a tensor's record as it lies in the file, whatever of it the tensor shows."""
    if tensor.crc32 is None or not is_plain(tensor):
        _, offset, size = record
        tensor = replace(
            tensor, dtype="uint8", shape=(size,), strides=(1,), offset=offset, lazy="", big_endian=False, crc32=None
        )
    crc = 0
    for start in range(0, tensor.numel, _BLOCK):
        crc = zlib.crc32(files.read(tensor, start, min(_BLOCK, tensor.numel - start), 0), crc)
    return crc


def _sides(diff: TensorDiff, tensors: Mapping[int, Tensor]) -> dict[tuple[int, ...], Tensor]:
    """Return one tensor of each set of ranks that agree; none where several replica groups differ, each elsewhere."""
    if diff.reason is not None:  # missing on some ranks: then not all of its sets were compared with each other
        return {}
    differing = sets_within(diff)
    return {ranks: tensors[ranks[0]] for ranks in differing[0]} if len(differing) == 1 else {}


def _step(replicas: int) -> int:
    """Return how many elements to read at a time of each of so many replicas."""
    return max(1024, min(_BLOCK, _ALL_BLOCKS // replicas))


def _single(diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files) -> dict[str, Any]:
    """Read the one element that differs, of each rank of which the comparison told."""
    import numpy as np

    row = DTYPES[diff.dtype]
    sides = _sides(diff, tensors)
    bits = {
        ranks: bytes(files.read(tensor, flat_index(diff.index, diff.shape), 1, 0)) for ranks, tensor in sides.items()
    }
    numbers = [int.from_bytes(data, "little") for data in bits.values()]
    known: dict[str, Any] = {}
    if 1 < len(numbers) <= _PAIRED:
        flips = [a ^ b for a, b in combinations(numbers, 2)]
        flipped = max(flip.bit_count() for flip in flips)
        known = {"flipped_bits": flipped, "bit": flips[0].bit_length() - 1 if flipped == 1 else None}
    if row.family == "complex":
        return known
    values = {}
    for ranks, data in bits.items():
        value: Any = np.frombuffer(data, row.dtype())[0]
        if row.family == "float":
            value = float(value)
            value = value if math.isfinite(value) else str(value)
        else:
            value = int(value)
        values.update(dict.fromkeys(ranks, value))
    return known | {"values": dict(sorted(values.items()))}


def _start(diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files) -> dict[str, int]:
    """Find where a run of adjacent elements begins, of which the comparison told the length and one element."""
    import numpy as np

    row = DTYPES[diff.dtype]
    sides = list(_sides(diff, tensors).values())
    if not sides:
        return {}
    worst = flat_index(diff.index, diff.shape)
    step = _step(len(sides))
    for at in range(max(0, worst - (diff.mismatched or 1) + 1), worst, step):
        count = min(step, worst - at)
        raw = [np.frombuffer(bytes(files.read(t, at, count, 0)), np.uint8) for t in sides]
        differs = np.zeros(count, bool)
        for other in raw[1:]:  # neither NaNs of equal bits nor zeros of either sign differ
            differs |= (raw[0] != other).reshape(count, -1).any(axis=1) & (
                raw[0].view(row.dtype()) != other.view(row.dtype())
            )
        if differs.any():
            return {"first": at + int(np.argmax(differs))}
    return {"first": worst}


def _directions(diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files) -> dict[str, Any]:
    """Compute the norm of each set of replicas, and the cosine of the first set, a majority if any, with each other."""
    norms: dict[int, float] = {}
    cosines = []
    for sets in sets_within(diff):
        squares, products = _sums(DTYPES[diff.dtype], [tensors[ranks[0]] for ranks in sets], files)
        for ranks, square in zip(sets, squares, strict=True):
            if math.isfinite(square):
                norms.update(dict.fromkeys(ranks, math.sqrt(square)))
        for product, square in zip(products, squares[1:], strict=True):
            scale = math.sqrt(squares[0]) * math.sqrt(square)
            if scale and math.isfinite(product / scale):
                cosines.append(max(-1.0, min(1.0, product / scale)))
    return {"norms": dict(sorted(norms.items())), "cosine": min(cosines, default=None)}


def _sums(row: DType, tensors: Sequence[Tensor], files: Files) -> tuple[list[float], list[float]]:
    """Sum the squares of each tensor, and its products with the first, over elements that are finite in all."""
    import numpy as np

    from syncheck.differences.floats import widen

    squares, products = [0.0] * len(tensors), [0.0] * (len(tensors) - 1)
    size = min(tensors[0].numel, MEASURED)
    step = _step(len(tensors))
    for start in range(0, size, step):
        blocks = [files.read(t, start, min(step, size - start), slot) for slot, t in enumerate(tensors)]
        with np.errstate(over="ignore", invalid="ignore"):  # a signalling NaN is invalid to convert
            arrays = [widen(row, np.frombuffer(block, row.dtype())).astype(np.float64) for block in blocks]
            own = [float(array @ array) for array in arrays]
            if not all(map(math.isfinite, own)):
                finite = np.logical_and.reduce([np.isfinite(array) for array in arrays])
                arrays = [array[finite] for array in arrays]
                own = [float(array @ array) for array in arrays]
            squares = [total + square for total, square in zip(squares, own, strict=True)]
            products = [total + float(arrays[0] @ a) for total, a in zip(products, arrays[1:], strict=True)]
    return squares, products
