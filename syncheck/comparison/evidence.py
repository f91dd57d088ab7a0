"""Collect evidence about tensors that differ: damaged files, flipped bits, vectors and exchanged contents.

The cost is small compared with the comparison, because the size and number of inspected tensors are limited.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from syncheck.comparison.exchanged import find_exchanged, find_resembling
from syncheck.comparison.vectors import MOST, block_size, compare_vectors, select_vectors
from syncheck.records import Evidence, sets_within
from syncheck.snapshots import ravel_index
from syncheck.tensors.blocks import is_plain
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.records import TensorDiff
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Checksum budget in bytes for tensors that differ in at least half of their elements, which damaged files rarely cause
# and diverged runs always do. Tensors with fewer different elements are always checked.
CHECKED = 256 << 20
# Maximum number of clusters whose bits are compared pairwise.
_PAIRED = 64
_BLOCK = 1 << 16  # bytes of a checksum at a time


def add_evidence(
    diffs: Sequence[TensorDiff], replicas: Mapping[str, Mapping[int, Tensor]], files: Files
) -> tuple[TensorDiff, ...]:
    """Return the diffs with evidence added to tensors whose bytes were compared and differ.

    replicas: tensors by name and rank. Raises CheckpointError if a file can no longer be read.
    """
    differing = [diff for diff in diffs if diff.status == "different" and diff.mismatched]
    if not differing:
        return tuple(diffs)
    fields: dict[str, dict[str, Any]] = {diff.name: {} for diff in differing}
    for name, ranks in _find_damage(differing, replicas, files).items():
        fields[name]["damaged"] = ranks
    for diff in [diff for diff in differing if diff.extent == "one" or diff.numel == 1][:MOST]:
        fields[diff.name] |= _inspect_element(diff, replicas[diff.name], files)
    for diff in [diff for diff in differing if diff.extent == "contiguous"][:MOST]:
        fields[diff.name] |= _find_start(diff, replicas[diff.name], files)
    for diff in select_vectors(differing):
        fields[diff.name] |= compare_vectors(diff, replicas[diff.name], files)
    for name, holds in find_exchanged(differing, replicas, files).items():
        fields[name]["holds"] = holds
    measured = {name: values.get("cosine") for name, values in fields.items()}
    for name, resembles in find_resembling(differing, measured, replicas, files).items():
        fields[name]["resembles"] = resembles
    return tuple(
        replace(diff, evidence=Evidence(**fields[diff.name])) if fields.get(diff.name) else diff for diff in diffs
    )


def _find_damage(
    differing: Sequence[TensorDiff], replicas: Mapping[str, Mapping[int, Tensor]], files: Files
) -> dict[str, tuple[int, ...]]:
    """Return the ranks whose bytes do not match the stored CRC-32, by tensor. A stored 0 proves nothing."""
    damaged: dict[str, tuple[int, ...]] = {}
    shared: dict[tuple[str, int], bool] = {}  # by path and offset: whether a record of several tensors is intact
    left = CHECKED
    for diff in differing:
        tensors = {rank: replicas[diff.name][rank] for ranks in diff.clusters for rank in ranks}
        # Only torch.save stores checksums.
        parts = [
            (rank, part, part.record)
            for rank, tensor in tensors.items()
            for part in ([shard.tensor for shard in tensor.shards] or [tensor])
            if part.record
        ]
        if 2 * (diff.mismatched or 0) >= diff.numel:
            sizes = {(part.path, record[1]): record[2] for _, part, record in parts}
            size = sum(sizes[key] for key in sizes.keys() - shared.keys())
            if size > left:
                continue
            left -= size
        ranks = set()
        for rank, part, record in parts:
            intact = shared.get((part.path, record[1]))
            if intact is None:
                intact = _compute_crc32(part, record, files) == record[0]
                if part.crc32 is None:  # the record contains other tensors or boxes, too
                    shared[part.path, record[1]] = intact
            if not intact:
                ranks.add(rank)
        if ranks:
            damaged[diff.name] = tuple(sorted(ranks))
    return damaged


def _compute_crc32(tensor: Tensor, record: tuple[int, int, int], files: Files) -> int:
    """Return the CRC-32 of the whole record of a tensor."""
    if tensor.crc32 is None or not is_plain(tensor):
        _, offset, size = record
        tensor = replace(
            tensor, dtype="uint8", shape=(size,), strides=(1,), offset=offset, lazy="", big_endian=False, crc32=None
        )
    crc = 0
    for start in range(0, tensor.numel, _BLOCK):
        crc = zlib.crc32(files.read(tensor, start, min(_BLOCK, tensor.numel - start), 0), crc)
    return crc


def _representatives(diff: TensorDiff, tensors: Mapping[int, Tensor]) -> dict[tuple[int, ...], Tensor]:
    """Return one tensor of each cluster, by its ranks. Empty if several replica groups differ."""
    if diff.reason is not None:  # missing on some ranks, so not all clusters were compared with each other
        return {}
    differing = sets_within(diff)
    return {ranks: tensors[ranks[0]] for ranks in differing[0]} if len(differing) == 1 else {}


def _inspect_element(diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files) -> dict[str, Any]:
    """Return the values of the only element that differs, and its flipped bits."""
    import numpy as np

    row = DTYPES[diff.dtype]
    bits = {
        ranks: bytes(files.read(tensor, ravel_index(diff.index, diff.shape), 1, 0))
        for ranks, tensor in _representatives(diff, tensors).items()
    }
    numbers = [int.from_bytes(data, "little") for data in bits.values()]
    evidence: dict[str, Any] = {}
    if 1 < len(numbers) <= _PAIRED:
        flips = [a ^ b for a, b in combinations(numbers, 2)]
        flipped = max(flip.bit_count() for flip in flips)
        evidence = {"flipped_bits": flipped, "bit": flips[0].bit_length() - 1 if flipped == 1 else None}
    if row.family == "complex":
        return evidence
    values = {}
    for ranks, data in bits.items():
        value: Any = np.frombuffer(data, row.dtype())[0]
        if row.family == "float":
            value = float(value)
            value = value if math.isfinite(value) else str(value)
        else:
            value = int(value)
        values.update(dict.fromkeys(ranks, value))
    return evidence | {"values": dict(sorted(values.items()))}


def _find_start(diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files) -> dict[str, int]:
    """Return the first of a run of adjacent elements, given the length of the run and the index of an element in it."""
    import numpy as np

    row = DTYPES[diff.dtype]
    replicas = list(_representatives(diff, tensors).values())
    if not replicas:
        return {}
    worst = ravel_index(diff.index, diff.shape)
    step = block_size(len(replicas))
    for at in range(max(0, worst - (diff.mismatched or 1) + 1), worst, step):
        count = min(step, worst - at)
        raw = [np.frombuffer(bytes(files.read(t, at, count, 0)), np.uint8) for t in replicas]
        differs = np.zeros(count, bool)
        for other in raw[1:]:  # compare bits and values: NaNs with equal bits are equal, and so are 0.0 and -0.0
            differs |= (raw[0] != other).reshape(count, -1).any(axis=1) & (
                raw[0].view(row.dtype()) != other.view(row.dtype())
            )
        if differs.any():
            return {"first": at + int(np.argmax(differs))}
    return {"first": worst}
