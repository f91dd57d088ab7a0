"""Compare the replicas of one tensor: present everywhere, alike, of equal bytes, and if not, by how much."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.kernel import clusters
from syncheck.records import TensorDiff, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.blocks import Files
    from syncheck.records import Status, Tensor
    from syncheck.tolerance import Tolerance

Sets = tuple[tuple[int, ...], ...]


def compare_tensor(
    name: str, kind: str, tensors: Mapping[int, Tensor], ranks: tuple[int, ...], files: Files, tolerance: Tolerance
) -> TensorDiff | None:
    """Compare one tensor's replicas by rank; None when they are identical.

    ranks: all of the group, which may be more than have the tensor. Raises CheckpointError when a file can no longer
    be read.
    """
    missing = tuple(rank for rank in ranks if rank not in tensors)
    diff = _unlike(_bare(name, kind, tensors), tensors) or _by_bytes(
        _bare(name, kind, tensors), tensors, files, tolerance
    )
    if not missing:
        return diff
    diff = diff or _bare(name, kind, tensors)
    here, gone = list(tensors), list(missing)
    return replace(
        diff,
        status="different" if diff.status == "different" else "not_compared",
        reason="missing",
        detail=f"not on {ranks_text(missing)}",
        replica_groups=(ranks,),
        clusters=diff.clusters or (tuple(here),),
        minority=diff.minority or minority_of(_largest_first((here, gone))),
    )


def not_asked_for(name: str, kind: str, tensors: Mapping[int, Tensor]) -> TensorDiff:
    """Count a random number state, which differs between ranks by design, as not compared."""
    return replace(_bare(name, kind, tensors), reason="rng", detail="random number states differ by design")


def minority_of(sets: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks outside the largest set; none where two sets are the largest. sets: largest first."""
    if len(sets) < 2 or len(sets[0]) == len(sets[1]):
        return ()
    return tuple(sorted(rank for found in sets[1:] for rank in found))


def _bare(name: str, kind: str, tensors: Mapping[int, Tensor]) -> TensorDiff:
    first = next(iter(tensors.values()))
    return TensorDiff(name, kind, first.dtype, first.shape, "not_compared", numel=first.numel)


def _unlike(bare: TensorDiff, tensors: Mapping[int, Tensor]) -> TensorDiff | None:
    """Say why replicas cannot be compared by value: refused by the reader, or of another shape or dtype."""
    refused = next((tensor.refused for tensor in tensors.values() if tensor.refused), None)
    if refused is not None:
        reason = "sharded" if refused.startswith("sharded:") else "refused"
        return replace(bare, reason=reason, detail=refused)
    for what in ("shape", "dtype"):
        found: dict[Any, list[int]] = defaultdict(list)
        for rank, tensor in tensors.items():
            found[getattr(tensor, what)].append(rank)
        if len(found) > 1:
            sets = _largest_first(found.values())
            texts = {tuple(ranks): list(text) if what == "shape" else text for text, ranks in found.items()}
            detail = ", ".join(f"{texts[ranks]} on {ranks_text(ranks)}" for ranks in sets)
            everyone = (tuple(tensors),)
            return replace(
                bare, reason=what, detail=detail, replica_groups=everyone, clusters=sets, minority=minority_of(sets)
            )
    return None


def _by_bytes(bare: TensorDiff, tensors: Mapping[int, Tensor], files: Files, tolerance: Tolerance) -> TensorDiff | None:
    """Sort replicas by their bytes and measure what differs; None when all are identical."""
    ranks, members = tuple(tensors), list(tensors.values())
    found = clusters(members, files) if len(members) > 1 else ((0,),)
    if len(found) == 1:
        return None
    from syncheck.gaps import measure  # numpy is imported here, where there is a difference to measure

    sets: Sets = tuple(tuple(ranks[i] for i in positions) for positions in found)
    minority = minority_of(sets)
    gaps = measure([members[positions[0]] for positions in found], files, tolerance, majority=bool(minority))
    excused = not tolerance.exact and not gaps.beyond
    status: Status = "equal" if not gaps.mismatched else "close" if excused else "different"
    nonfinite = {rank: count for same, count in zip(sets, gaps.nonfinite, strict=True) for rank in same}
    return replace(
        bare,
        status=status,
        reason=str(tolerance) if status == "close" else None,
        replica_groups=(ranks,),
        clusters=sets,
        minority=minority,
        mismatched=gaps.mismatched,
        max_abs=gaps.max_abs,
        max_rel=gaps.max_rel,
        max_ulp=gaps.max_ulp,
        index=None if gaps.worst is None else _unravel(gaps.worst, bare.shape),
        nonfinite=dict(sorted(nonfinite.items())),
        extent=gaps.extent(bare.numel),
    )


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.insert(0, at)
    return tuple(index)


def _largest_first(sets: Iterable[list[int]]) -> Sets:
    return tuple(tuple(found) for found in sorted(sets, key=lambda found: (-len(found), found[0])))
