"""Compare the replicas of one group: align names, sort each tensor's replicas, count what was not compared."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from syncheck.comparison.optimizer_parts import Parts, detect_partitioning, find_lost_state
from syncheck.comparison.reference import describe_from_reference
from syncheck.comparison.replica_groups import assemble_shards, divide, find_positions, is_mixed, mesh_of
from syncheck.comparison.tensors import compare_tensor, mark_ambiguous, skip_by_design
from syncheck.comparison.ties import broken_ties
from syncheck.comparison.values import compare_values, in_memory, is_membership, note_absent_values, stores_progress
from syncheck.evidence.tensors import add_evidence
from syncheck.kernel.blocks import Files
from syncheck.kinds import KINDS, OPTIMIZER, Kinds, kinds_of, selector
from syncheck.messages import Note
from syncheck.names import normalize
from syncheck.records import Comparison, Counts, GroupEvidence, Replica, Shards, TensorDiff
from syncheck.tensor_parallel import replicated
from syncheck.tolerance import Tolerances

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.comparison.replica_groups import Division
    from syncheck.layout.groups import ReplicaGroup
    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot, Tensor

_PARTITIONED = "of which each rank has its own"


@dataclass(frozen=True, slots=True)
class Selection:
    """What to compare and what to excuse.

    only: kinds, empty for all but random number states. include, exclude: globs of whole tensor names.
    buffers: globs of names that are buffers. tolerance: for floats. reference: the rank that differences are described
    against, in place of the majority. jobs: threads, None for what the machine has. quick: compare stored checksums
    and read nothing. histograms: of the tensors that differ most, for a page. rng: random number states too.
    """

    only: frozenset[str] = frozenset()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    tolerance: Tolerances = field(default_factory=Tolerances)
    reference: int | None = None
    jobs: int | None = None
    quick: bool = False
    histograms: bool = False
    rng: bool = False


def compare_group(replicas: ReplicaGroup, selection: Selection) -> Comparison:
    """Compare a group of replicas.

    Raises CheckpointError when a file can no longer be read.
    """
    snapshots, parts = detect_partitioning(dict(replicas.ranks))
    names = {rank: normalize(snapshot.tensors) for rank, snapshot in snapshots.items()}
    found = _align(snapshots, names)
    kinds, guessed, unsure = _kinds(found, snapshots, selection)
    wanted = selector(selection.only, selection.include, selection.exclude, unsure)
    tally = _Tally()
    if len(snapshots) > 1:
        _compare_all(found, kinds, snapshots, wanted, selection, tally, parts)
    alone = tuple(rank for rank in snapshots if rank not in tally.compared)
    counts = {
        kind: Counts(tensors=tally.by_kind[kind].total(), **tally.by_kind[kind])
        for kind in KINDS
        if kind in tally.by_kind
    }
    metadata = next((s.metadata for s in snapshots.values() if s.metadata is not None), None)
    kept = selector(frozenset(), (), selection.exclude)
    values = compare_values(snapshots, wanted, kept, _partial_values(snapshots, parts))
    return Comparison(
        name=replicas.run if replicas.step is None else f"{replicas.run} step {replicas.step}",
        run=replicas.run,
        label=replicas.label,
        uncompared=alone if tally.compared else (),
        step=replicas.step,
        replicas=tuple(_replica(rank, snapshot) for rank, snapshot in snapshots.items()),
        counts=sum(counts.values(), Counts()),
        tensors=tuple(tally.diffs),
        ties=broken_ties(snapshots, names),
        shards=tally.shards(),
        values=tuple(values),
        kinds=counts,
        left_out=tally.left_out,
        grouping=replicas.grouping,
        notes=(
            *_notes(snapshots, tally, selection, guessed=guessed and bool(tally.by_kind)),
            *note_absent_values(snapshots, values),
        ),
        evidence=GroupEvidence(
            metadata=metadata,
            names=tally.names,
            hyperparameters=hyperparameters(next(iter(snapshots.values())).values),
            normalized=_normalized(names, snapshots),
            stores_progress=any(map(stores_progress, snapshots.values())),
        ),
    )


def _partial_values(snapshots: Mapping[int, Snapshot], parts: Parts) -> Callable[[str], bool]:
    """Return a function that finds values of a partitioned optimizer: members of its groups, values of one part."""
    sharded = any(s.metadata is not None and s.metadata.optimizer_sharded for s in snapshots.values())

    def is_partial(name: str) -> bool:
        if parts.labels and parts.holds(name, of_optimizer=False):
            return True
        return (sharded or parts != Parts()) and is_membership(name)

    return is_partial


def hyperparameters(values: Mapping[str, Any]) -> dict[str, float]:
    """Return what moves parameters besides gradients, of the first parameter group. values: of a snapshot."""
    found = {name: values.get(f"optimizer.param_groups.0.{name}") for name in ("lr", "weight_decay", "momentum")}
    return {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}


@dataclass
class _Tally:
    """What has been compared of a group so far."""

    by_kind: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    diffs: list[TensorDiff] = field(default_factory=list)
    left_out: int = 0
    names: dict[str, str] = field(default_factory=dict)
    compared: set[int] = field(default_factory=set)
    """Ranks that were compared with another one, in a tensor that is no counter of an optimizer's steps."""
    laid_out: dict[tuple[str, str], list[tuple[tuple[int, ...], ...]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By kind and layout of the parts: for each tensor the sets of ranks that were compared."""

    def add(
        self, name: str, kind: str, diff: TensorDiff | None, division: Division | None = None, *, apart: bool = False
    ) -> None:
        """Count a tensor. apart: whether it is a part of an optimizer's state that only some ranks have."""
        self.by_kind[kind][diff.status if diff else "identical"] += 1
        self.names[name] = kind
        looked_at = diff is None or diff.status != "not_compared" or diff.reason == "missing"
        if looked_at and division is not None and kind != "optimizer_step":
            self.compared.update(*division.comparable)
        if diff is not None:
            self.diffs.append(diff)
        sharded = diff is not None and diff.reason == "sharded"
        if division is not None and division.kind:
            self.laid_out[division.kind, division.layout].append(() if sharded else division.comparable)
        elif sharded and diff is not None:
            self.laid_out[
                "optimizer" if apart else "DTensor", _PARTITIONED if apart else str(diff.detail or "")
            ].append(())

    def shards(self) -> tuple[Shards, ...]:
        """Sum up the tensors that the ranks hold in parts."""
        return tuple(
            Shards(kind, layout, len(sets), sum(map(bool, sets)), next(filter(None, sets), ()))
            for (kind, layout), sets in self.laid_out.items()
        )


def _compare_all(
    found: dict[str, dict[int, Tensor]],
    kinds: Mapping[str, str],
    snapshots: Mapping[int, Snapshot],
    wanted: Callable[[str, str], bool],
    selection: Selection,
    tally: _Tally,
    parts: Parts,
) -> None:
    """Compare every tensor that is asked for, by name, and count how each ended."""
    ranks, places = tuple(snapshots), find_positions(snapshots)
    whole = replicated(found) if places.plain else frozenset()
    with Files(jobs=selection.jobs) as files:
        for name, tensors in list(found.items()):
            kind = kinds[name]
            if not wanted(name, kind):
                tally.left_out += 1
                continue
            if kind == "rng" and not (selection.only or selection.rng):
                tally.add(name, kind, skip_by_design(name, kind, tensors))
                continue
            if places.stages and is_mixed(tensors):
                if not (complete := assemble_shards(tensors)):
                    tally.add(name, kind, mark_ambiguous(name, kind, tensors, divide(tensors, ranks, places).layout))
                    continue
                found[name] = tensors = complete
            # A rank that names the parameter among its own should hold its state: missing there, it is lost.
            parameter = name.rpartition(".")[0]
            lost = any(parameter in own for rank, own in parts.own.items() if rank not in tensors)
            partial = parts.holds(name, of_optimizer=kind in OPTIMIZER)
            apart = partial and not lost and not parts.unclear
            tolerance = selection.tolerance.of(name, kind, next(iter(tensors.values())).dtype)
            division = divide(tensors, ranks, places, replicated=name in whole)
            diff = compare_tensor(name, kind, tensors, division, files, tolerance, sharded=apart, quick=selection.quick)
            if diff is not None and diff.out_of_sync and parts.unclear and partial:
                diff = mark_ambiguous(name, kind, tensors, parts.unclear)
            if diff is not None and selection.reference is not None:
                facts = tuple(describe_from_reference(fact, selection.reference, tensors, files) for fact in diff.facts)
                diff = replace(describe_from_reference(diff, selection.reference, tensors, files), facts=facts)
            tally.add(name, kind, diff, division, apart=apart)
        tally.diffs = _looked_at(tally.diffs, lambda diffs: add_evidence(diffs, found, files))
        if selection.histograms:
            from syncheck.evidence import histograms  # what nobody asked for is not imported

            def exact(diff: TensorDiff) -> bool:  # the gaps to a reference are those to it, whatever is excused
                tolerance = selection.tolerance.of(diff.name, diff.kind, diff.dtype)
                return tolerance.exact or selection.reference is not None

            tally.diffs = _looked_at(tally.diffs, lambda diffs: histograms.add_histograms(diffs, found, files, exact))
    for diff in find_lost_state(parts.own, found):
        if wanted(diff.name, diff.kind):
            tally.add(diff.name, diff.kind, diff)


def _looked_at(diffs: list[TensorDiff], look: Callable[[list[TensorDiff]], Sequence[TensorDiff]]) -> list[TensorDiff]:
    """Take a second look at what differs by value, of a tensor with several facts at the last of them."""
    seen = look([diff.facts[-1] if diff.facts else diff for diff in diffs])
    return [
        replace(diff, facts=(*diff.facts[:-1], new), evidence=new.evidence, histogram=new.histogram)
        if diff.facts
        else new
        for diff, new in zip(diffs, seen, strict=True)
    ]


def kinds_in(replicas: ReplicaGroup, selection: Selection) -> tuple[str, ...]:
    """Name the kinds of tensors that `compare` looks at in a group, from the names alone: no tensor is read."""
    present = set(selected_kinds(dict(replicas.ranks), selection).values())
    return tuple(kind for kind in KINDS if kind in present and (kind != "rng" or selection.only or selection.rng))


def selected_kinds(snapshots: Mapping[int, Snapshot], selection: Selection) -> dict[str, str]:
    """Return the kind of each tensor of a group that is asked for, by its name without wrappers' prefixes."""
    found = _align(snapshots, {rank: normalize(snapshot.tensors) for rank, snapshot in snapshots.items()})
    kinds, _, unsure = _kinds(found, snapshots, selection)
    wanted = selector(selection.only, selection.include, selection.exclude, unsure)
    return {name: kind for name, kind in kinds.items() if wanted(name, kind)}


def _align(snapshots: Mapping[int, Snapshot], names: Mapping[int, Mapping[str, str]]) -> dict[str, dict[int, Tensor]]:
    """Collect each tensor's replicas by normalized name, in the order of the first checkpoint."""
    found: dict[str, dict[int, Tensor]] = {}
    for rank, snapshot in snapshots.items():
        for name, tensor in snapshot.tensors.items():
            found.setdefault(names[rank][name], {})[rank] = tensor
    return found


def _kinds(found: Mapping[str, Mapping[int, Tensor]], snapshots: Mapping[int, Snapshot], selection: Selection) -> Kinds:
    firsts = {name: next(iter(tensors.values())) for name, tensors in found.items()}
    shapes = {name: tensor.shape for name, tensor in firsts.items()}
    dtypes = {name: tensor.dtype for name, tensor in firsts.items()}
    parameters = [name for name, tensors in found.items() if any(t.parameter for t in tensors.values())]
    metadata = next(
        (s.metadata for s in snapshots.values() if s.metadata is not None and s.metadata.buffers is not None),
        None,
    )
    kinds = kinds_of(shapes, metadata, selection.buffers, dtypes=dtypes, parameters=parameters)
    # The first rank that has a tensor does not decide what it is if another rank's has another shape or dtype.
    asked = [name for name, kind in kinds.by_name.items() if selection.only or kind == "rng"]
    unlike = {name for name in asked if len({(t.shape, t.dtype) for t in found[name].values()}) > 1}
    by_name = {name: "buffer" if name in unlike and kind == "rng" else kind for name, kind in kinds.by_name.items()}
    return kinds._replace(by_name=by_name, unsure=kinds.unsure | unlike) if unlike else kinds


def _replica(rank: int, snapshot: Snapshot) -> Replica:
    host = None if snapshot.metadata is None else snapshot.metadata.host
    host, mesh = host or snapshot.host, mesh_of(snapshot)
    return Replica(snapshot.path, rank, snapshot.format, len(snapshot.tensors), snapshot.bytes, host, mesh)


def _normalized(names: Mapping[int, Mapping[str, str]], snapshots: Mapping[int, Snapshot]) -> dict[int, int]:
    """Count the names of each rank that had a wrapper's prefix.

    None where all ranks gave a wrapped model in memory: that is no saved file which could not be loaded elsewhere.
    """
    counts = {rank: sum(a != b for a, b in of.items()) for rank, of in names.items()}
    if in_memory(snapshots) and all(counts.values()):
        return {}
    return {rank: count for rank, count in counts.items() if count}


def _notes(snapshots: Mapping[int, Snapshot], tally: _Tally, selection: Selection, *, guessed: bool) -> list[Message]:
    """Return the notes on the files, on ranks that were not compared, and on options that change numbers and words."""
    notes = []
    by_kind = tally.by_kind.items()
    if tally.laid_out and all(of.total() == of["not_compared"] for kind, of in by_kind if kind != "optimizer_step"):
        notes.append(Note.ONLY_SHARDS())
    alone = tuple(rank for rank in snapshots if rank not in tally.compared)
    if alone and tally.compared:
        notes.append(Note.RANKS_NOT_COMPARED(ranks=alone))
    worlds = {s.metadata.world_size for s in snapshots.values() if s.metadata is not None and s.metadata.world_size}
    if len(worlds) == 1:
        (world,) = worlds
        if absent := tuple(rank for rank in range(world) if rank not in snapshots):
            notes.append(Note.RANKS_ABSENT(ranks=absent, world_size=world))
    if guessed:
        notes.append(Note.KINDS_GUESSED())
    stubs = sorted({stub for snapshot in snapshots.values() for stub in snapshot.stubs})
    if any(stub.endswith(".DTensor") for stub in stubs):  # torch's own classes within a DTensor need no note
        stubs = [stub for stub in stubs if not stub.startswith("torch.")]
    if stubs:
        notes.append(Note.UNKNOWN_CLASSES(classes=", ".join(stubs)))
    notes += dict.fromkeys(note for snapshot in snapshots.values() for note in snapshot.notes)
    if len(snapshots) > 1 and selection.quick:
        notes.append(Note.QUICK())
    if len(snapshots) > 1 and selection.reference is not None:
        notes.append(Note.REFERENCE(rank=selection.reference))
    return notes
