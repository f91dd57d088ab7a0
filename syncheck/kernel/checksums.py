"""Compare replicas by the CRC-32 that torch.save stored of every record: no tensor is read.

Unequal checksums are unequal bytes. Equal ones are taken for equal bytes: two records differ and have one checksum by
chance once in four billion. A 0 proves nothing, for saving may have it switched off.
A record is a tensor's whole storage. Where it holds more than the tensor, equal records with the tensor at one place
hold equal tensors, and unequal ones prove nothing.
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

    from syncheck.messages import Message
    from syncheck.snapshots import Tensor


def compare_checksums(tensors: Sequence[Tensor]) -> DigestResult:
    """Compare replicas of one tensor by what is stored of them. tensors: of one dtype and shape."""
    everyone = tuple(range(len(tensors)))
    if tensors[0].numel == 0:
        return DigestResult((everyone,))
    if len({(t.lazy, t.big_endian, _steps(t)) for t in tensors}) > 1:
        return _not_told(Detail.STORED_DIFFERENTLY())
    # A view may show each element of its record more than once, and others never.
    if all(t.crc32 and _is_dense(t) for t in tensors):
        return DigestResult(cluster_by_key([t.crc32 for t in tensors]), Reason.CHECKSUM, Detail.CHECKSUMS())
    if all(t.record for t in tensors):
        places = {(t.record[0], t.offset - t.record[1]) for t in tensors if t.record is not None}
        if len(places) == 1:
            return DigestResult((everyone,))
        return _not_told(Detail.VIEW())
    return _not_told(Detail.NO_CHECKSUM())


def _not_told(why: Message) -> DigestResult:
    return DigestResult(reason=Reason.CHECKSUM, detail=why)


def _steps(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that mean something: those of dimensions of more than one element."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size != 1)


def _is_dense(tensor: Tensor) -> bool:
    """Whether each element has a place of its own, and there is no gap between them, in whatever order they lie."""
    order = sorted(range(len(tensor.shape)), key=lambda i: -tensor.strides[i])
    return is_contiguous([tensor.shape[i] for i in order], [tensor.strides[i] for i in order])
