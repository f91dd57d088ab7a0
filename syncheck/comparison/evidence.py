"""Collect evidence about tensors that differ: damaged files, flipped bits, vectors and exchanged contents.

The cost is small compared with the comparison, because the size and number of inspected tensors are limited.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.comparison.exchanged import find_exchanged, find_resembling
from syncheck.comparison.vectors import MOST, block_size, compare_vectors, select_vectors
from syncheck.records import Evidence, sets_within
from syncheck.snapshots import ravel_index
from syncheck.tensors.blocks import is_plain
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.records import TensorDiff
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

    _Inspect = Callable[[TensorDiff, Mapping[int, Tensor], Files], dict[str, Any]]
    """Returns fields of the evidence on a tensor, given its replicas by rank."""

# Checksum budget in bytes for tensors that differ in at least half of their elements, which damaged files rarely cause
# and diverged runs always do. Tensors with fewer different elements are always checked.
CHECKED = 256 << 20
# Maximum number of clusters whose bits are compared pairwise.
_PAIRED = 64
_BLOCK = 1 << 16  # bytes of a checksum at a time


def collect_evidence(
    diffs: Sequence[TensorDiff], replicas: Mapping[str, Mapping[int, Tensor]], files: Files
) -> dict[str, Evidence]:
    """Return evidence about the tensors whose bytes were compared and differ, by name.

    replicas: tensors by name and rank. Raises CheckpointError if a file can no longer be read.
    """
    differing = [diff for diff in diffs if diff.status == "different" and diff.mismatched]
    fields = _inspect_tensors(differing, replicas, files)
    for name, ranks in _find_damage(differing, replicas, files).items():
        fields[name]["damaged"] = ranks

    # Tensors of different names resemble each other by their cosines, so these searches come last.
    for name, holds in find_exchanged(differing, replicas, files).items():
        fields[name]["holds"] = holds

    cosines = {name: fields_of_tensor.get("cosine") for name, fields_of_tensor in fields.items()}
    resembling = find_resembling(
        differing,
        cosines,
        replicas,
        files,
    )
    for name, resembles in resembling.items():
        fields[name]["resembles"] = resembles

    return {name: Evidence(**fields_of_tensor) for name, fields_of_tensor in fields.items() if fields_of_tensor}


def _inspect_tensors(
    differing: Sequence[TensorDiff], replicas: Mapping[str, Mapping[int, Tensor]], files: Files
) -> dict[str, dict[str, Any]]:
    """Return the fields of the evidence on single tensors, by name. The first tensors of each kind are enough."""
    single_elements = [diff for diff in differing if diff.extent == "one" or diff.numel == 1]
    contiguous_elements = [diff for diff in differing if diff.extent == "contiguous"]
    searches: tuple[tuple[_Inspect, Sequence[TensorDiff]], ...] = (
        (_inspect_element, single_elements[:MOST]),
        (_find_start, contiguous_elements[:MOST]),
        (compare_vectors, select_vectors(differing)),
    )
    fields: dict[str, dict[str, Any]] = {diff.name: {} for diff in differing}
    for inspect, diffs in searches:
        for diff in diffs:
            fields[diff.name] |= inspect(diff, replicas[diff.name], files)

    return fields


class _Record(NamedTuple):
    """The bytes of a tensor, or of a box of it, in a record with a checksum.

    rank: of the file.
    tensor: as stored.
    crc32, offset, size: of the record. A stored 0 proves nothing.
    """

    rank: int
    tensor: Tensor
    crc32: int
    offset: int
    size: int

    @property
    def key(self) -> tuple[str, int]:
        """The file and the position of the record."""
        return self.tensor.path, self.offset


def _find_damage(
    differing: Sequence[TensorDiff], replicas: Mapping[str, Mapping[int, Tensor]], files: Files
) -> dict[str, tuple[int, ...]]:
    """Return the ranks whose bytes do not match the stored CRC-32, by tensor."""
    damaged: dict[str, tuple[int, ...]] = {}
    # Whether a record of several tensors is intact.
    shared_records: dict[tuple[str, int], bool] = {}
    budget = CHECKED
    for diff in differing:
        records = _list_records(diff, replicas[diff.name])
        if 2 * (diff.mismatched or 0) >= diff.numel:
            sizes = {record.key: record.size for record in records if record.key not in shared_records}
            size = sum(sizes.values())
            if size > budget:
                continue

            budget -= size

        damaged_ranks = set()
        for record in records:
            if not _is_intact(record, shared_records, files):
                damaged_ranks.add(record.rank)

        if damaged_ranks:
            damaged[diff.name] = tuple(sorted(damaged_ranks))

    return damaged


def _list_records(diff: TensorDiff, tensors: Mapping[int, Tensor]) -> list[_Record]:
    """Return the records with checksums of a tensor on all ranks. Only torch.save stores checksums."""
    records = []
    for rank in chain.from_iterable(diff.clusters):
        tensor = tensors[rank]
        boxes = [shard.tensor for shard in tensor.shards] or [tensor]
        records += [_Record(rank, box, *box.record) for box in boxes if box.record]

    return records


def _is_intact(record: _Record, shared_records: dict[tuple[str, int], bool], files: Files) -> bool:
    """Whether the bytes of a record match its checksum. shared_records: known results; changed."""
    is_intact = shared_records.get(record.key)
    if is_intact is None:
        is_intact = _compute_crc32(record, files) == record.crc32
        # Without its own checksum, the tensor shares the record with other tensors or boxes.
        if record.tensor.crc32 is None:
            shared_records[record.key] = is_intact

    return is_intact


def _compute_crc32(record: _Record, files: Files) -> int:
    """Return the CRC-32 of a whole record."""
    tensor = record.tensor
    if tensor.crc32 is None or not is_plain(tensor):
        tensor = replace(
            tensor,
            dtype="uint8",
            shape=(record.size,),
            strides=(1,),
            offset=record.offset,
            lazy="",
            big_endian=False,
            crc32=None,
        )

    crc = 0
    for start in range(0, tensor.numel, _BLOCK):
        count = min(_BLOCK, tensor.numel - start)
        crc = zlib.crc32(files.read(tensor, start, count, 0), crc)

    return crc


def _representatives(diff: TensorDiff, tensors: Mapping[int, Tensor]) -> dict[tuple[int, ...], Tensor]:
    """Return one tensor of each cluster, by its ranks. Empty if several replica groups differ."""
    # If some ranks lack it, not all clusters were compared with each other.
    if diff.reason is not None:
        return {}

    differing_sets = sets_within(diff)
    if len(differing_sets) != 1:
        return {}

    return {ranks: tensors[ranks[0]] for ranks in differing_sets[0]}


def _inspect_element(diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files) -> dict[str, Any]:
    """Return the values of the only element that differs, and its flipped bits."""
    position = ravel_index(diff.index, diff.shape)
    bits: dict[tuple[int, ...], bytes] = {}
    for ranks, tensor in _representatives(diff, tensors).items():
        bits[ranks] = bytes(files.read(tensor, position, 1, 0))

    patterns = [int.from_bytes(data, "little") for data in bits.values()]
    evidence = _compare_bits(patterns)
    if DTYPES[diff.dtype].family == "complex":
        return evidence

    values: dict[int, Any] = {}
    for ranks, data in bits.items():
        values |= dict.fromkeys(ranks, _decode(data, diff.dtype))

    return evidence | {"values": dict(sorted(values.items()))}


def _compare_bits(patterns: Sequence[int]) -> dict[str, Any]:
    """Return the most flipped bits between two elements, and the position of a single flipped bit."""
    if not 1 < len(patterns) <= _PAIRED:
        return {}

    # The largest number counts, so that a single flipped bit is certain between all clusters.
    flips = [first ^ second for first, second in combinations(patterns, 2)]
    flipped_bits = max(flip.bit_count() for flip in flips)
    bit = None
    if flipped_bits == 1:
        bit = flips[0].bit_length() - 1

    return {"flipped_bits": flipped_bits, "bit": bit}


def _decode(data: bytes, dtype: str) -> Any:
    """Return the number in the bytes of an element; a text for NaN and infinity, which JSON lacks."""
    import numpy as np

    row = DTYPES[dtype]
    number: Any = np.frombuffer(data, row.dtype())[0]
    if row.family != "float":
        return int(number)

    number = float(number)
    return number if math.isfinite(number) else str(number)


def _find_start(diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files) -> dict[str, int]:
    """Return the first of a run of adjacent elements, given the length of the run and the index of an element in it."""
    import numpy as np

    replicas = list(_representatives(diff, tensors).values())
    if not replicas:
        return {}

    numbers = DTYPES[diff.dtype].dtype()
    worst = ravel_index(diff.index, diff.shape)
    earliest = max(0, worst - (diff.mismatched or 1) + 1)
    step = block_size(len(replicas))
    for start in range(earliest, worst, step):
        count = min(step, worst - start)
        blocks = []
        for tensor in replicas:
            data = bytes(files.read(tensor, start, count, 0))
            blocks.append(np.frombuffer(data, np.uint8))

        first, *later = blocks
        differs = np.zeros(count, bool)
        for block in later:
            # Bits and values: NaNs with equal bits are equal, and so are 0.0 and -0.0.
            has_other_bits = (first != block).reshape(count, -1).any(axis=1)
            differs |= has_other_bits & (first.view(numbers) != block.view(numbers))

        if differs.any():
            return {"first": start + int(np.argmax(differs))}

    return {"first": worst}
