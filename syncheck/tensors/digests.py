"""Compare replicas by stored digest or checksum instead of by their bytes.

Digests, for tensors of fingerprints, show which replicas hold equal bytes, but not which elements differ. The stored
moments give a lower bound of the difference.

torch.save stores the CRC-32 of every record. Different checksums prove different bytes. Equal checksums count as equal
bytes: the probability that two different records have the same checksum is 1 in 4 billion. A stored 0 proves nothing,
because checksums can be switched off. A record is the whole storage of a tensor. If the storage is larger than the
tensor, equal records prove equal tensors at the same offset, and different records prove nothing.
"""

from __future__ import annotations

from dataclasses import field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from syncheck.frozen import record
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


@record
class DigestResult:
    """The result of comparing digests or checksums instead of bytes.

    clusters: as returned by `cluster_replicas`; empty if unknown, with `reason` and `detail`.
    nonfinite: by cluster, None if unknown.
    numbers: other fields of `TensorDiff` that are known without the bytes.
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
    algorithms = {ALGORITHM if tensor.digest is None else tensor.digest.algorithm for tensor in tensors}
    if len(algorithms) > 1:
        names = ", ".join(sorted(algorithms))
        return DigestResult(detail=Detail.OTHER_ALGORITHMS(algorithms=names))

    values = [tensor.digest.value if tensor.digest else _compute_digest(tensor, files) for tensor in tensors]
    clusters = cluster_by_key(values)
    if len(clusters) == 1:
        return DigestResult(clusters)

    representatives = [_describe_cluster(tensors, positions, files) for positions in clusters]
    has_majority = len(clusters[0]) > len(clusters[1])
    return DigestResult(
        clusters,
        detail=_describe_moments(representatives),
        nonfinite=tuple(digest.nonfinite for digest in representatives),
        numbers=_measure_single_element(representatives, tensors[0], has_majority),
    )


def _compute_digest(tensor: Tensor, files: Files) -> str:
    digest = new_hasher()
    for start, count in ranges([tensor]):
        digest.update(files.read(tensor, start, count, slot=0))

    value: str = digest.hexdigest()
    return value


def _describe_cluster(tensors: Sequence[Tensor], positions: Sequence[int], files: Files) -> Digest:
    """Return the moments of equal replicas, from a fingerprint if one of them has it."""
    for position in positions:
        digest = tensors[position].digest
        if digest is not None:
            return digest

    from syncheck.tensors.moments import compute_moments  # needs numpy

    moments = compute_moments(tensors[positions[0]], files)
    return Digest(
        ALGORITHM,
        "",
        moments.nonfinite,
        **moments.values(),
    )


def _describe_moments(digests: Sequence[Digest]) -> Message:
    """Return the moments that differ between clusters, in the order of the clusters: 'mean 0.1 | 0.2'."""
    moments: dict[str, list[Any]] = {}
    differing = []
    for name in _MOMENTS:
        numbers = [getattr(digest, name) for digest in digests]
        moments[name] = numbers
        if len(set(numbers)) > 1:
            texts = _format_distinct(numbers)[:_MOST_CLUSTERS]
            differing.append(f"{name} {' | '.join(texts)}")

    # Complex tensors, and tensors beyond the budget of a live check, have digests only.
    if set(moments["min"] + moments["nonfinite"]) == {None}:
        return Detail.DIGESTS_ONLY()

    if not differing:
        return Detail.MOMENTS_AGREE()

    text = ", ".join(differing)
    has_nonfinite = any(moments["nonfinite"])
    least_difference = max(_spread(moments["min"]), _spread(moments["max"]))
    if least_difference and not has_nonfinite:
        return Detail.MOMENTS_APART(least=least_difference, differing=text)

    return Detail.MOMENTS(differing=text)


def _format_distinct(numbers: Sequence[float | None]) -> list[str]:
    """Format numbers with enough digits to show that they are not all equal."""
    texts: list[str] = []
    for digits in (4, 9, 17):
        texts = ["-" if number is None else f"{number:.{digits}g}" for number in numbers]
        if len(set(texts)) > 1:
            break

    return texts


def _spread(numbers: Sequence[float | None]) -> float:
    """Return the difference between the highest and the lowest number; 0 if a number is unknown."""
    known_numbers = [number for number in numbers if number is not None]
    if len(known_numbers) < len(numbers):
        return 0.0

    highest = float(max(known_numbers))
    lowest = float(min(known_numbers))
    return highest - lowest


def _measure_single_element(digests: Sequence[Digest], like: Tensor, majority: bool) -> dict[str, Any]:
    """Return the exact difference of tensors with one element, such as step counters: the minimum is the element."""
    if like.numel != 1:
        return {}

    values = [digest.min for digest in digests if digest.min is not None and not digest.nonfinite]
    if len(values) < len(digests):
        return {}

    lowest = min(values)
    highest = max(values)
    is_float = DTYPES[like.dtype].family == "float"
    may_be_rounded = not is_float and max(-lowest, highest) >= _EXACT
    if lowest == highest or may_be_rounded:
        return {}

    # With a majority, the first cluster is compared with each other cluster.
    pairs = [(lowest, highest)]
    if majority:
        pairs = [(values[0], value) for value in values[1:]]

    largest = 0.0
    largest_relative = 0.0
    for first, second in pairs:
        difference = abs(first - second)
        scale = max(abs(first), abs(second))
        largest = max(largest, difference)
        largest_relative = max(largest_relative, difference / scale)

    return {
        "mismatched": 1,
        "max_abs": largest if is_float else int(largest),
        "max_rel": largest_relative,
        "index": (0,) * len(like.shape),
        "extent": "all",
    }


def compare_checksums(tensors: Sequence[Tensor]) -> DigestResult:
    """Compare replicas of one tensor by stored checksums. All tensors must have the same dtype and shape."""
    all_equal = DigestResult((tuple(range(len(tensors))),))
    if tensors[0].numel == 0:
        return all_equal

    layouts = {(tensor.lazy, tensor.big_endian, _significant_strides(tensor)) for tensor in tensors}
    if len(layouts) > 1:
        return DigestResult(reason=Reason.CHECKSUM, detail=Detail.STORED_DIFFERENTLY())

    # A view may contain some elements of its record several times, and others not at all.
    if all(tensor.crc32 and _is_dense(tensor) for tensor in tensors):
        checksums = [tensor.crc32 for tensor in tensors]
        clusters = cluster_by_key(checksums)
        return DigestResult(clusters, Reason.CHECKSUM, Detail.CHECKSUMS())

    # The checksum of a record and the position in the record.
    records = set()
    for tensor in tensors:
        if not tensor.record:
            return DigestResult(reason=Reason.CHECKSUM, detail=Detail.NO_CHECKSUM())

        checksum, record_start, _ = tensor.record
        records.add((checksum, tensor.offset - record_start))

    if len(records) == 1:
        return all_equal

    return DigestResult(reason=Reason.CHECKSUM, detail=Detail.VIEW())


def _significant_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of dimensions with more than one element."""
    dimensions = zip(tensor.shape, tensor.strides, strict=True)
    return tuple(stride for size, stride in dimensions if size != 1)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill a memory range without gaps and overlaps, in any order of dimensions."""
    dimensions = list(zip(tensor.strides, tensor.shape, strict=True))
    dimensions.sort(key=itemgetter(0), reverse=True)
    sizes: list[int] = []
    strides: list[int] = []
    for stride, size in dimensions:
        sizes.append(size)
        strides.append(stride)

    return is_contiguous(tuple(sizes), tuple(strides))
