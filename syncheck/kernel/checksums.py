"""Compare replicas by the CRC-32 that torch.save stores for every record, without reading tensors.

Different checksums prove different bytes. Equal checksums count as equal bytes: the probability that two different
records have the same checksum is 1 in 4 billion. A stored 0 proves nothing, because checksums can be switched off.

A record is the whole storage of a tensor. If the storage is larger than the tensor, equal records prove equal tensors
at the same offset, and different records prove nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.kernel.blocks import is_contiguous
from syncheck.kernel.clustering import cluster_by_key
from syncheck.kernel.digests import DigestResult
from syncheck.messages import Detail
from syncheck.records import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.snapshots import Tensor


def compare_checksums(tensors: Sequence[Tensor]) -> DigestResult:
    """Compare replicas of one tensor by stored checksums. All tensors must have the same dtype and shape."""
    all_equal = DigestResult((tuple(range(len(tensors))),))
    if tensors[0].numel == 0:
        return all_equal
    if len({(t.lazy, t.big_endian, _significant_strides(t)) for t in tensors}) > 1:
        return DigestResult(reason=Reason.CHECKSUM, detail=Detail.STORED_DIFFERENTLY())
    # A view may contain some elements of its record several times, and others not at all.
    if all(t.crc32 and _is_dense(t) for t in tensors):
        return DigestResult(cluster_by_key([t.crc32 for t in tensors]), Reason.CHECKSUM, Detail.CHECKSUMS())
    if all(t.record for t in tensors):
        records = {(t.record[0], t.offset - t.record[1]) for t in tensors if t.record is not None}
        if len(records) == 1:
            return all_equal
        return DigestResult(reason=Reason.CHECKSUM, detail=Detail.VIEW())
    return DigestResult(reason=Reason.CHECKSUM, detail=Detail.NO_CHECKSUM())


def _significant_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of dimensions with more than one element."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size != 1)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill a memory range without gaps and overlaps, in any order of dimensions."""
    order = sorted(range(len(tensor.shape)), key=lambda i: -tensor.strides[i])
    return is_contiguous([tensor.shape[i] for i in order], [tensor.strides[i] for i in order])
