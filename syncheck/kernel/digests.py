"""Compare replicas by what stands for their bytes: the digests of fingerprints, the checksums that torch.save stored.

Either tells who holds equal bytes. Neither tells which elements differ; of a tensor of several elements its moments
tell at least how far some element is off.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from syncheck.dtypes import DTYPES
from syncheck.kernel.blocks import ranges
from syncheck.kernel.clustering import cluster_by_key
from syncheck.messages import Detail
from syncheck.records import Reason
from syncheck.snapshots import Digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.kernel.blocks import Files
    from syncheck.messages import Message
    from syncheck.snapshots import Tensor

# Of a tensor's bytes, in C order and little-endian: neither its shape nor its dtype is in it.
ALGORITHM = "blake2b-128"
HEX = 32  # digits of a value of this algorithm
_MOMENTS = ("min", "max", "mean", "std", "nonfinite")
_MOST_SETS = 4  # named in a detail
_EXACT = 2**53  # integers beyond are rounded in float64


@dataclass(frozen=True, slots=True)
class DigestResult:
    """Who holds equal bytes, without the bytes.

    clusters: positions among the replicas, largest set first, as `kernel.clusters` gives them; empty where it cannot
    be told, and then `reason` and `detail` say why. nonfinite: by cluster, None where not known.
    gaps: fields of `TensorDiff` that are known all the same.
    """

    clusters: tuple[tuple[int, ...], ...] = ()
    reason: Reason = Reason.DIGEST
    detail: Message | None = None
    nonfinite: tuple[int | None, ...] = ()
    gaps: Mapping[str, Any] = field(default_factory=dict)


def new_hasher() -> Any:
    """Return a new digest by ALGORITHM; feed it with `update`, read it with `hexdigest`."""
    import hashlib  # for fingerprints only: it loads OpenSSL

    return hashlib.blake2b(digest_size=HEX // 2)


def compare_digests(tensors: Sequence[Tensor], files: Files) -> DigestResult:
    """Compare replicas of one tensor, at least one of them from a fingerprint; the others' digests are computed.

    tensors: of one dtype and shape. Digests of different algorithms are never compared: nothing is told then.
    Raises CheckpointError when a file can no longer be read.
    """
    used = {tensor.digest.algorithm if tensor.digest else ALGORITHM for tensor in tensors}
    if len(used) > 1:
        whose = ", ".join(sorted(used))
        return DigestResult(detail=Detail.OTHER_ALGORITHMS(algorithms=whose))
    clusters = cluster_by_key([tensor.digest.value if tensor.digest else _value(tensor, files) for tensor in tensors])
    if len(clusters) == 1:
        return DigestResult(clusters)
    firsts = [_described(tensors, positions, files) for positions in clusters]
    gaps = _single_element(firsts, tensors[0], bool(len(clusters[0]) > len(clusters[1])))
    return DigestResult(
        clusters,
        detail=_moments_text(firsts),
        nonfinite=tuple(first.nonfinite for first in firsts),
        gaps=gaps,
    )


def _value(tensor: Tensor, files: Files) -> str:
    digest = new_hasher()
    for start, count in ranges([tensor]):
        digest.update(files.read(tensor, start, count, slot=0))
    value: str = digest.hexdigest()
    return value


def _described(tensors: Sequence[Tensor], positions: Sequence[int], files: Files) -> Digest:
    """Return the moments of replicas that are equal: from a fingerprint where one of them is, else computed."""
    known = next((tensors[i].digest for i in positions if tensors[i].digest is not None), None)
    if known is not None:
        return known
    from syncheck.kernel.moments import (
        compute_moments,  # numpy is imported here, where there is a difference to describe
    )

    seen = compute_moments(tensors[positions[0]], files)
    return Digest(ALGORITHM, "", seen.nonfinite, **seen.values())


def _moments_text(firsts: Sequence[Digest]) -> Message:
    """Return the moments that differ between the sets, in the order of the clusters: 'mean 0.1 | 0.2'."""
    told = []
    for name in _MOMENTS:
        numbers = [getattr(first, name) for first in firsts]
        if len(set(numbers)) > 1:
            told.append(f"{name} {' | '.join(_apart(numbers)[:_MOST_SETS])}")
    if all(first.min is None and first.nonfinite is None for first in firsts):
        return Detail.DIGESTS_ONLY()
    if not told:
        return Detail.MOMENTS_AGREE()
    least = max(_spread(firsts, "min"), _spread(firsts, "max"))
    differing = ", ".join(told)
    if least and not any(first.nonfinite for first in firsts):
        return Detail.MOMENTS_APART(least=least, differing=differing)
    return Detail.MOMENTS(differing=differing)


def _apart(numbers: Sequence[float | None]) -> list[str]:
    """Write numbers with as many digits as it takes to see that they are not all equal."""
    for digits in (4, 9, 17):
        texts = ["-" if number is None else f"{number:.{digits}g}" for number in numbers]
        if len(set(texts)) > 1:
            break
    return texts


def _spread(firsts: Sequence[Digest], name: str) -> float:
    numbers = [getattr(first, name) for first in firsts]
    return 0.0 if None in numbers else float(max(numbers)) - float(min(numbers))


def _single_element(firsts: Sequence[Digest], like: Tensor, majority: bool) -> dict[str, Any]:
    """Return the gap of tensors of one element, whose minimum is that element: of a count or an optimizer's step."""
    values = [first.min for first in firsts if first.min is not None and not first.nonfinite]
    family = DTYPES[like.dtype].family
    if like.numel != 1 or len(values) < len(firsts) or len(set(values)) == 1:
        return {}
    if family != "float" and max(map(abs, values)) >= _EXACT:
        return {}
    pairs = [(values[0], other) for other in values[1:]] if majority else [(min(values), max(values))]
    gap = max(abs(a - b) for a, b in pairs)
    return {
        "mismatched": 1,
        "max_abs": gap if family == "float" else int(gap),
        "max_rel": max(abs(a - b) / max(abs(a), abs(b)) for a, b in pairs),
        "index": (0,) * len(like.shape),
        "extent": "all",
    }
