"""Compare the replicas of one group: align names, sort each tensor's replicas, count what was not compared."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from syncheck.blocks import Files
from syncheck.kernel import clusters
from syncheck.kinds import KINDS, kinds_of, selector
from syncheck.names import normalize
from syncheck.records import Counts, Group, Replica, TensorDiff, ValueDiff
from syncheck.tolerance import Tolerance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.layout_groups import Replicas
    from syncheck.records import Snapshot, Status, Tensor

# Where trainers keep how far a run is.
PROGRESS = frozenset({"step", "epoch", "global_step", "iteration", "iter", "epochs_run", "steps_run"})


@dataclass(frozen=True, slots=True)
class Selection:
    """What to compare and what to excuse.

    only: kinds, empty for all but random number states. include, exclude: globs of whole tensor names.
    buffers: globs of names that are buffers. tolerance: for floats.
    """

    only: frozenset[str] = frozenset()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    tolerance: Tolerance = field(default_factory=Tolerance)


def compare(replicas: Replicas, selection: Selection) -> Group:
    """Compare a group of replicas; its verdict is left at `undecided` for the diagnosis to fill in.

    Raises CheckpointError when a file can no longer be read.
    """
    snapshots = dict(replicas.ranks)
    names = {rank: normalize(snapshot.tensors) for rank, snapshot in snapshots.items()}
    found = _align(snapshots, names)
    kinds, guessed = _kinds(found, snapshots, selection)
    wanted = selector(selection.only, selection.include, selection.exclude)
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    diffs: list[TensorDiff] = []
    left_out = 0
    if len(snapshots) > 1:
        with Files() as files:
            for name, tensors in found.items():
                kind = kinds[name]
                if not wanted(name, kind):
                    left_out += 1
                    continue
                diff = _tensor(name, kind, tensors, tuple(snapshots), files, selection)
                by_kind[kind][diff.status if diff else "identical"] += 1
                if diff is not None:
                    diffs.append(diff)
    counts = {kind: Counts(tensors=by_kind[kind].total(), **by_kind[kind]) for kind in KINDS if kind in by_kind}
    metadata = next((s.metadata for s in snapshots.values() if s.metadata is not None), None)
    return Group(
        name=replicas.run if replicas.step is None else f"{replicas.run} step {replicas.step}",
        run=replicas.run,
        step=replicas.step,
        verdict="alone" if len(snapshots) == 1 else "undecided",
        replicas=tuple(_replica(rank, snapshot) for rank, snapshot in snapshots.items()),
        counts=sum(counts.values(), Counts()),
        tensors=tuple(diffs),
        values=tuple(_values(snapshots)),
        kinds=counts,
        left_out=left_out,
        normalized=_normalized(names),
        notes=tuple(_notes(replicas, snapshots, guessed=guessed and bool(by_kind))),
        metadata=metadata,
    )


def _align(snapshots: Mapping[int, Snapshot], names: Mapping[int, Mapping[str, str]]) -> dict[str, dict[int, Tensor]]:
    """Collect each tensor's replicas by normalized name, in the order of the first checkpoint."""
    found: dict[str, dict[int, Tensor]] = {}
    for rank, snapshot in snapshots.items():
        for name, tensor in snapshot.tensors.items():
            found.setdefault(names[rank][name], {})[rank] = tensor
    return found


def _kinds(
    found: Mapping[str, Mapping[int, Tensor]], snapshots: Mapping[int, Snapshot], selection: Selection
) -> tuple[dict[str, str], bool]:
    shapes = {name: next(iter(tensors.values())).shape for name, tensors in found.items()}
    metadata = next(
        (s.metadata for s in snapshots.values() if s.metadata is not None and s.metadata.buffers is not None),
        None,
    )
    return kinds_of(shapes, metadata, selection.buffers)


def _tensor(
    name: str,
    kind: str,
    tensors: Mapping[int, Tensor],
    ranks: tuple[int, ...],
    files: Files,
    selection: Selection,
) -> TensorDiff | None:
    """Compare one tensor's replicas; None when they are identical."""
    first = next(iter(tensors.values()))
    base: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "dtype": first.dtype,
        "shape": first.shape,
        "numel": first.numel,
    }
    present = tuple(tensors)
    if kind == "rng" and not selection.only:
        return TensorDiff(**base, status="not_compared", reason="rng", detail="random number states differ by design")
    refused = {rank: tensor.refused for rank, tensor in tensors.items() if tensor.refused}
    if refused:
        reason, _, _ = next(iter(refused.values())).partition(":")
        reason = reason if reason == "sharded" else "refused"
        return TensorDiff(**base, status="not_compared", reason=reason, detail=next(iter(refused.values())))
    for what in ("shape", "dtype"):
        kinds_found: dict[Any, list[int]] = defaultdict(list)
        for rank, tensor in tensors.items():
            kinds_found[getattr(tensor, what)].append(rank)
        if len(kinds_found) > 1:
            sets = _largest_first(kinds_found.values())
            texts = {tuple(found): text for text, found in kinds_found.items()}
            detail = ", ".join(f"{_text(texts[found])} on {_ranks(found)}" for found in sets)
            return TensorDiff(
                **base,
                status="not_compared",
                reason=what,
                detail=detail,
                replica_groups=(ranks,),
                clusters=sets,
                minority=_minority(sets),
            )
    missing = tuple(rank for rank in ranks if rank not in tensors)
    members = list(tensors.values())
    sets = clusters(members, files) if len(members) > 1 else ((0,),)
    by_rank = tuple(tuple(present[i] for i in found) for found in sets)
    if len(sets) == 1:
        if not missing:
            return None
        both = _largest_first((list(present), list(missing)))
        return TensorDiff(
            **base, status="not_compared", reason="missing", detail=f"not on {_ranks(missing)}",
            replica_groups=(ranks,), clusters=by_rank, minority=_minority(both),
        )  # fmt: skip
    diff = _measured(base, by_rank, [members[found[0]] for found in sets], files, selection.tolerance, (present,))
    if not missing:
        return diff
    return replace(
        diff,
        status="different",
        reason="missing",
        detail=f"not on {_ranks(missing)}",
        replica_groups=(ranks,),
    )


