"""Compare replicas by stored digest or checksum instead of by their bytes.

Digests, for tensors of fingerprints, show which replicas hold equal bytes, but not which elements differ. The stored
moments give a lower bound of the difference.

torch.save stores the CRC-32 of every record. Different checksums prove different bytes. Equal checksums count as equal
bytes: the probability that two different records have the same checksum is 1 in 4 billion. A stored 0 proves nothing,
because checksums can be switched off. A record is the whole storage of a tensor. If the storage is larger than the
tensor, equal records prove equal tensors at the same offset, and different records prove nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from syncheck.messages import Detail
from syncheck.records import Reason
from syncheck.snapshots import Digest
from syncheck.tensors.blocks import is_contiguous, ranges
from syncheck.tensors.clustering import cluster_by_key
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.messages import Message
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# The digest covers the little-endian bytes in C order, without shape and dtype.
ALGORITHM = "blake2b-128"
HEX = 32  # digits of a digest
_MOMENTS = ("min", "max", "mean", "std", "nonfinite")
_MOST_CLUSTERS = 4  # in a message
_EXACT = 2**53  # float64 rounds larger integers


@dataclass(frozen=True, slots=True)
class DigestResult:
    """The result of comparing digests or checksums instead of bytes.

    clusters: as returned by `cluster_replicas`; empty if unknown, with `reason` and `detail`. nonfinite: by cluster,
    None if unknown. numbers: other fields of `TensorDiff` that are known without the bytes.
    """

    clusters: tuple[tuple[int, ...], ...] = ()
    reason: Reason = Reason.DIGEST
    detail: Message | None = None
    nonfinite: tuple[int | None, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)


def new_hasher() -> Any:
    """Return a new hashlib object of ALGORITHM."""
    import hashlib  # loads OpenSSL, which only fingerprints need

    return hashlib.blake2b(digest_size=HEX // 2)


def compare_digests(tensors: Sequence[Tensor], files: Files) -> DigestResult:
    """Compare replicas of one tensor by digest. Compute the digests of replicas that are not fingerprints.

    All tensors must have the same dtype and shape. Digests of different algorithms are not comparable; the result is
    unknown. Raises CheckpointError if a file can no longer be read.
    """
    algorithms = {tensor.digest.algorithm if tensor.digest else ALGORITHM for tensor in tensors}
    if len(algorithms) > 1:
        return DigestResult(detail=Detail.OTHER_ALGORITHMS(algorithms=", ".join(sorted(algorithms))))
    clusters = cluster_by_key(
        [tensor.digest.value if tensor.digest else _compute_digest(tensor, files) for tensor in tensors]
    )
    if len(clusters) == 1:
        return DigestResult(clusters)
    representatives = [_describe_cluster(tensors, positions, files) for positions in clusters]
    return DigestResult(
        clusters,
        detail=_describe_moments(representatives),
        nonfinite=tuple(digest.nonfinite for digest in representatives),
        numbers=_measure_single_element(representatives, tensors[0], len(clusters[0]) > len(clusters[1])),
    )


def _compute_digest(tensor: Tensor, files: Files) -> str:
    digest = new_hasher()
    for start, count in ranges([tensor]):
        digest.update(files.read(tensor, start, count, slot=0))
    value: str = digest.hexdigest()
    return value


def _describe_cluster(tensors: Sequence[Tensor], positions: Sequence[int], files: Files) -> Digest:
    """Return the moments of equal replicas, from a fingerprint if one of them has it."""
    known = next((tensors[i].digest for i in positions if tensors[i].digest is not None), None)
    if known is not None:
        return known
    from syncheck.tensors.moments import compute_moments  # needs numpy

    moments = compute_moments(tensors[positions[0]], files)
    return Digest(ALGORITHM, "", moments.nonfinite, **moments.values())


def _describe_moments(digests: Sequence[Digest]) -> Message:
    """Return the moments that differ between clusters, in the order of the clusters: 'mean 0.1 | 0.2'."""
    differing = []
    for name in _MOMENTS:
        numbers = [getattr(digest, name) for digest in digests]
        if len(set(numbers)) > 1:
            differing.append(f"{name} {' | '.join(_format_distinct(numbers)[:_MOST_CLUSTERS])}")
    if all(digest.min is None and digest.nonfinite is None for digest in digests):
        return Detail.DIGESTS_ONLY()
    if not differing:
        return Detail.MOMENTS_AGREE()
    least = max(_spread(digests, "min"), _spread(digests, "max"))
    if least and not any(digest.nonfinite for digest in digests):
        return Detail.MOMENTS_APART(least=least, differing=", ".join(differing))
    return Detail.MOMENTS(differing=", ".join(differing))


def _format_distinct(numbers: Sequence[float | None]) -> list[str]:
    """Format numbers with enough digits to show that they are not all equal."""
    for digits in (4, 9, 17):
        texts = ["-" if number is None else f"{number:.{digits}g}" for number in numbers]
        if len(set(texts)) > 1:
            break
    return texts


def _spread(digests: Sequence[Digest], name: str) -> float:
    numbers = [getattr(digest, name) for digest in digests]
    return 0.0 if None in numbers else float(max(numbers)) - float(min(numbers))


def _measure_single_element(digests: Sequence[Digest], like: Tensor, majority: bool) -> dict[str, Any]:
    """Return the exact difference of tensors with one element, such as step counters: the minimum is the element."""
    values = [digest.min for digest in digests if digest.min is not None and not digest.nonfinite]
    family = DTYPES[like.dtype].family
    if like.numel != 1 or len(values) < len(digests) or len(set(values)) == 1:
        return {}
    if family != "float" and max(map(abs, values)) >= _EXACT:
        return {}
    pairs = [(values[0], other) for other in values[1:]] if majority else [(min(values), max(values))]
    difference = max(abs(a - b) for a, b in pairs)
    return {
        "mismatched": 1,
        "max_abs": difference if family == "float" else int(difference),
        "max_rel": max(abs(a - b) / max(abs(a), abs(b)) for a, b in pairs),
        "index": (0,) * len(like.shape),
        "extent": "all",
    }


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
