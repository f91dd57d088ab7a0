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
    from syncheck.records import Status
    from syncheck.snapshots import Tensor
    from syncheck.tolerance import Tolerance

# How the readers begin what they say of a shard.
SHARDED = "sharded:"
Sets = tuple[tuple[int, ...], ...]


def compare_tensor(
    name: str,
    kind: str,
    tensors: Mapping[int, Tensor],
    ranks: tuple[int, ...],
    files: Files,
    tolerance: Tolerance,
    *,
    sharded: bool = False,
) -> TensorDiff | None:
    """Compare one tensor's replicas by rank; None when they are identical.

    ranks: all of the group, which may be more than have the tensor. sharded: whether each rank was to hold other
    tensors than the rest, so that one that is not everywhere is as it should be. Raises CheckpointError when a file
    can no longer be read.
    """
    missing = tuple(rank for rank in ranks if rank not in tensors)
    diff = _unlike(_bare(name, kind, tensors), tensors) or _by_bytes(
        _bare(name, kind, tensors), tensors, files, tolerance
    )
    if not missing:
        return diff
    if sharded and diff is None:
        detail = f"on {ranks_text(tuple(tensors))} only: the metadata says that each rank holds its own part"
        return replace(_bare(name, kind, tensors), reason="sharded", detail=detail)
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
    """Say why replicas cannot be compared by value: of another kind, shape or dtype, or refused by the reader."""
    refusals = {rank: tensor.refused for rank, tensor in tensors.items()}
    sharded = {rank: text for rank, text in refusals.items() if text.startswith(SHARDED)}
    if sharded:
        first = next(iter(sharded.values()))
        if len(sharded) == len(tensors):  # shards of one tensor may have any shapes
            return replace(bare, reason="sharded", detail=first.removeprefix(SHARDED).strip())
        return replace(bare, reason="refused", detail=f"{first} (on {ranks_text(tuple(sharded))} only)")
    # A sparse tensor beside a dense one, or one without values beside one that has them: these are not the same.
    kinds: dict[int, Any] = {rank: text or f"{tensors[rank].dtype} with values" for rank, text in refusals.items()}
    if any(refusals.values()) and len(set(refusals.values())) > 1:
        return _split(bare, "dtype", kinds, tensors)
    for what in ("shape", "dtype"):
        found = {rank: _known(tensor, what) for rank, tensor in tensors.items()}
        if None not in found.values() and len(set(found.values())) > 1:
            return _split(bare, what, found, tensors)
    refused = next(iter(refusals.values()))
    return replace(bare, reason="refused", detail=refused) if refused else None


def _known(tensor: Tensor, what: str) -> Any:
    """Return a tensor's shape or dtype; None where the reader that refused it could not tell."""
    found: Any = getattr(tensor, what)
    return None if tensor.refused and found in ((), "unknown") else found


def _split(bare: TensorDiff, what: str, found: Mapping[int, Any], tensors: Mapping[int, Tensor]) -> TensorDiff:
    """Return a difference in what is not compared by value, with the ranks that have each."""
    by_text: dict[Any, list[int]] = defaultdict(list)
    for rank, value in found.items():
        by_text[value].append(rank)
    sets = _largest_first(by_text.values())
    texts = {tuple(ranks): list(text) if what == "shape" else text for text, ranks in by_text.items()}
    detail = ", ".join(f"{texts[ranks]} on {ranks_text(ranks)}" for ranks in sets)
    return replace(
        bare,
        reason=what,
        detail=detail,
        replica_groups=(tuple(tensors),),
        clusters=sets,
        minority=minority_of(sets),
    )


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