def _measured(
    base: Mapping[str, Any], sets: tuple[tuple[int, ...], ...], members: Sequence[Tensor], files: Files,
    tolerance: Tolerance, replica_groups: tuple[tuple[int, ...], ...],
) -> TensorDiff:  # fmt: skip
    """Measure tensors that differ. sets: clusters by rank. members: one tensor of each."""
    from syncheck.gaps import measure  # numpy is imported here, where there is a difference to measure

    minority = _minority(sets)
    found = measure(members, files, tolerance, majority=bool(minority))
    excused = not tolerance.exact and not found.beyond
    status: Status = "equal" if not found.mismatched else "close" if excused else "different"
    index = None if found.worst is None else _unravel(found.worst, base["shape"])
    counted = {rank: count for ranks, count in zip(sets, found.nonfinite, strict=True) for rank in ranks}
    return TensorDiff(
        **base, status=status, reason=str(tolerance) if status == "close" else None,
        replica_groups=replica_groups, clusters=sets, minority=minority, mismatched=found.mismatched,
        max_abs=found.max_abs, max_rel=found.max_rel, max_ulp=found.max_ulp, index=index,
        nonfinite=dict(sorted(counted.items())), extent=found.extent(base["numel"]),
    )  # fmt: skip


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.insert(0, at)
    return tuple(index)


def _largest_first(sets: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(found) for found in sorted(sets, key=lambda found: (-len(found), found[0])))


def _minority(sets: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks outside the largest set; none where two sets are the largest."""
    if len(sets) < 2 or len(sets[0]) == len(sets[1]):
        return ()
    return tuple(sorted(rank for found in sets[1:] for rank in found))


def _text(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _replica(rank: int, snapshot: Snapshot) -> Replica:
    host = snapshot.metadata.host if snapshot.metadata is not None else None
    return Replica(snapshot.path, rank, snapshot.format, len(snapshot.tensors), snapshot.bytes, host)


def _values(snapshots: Mapping[int, Snapshot]) -> list[ValueDiff]:
    """List the Python values that are not equal on all replicas.

    One that some replicas lack does not count against them: the formats hold different ones.
    """
    by_name: dict[str, dict[int, Any]] = defaultdict(dict)
    for rank, snapshot in snapshots.items():
        progress = {"step": snapshot.metadata.step, "epoch": snapshot.metadata.epoch} if snapshot.metadata else {}
        for name, value in (progress | dict(snapshot.values)).items():
            by_name[name][rank] = value
    diffs = []
    for name, values in by_name.items():
        listed = list(values.values())
        differ = any(value != listed[0] and not (value != value and listed[0] != listed[0]) for value in listed[1:])
        if differ or len(values) < len(snapshots):
            diffs.append(
                ValueDiff(name, {rank: values.get(rank) for rank in snapshots}, counts=differ and _counts(name))
            )
    return diffs


def _counts(name: str) -> bool:
    parts = name.split(".")
    optimizer = parts[0] == "optimizer" and ("param_groups" in parts or parts[-1] == "step")
    return name in PROGRESS or optimizer or parts[0] in ("scaler", "grad_scaler", "amp_scaler")


def _normalized(names: Mapping[int, Mapping[str, str]]) -> dict[int, int]:
    """Count the names of each rank that had a wrapper's prefix."""
    return {rank: count for rank, of in names.items() if (count := sum(a != b for a, b in of.items()))}


def _notes(replicas: Replicas, snapshots: Mapping[int, Snapshot], *, guessed: bool) -> list[str]:
    notes = [replicas.note]
    worlds = {s.metadata.world_size for s in snapshots.values() if s.metadata is not None and s.metadata.world_size}
    if len(worlds) == 1:
        absent = sorted(set(range(worlds.pop())) - set(snapshots))
        if absent:
            notes.append(f"no file of {_ranks(absent)}, which the metadata says took part")
    if guessed:
        notes.append("which tensors are parameters and which buffers is guessed from their names")
    stubs = sorted({stub for snapshot in snapshots.values() for stub in snapshot.stubs})
    if stubs:
        notes.append(f"objects of unknown classes were not compared, tensors in them were: {', '.join(stubs)}")
    return notes
