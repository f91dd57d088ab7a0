"""Compare the replicas of one group: align names, compare each tensor, and count the results."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from syncheck.comparison.attributes import compare_attributes, compare_registration, note_attributes
from syncheck.comparison.evidence import add_evidence
from syncheck.comparison.model_values import note_unknown_values
from syncheck.comparison.reference import describe_from_reference
from syncheck.comparison.runs import find_claimed_twice, find_differing_settings, find_repeated_ranks
from syncheck.comparison.tensors import compare_tensor, skip_tensor
from syncheck.comparison.values import compare_values, in_memory, note_absent_values
from syncheck.layout.alignment import align
from syncheck.layout.copies import broken_ties, common_ties
from syncheck.layout.dtensors import assemble_copies
from syncheck.layout.optimizer_shards import OptimizerShards, find_lost_state
from syncheck.layout.replica_groups import (
    DIFFERENT_PARAMETERS,
    coordinates_in,
    is_mixed,
    mesh_of,
)
from syncheck.messages import Detail, Grouping, Note
from syncheck.records import Comparison, Counts, GroupEvidence, NotFinite, Reason, Replica, Shards, TensorDiff
from syncheck.snapshots import Metadata
from syncheck.tensors.blocks import Files
from syncheck.tensors.finiteness import FiniteScan, prepare
from syncheck.tensors.kinds import KINDS, OPTIMIZER, Kinds, classify_tensors, make_selector
from syncheck.tensors.value_kinds import counts_updates, is_membership, stores_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from syncheck.comparison.selection import Selection
    from syncheck.layout.alignment import Alignment
    from syncheck.layout.groups import ReplicaGroup
    from syncheck.layout.replica_groups import ReplicaSets
    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot, Tensor

_PARTITIONED = "partitioned over the ranks"
# Elements of the smallest RNG state.
_SMALLEST_STATE = 16


def compare_group(replicas: ReplicaGroup, selection: Selection) -> Comparison:
    """Compare a group of replicas. Raises CheckpointError if a file can no longer be read."""
    alignment = align(dict(replicas.ranks))
    snapshots, names = alignment.snapshots, alignment.names
    kinds, wanted = _classify(alignment, selection)
    tally = _Tally()
    if len(snapshots) > 1:
        prepare(max(snapshot.bytes for snapshot in snapshots.values()))
        _compare_tensors(alignment, kinds.by_name, wanted, selection, tally)
    alone = tuple(rank for rank in snapshots if rank not in tally.compared)
    counts = {
        kind: Counts(tensors=tally.by_kind[kind].total(), **tally.by_kind[kind])
        for kind in KINDS
        if kind in tally.by_kind
    }
    metadata = _merge_metadata(snapshots)
    kept = make_selector(frozenset(), (), selection.exclude)
    strict = in_memory(snapshots) and not replicas.two_models
    values = compare_values(alignment, wanted, kept, _partial_values(snapshots, alignment.optimizer), strict=strict)
    values += compare_registration(snapshots, wanted) if replicas.paired else []
    values += compare_attributes(snapshots, wanted)
    claimed_twice = _find_claimed_twice(replicas, snapshots)
    return Comparison(
        name=replicas.run if replicas.step is None else f"{replicas.run} step {replicas.step}",
        run=replicas.run,
        label=replicas.label,
        uncompared=alone if tally.compared else (),
        step=replicas.step,
        replicas=tuple(_make_replica(rank, snapshot) for rank, snapshot in snapshots.items()),
        counts=sum(counts.values(), Counts()),
        tensors=tuple(tally.diffs),
        ties=broken_ties(snapshots, names),
        shards=tally.shards(),
        values=tuple(values),
        kinds=counts,
        left_out=tally.left_out,
        grouping=replicas.grouping,
        notes=(
            *([Note.RANKS_TWICE(ranks=claimed_twice)] if claimed_twice else []),
            *_make_notes(snapshots, tally, selection, guessed=kinds.guessed and bool(tally.by_kind)),
            *note_absent_values(snapshots, values),
            *note_attributes(values),
            *note_unknown_values(values),
        ),
        evidence=GroupEvidence(
            metadata=metadata,
            names=tally.names,
            hyperparameters=hyperparameters(next(iter(snapshots.values())).values),
            normalized=_count_prefixes(names, snapshots),
            stores_progress=any(map(stores_progress, snapshots.values())),
            counts_updates=all(map(counts_updates, snapshots.values())),
            # The ranks of a running job, and two models, are compared for other reasons.
            runs={} if replicas.paired or replicas.two_models else find_differing_settings(snapshots),
            repeated_ranks=find_repeated_ranks(snapshots),
            claimed_twice=claimed_twice,
            tied=common_ties(snapshots, names),
        ),
        not_finite=NotFinite(tuple(tally.not_finite), len(tally.not_finite)) if tally.not_finite else None,
    )


def _find_claimed_twice(replicas: ReplicaGroup, snapshots: Mapping[int, Snapshot]) -> tuple[int, ...]:
    """Return the ranks that several files claim; empty if the user grouped the files, or they are no files of ranks."""
    chosen = any(message.code is Grouping.EXPRESSION for message in replicas.grouping)
    if chosen or replicas.paired or replicas.two_models or in_memory(snapshots):
        return ()
    return find_claimed_twice(snapshots)


def _merge_metadata(snapshots: Mapping[int, Snapshot]) -> Metadata:
    """Return the metadata of the first rank with any; for stages and experts, with the names of all ranks."""
    blocks = [snapshot.metadata for snapshot in snapshots.values() if snapshot.metadata is not None]
    positions = {coordinates_in(snapshot, DIFFERENT_PARAMETERS) for snapshot in snapshots.values()}
    if not blocks:
        return Metadata()
    # "active" on any rank is the strongest evidence.
    first = replace(blocks[0], no_sync=min((block.no_sync for block in blocks if block.no_sync), default=""))
    if len(positions) < 2:
        return first
    return replace(
        first,
        optimizer_parameters=_join(block.optimizer_parameters for block in blocks),
        buffers=None
        if any(block.buffers is None for block in blocks)
        else _join(block.buffers or () for block in blocks),
        frozen=_join(block.frozen for block in blocks),
    )


def _join(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(names)))


def _partial_values(snapshots: Mapping[int, Snapshot], parts: OptimizerShards) -> Callable[[str], bool]:
    """Return a predicate for values of a partitioned optimizer: group memberships, and values of single parts.

    Pipeline stages and ranks with other experts have different members too, but ranks with equal coordinates must have
    the same.
    """
    sharded = any(s.metadata is not None and s.metadata.optimizer_sharded for s in snapshots.values())
    stages: dict[Hashable, list[Snapshot]] = defaultdict(list)
    for snapshot in snapshots.values():
        stages[coordinates_in(snapshot, DIFFERENT_PARAMETERS)].append(snapshot)

    def is_partial(name: str) -> bool:
        if parts.labels and parts.holds(name, of_optimizer=False):
            return True
        if name.rpartition(".")[0] in parts.owned:  # a step counter that is no tensor
            return True
        if not is_membership(name):
            return False
        uniform = all(s.values.get(name) == ranks[0].values.get(name) for ranks in stages.values() for s in ranks)
        return sharded or parts != OptimizerShards() or (len(stages) > 1 and uniform)

    return is_partial


def hyperparameters(values: Mapping[str, Any]) -> dict[str, float]:
    """Return lr, weight decay and momentum of the first parameter group from the values of a snapshot.

    decoupled_weight_decay: 1.0 if the decay is not part of the gradients, as with AdamW.
    """
    names = ("lr", "weight_decay", "momentum", "decoupled_weight_decay")
    settings = {name: values.get(f"optimizer.param_groups.0.{name}") for name in names}
    return {name: float(value) for name, value in settings.items() if isinstance(value, (int, float))}


@dataclass
class _Tally:
    """Running results of the comparison of a group."""

    by_kind: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    diffs: list[TensorDiff] = field(default_factory=list)
    left_out: int = 0
    names: dict[str, str] = field(default_factory=dict)
    compared: set[int] = field(default_factory=set)
    """Ranks with a compared tensor other than step counters."""
    laid_out: dict[tuple[str, str], list[tuple[tuple[int, ...], ...]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By kind and layout of the shards: the sets of compared ranks of each tensor."""
    not_finite: list[str] = field(default_factory=list)
    """Names of tensors that hold NaN or infinity on all ranks."""

    def add(
        self,
        name: str,
        kind: str,
        diff: TensorDiff | None,
        replica_sets: ReplicaSets | None = None,
        *,
        partitioned: bool = False,
    ) -> None:
        """Count a tensor. partitioned: whether it belongs to partitioned optimizer state."""
        self.by_kind[kind][diff.status if diff else "identical"] += 1
        self.names[name] = kind
        compared = diff is None or diff.status != "not_compared" or diff.reason == "missing"
        if compared and replica_sets is not None and kind != "optimizer_step":
            self.compared.update(*replica_sets.comparable)
        if diff is not None:
            self.diffs.append(diff)
        sharded = diff is not None and diff.reason == "sharded"
        if replica_sets is not None and replica_sets.kind:
            self.laid_out[replica_sets.kind, replica_sets.layout].append(() if sharded else replica_sets.comparable)
        elif sharded and diff is not None:
            key = ("optimizer", _PARTITIONED) if partitioned else ("DTensor", str(diff.detail or ""))
            self.laid_out[key].append(())

    def shards(self) -> tuple[Shards, ...]:
        """Return a summary of the sharded tensors by kind and layout."""
        return tuple(
            Shards(kind, layout, len(sets), sum(map(bool, sets)), tuple(dict.fromkeys(chain.from_iterable(sets))))
            for (kind, layout), sets in self.laid_out.items()
        )


def _compare_tensors(
    alignment: Alignment,
    kinds: Mapping[str, str],
    wanted: Callable[[str, str], bool],
    selection: Selection,
    tally: _Tally,
) -> None:
    """Compare every selected tensor and add the results to `tally`."""
    parts = alignment.optimizer
    aligned = dict(alignment.tensors)
    with Files(jobs=selection.jobs) as files:
        for name, tensors in alignment.tensors.items():
            kind = kinds[name]
            if not wanted(name, kind):
                tally.left_out += 1
                continue
            if kind == "rng" and not (selection.only or selection.rng):
                # RNG states and the errors of PowerSGD differ between ranks by design.
                detail = Detail.POWERSGD_ERROR() if ".error_dict." in f".{name}" else Detail.RNG_STATE()
                tally.add(name, kind, skip_tensor(name, kind, tensors, Reason.RNG, detail))
                continue
            if alignment.positions.stages and is_mixed(tensors):
                if not (complete := assemble_copies(tensors)):
                    detail = Detail.AMBIGUOUS_LAYOUT(layout=alignment.find_replica_sets(name, tensors).layout)
                    tally.add(name, kind, skip_tensor(name, kind, tensors, Reason.AMBIGUOUS, detail))
                    continue
                aligned[name] = tensors = complete
            # The owner of a parameter must hold its state; if it does not, the state is lost.
            parameter = name.rpartition(".")[0]
            lost = any(parameter in own for rank, own in parts.own.items() if rank not in tensors)
            partial = parts.holds(name, of_optimizer=kind in OPTIMIZER)
            partitioned = partial and not lost and not parts.unclear
            tolerance = selection.tolerance.of(name, kind, next(iter(tensors.values())).dtype)
            replica_sets = alignment.find_replica_sets(name, tensors)
            scan = FiniteScan(next(iter(tensors.values())).dtype, nan_only=kind == "buffer")
            diff = compare_tensor(
                name,
                kind,
                tensors,
                replica_sets,
                files,
                tolerance,
                sharded=partitioned,
                quick=selection.quick,
                scan=scan,
            )
            if scan.found if diff is None else _is_not_finite(diff):
                tally.not_finite.append(name)
            if diff is not None and diff.out_of_sync and parts.unclear and partial:
                diff = skip_tensor(name, kind, tensors, Reason.AMBIGUOUS, parts.unclear)
            if diff is not None and selection.reference is not None:
                facts = tuple(describe_from_reference(fact, selection.reference, tensors, files) for fact in diff.facts)
                diff = replace(describe_from_reference(diff, selection.reference, tensors, files), facts=facts)
            tally.add(name, kind, diff, replica_sets, partitioned=partitioned)
        tally.diffs = _inspect(tally.diffs, lambda diffs: add_evidence(diffs, aligned, files))
        if selection.histograms:
            from syncheck.comparison import histograms

            def exact(diff: TensorDiff) -> bool:  # differences from a reference do not depend on the tolerance
                tolerance = selection.tolerance.of(diff.name, diff.kind, diff.dtype)
                return tolerance.exact or selection.reference is not None

            tally.diffs = _inspect(tally.diffs, lambda diffs: histograms.add_histograms(diffs, aligned, files, exact))
    for diff in find_lost_state(parts, aligned):
        if wanted(diff.name, diff.kind):
            tally.add(diff.name, diff.kind, diff)


def _find_equal_rng(snapshots: Mapping[int, Snapshot], tally: _Tally) -> tuple[str, ...]:
    """Return the RNG states that were compared and are equal on all of several ranks."""
    differing = {diff.name for diff in tally.diffs}
    equal_states = []
    for name, kind in tally.names.items():
        if kind != "rng" or name in differing or len(snapshots) < 2:
            continue
        # Smaller tensors are positions in a state. The state of a CUDA generator has 16 bytes.
        sizes = [snapshot.tensors[name].numel for snapshot in snapshots.values() if name in snapshot.tensors]
        if sizes and min(sizes) >= _SMALLEST_STATE:
            equal_states.append(name)
    return tuple(equal_states)


def _is_not_finite(diff: TensorDiff) -> bool:
    """Whether a differing tensor holds NaN or infinity on all ranks. The numbers of buffers do not separate both."""
    return diff.kind != "buffer" and bool(diff.nonfinite) and all(diff.nonfinite.values())


def _inspect(diffs: list[TensorDiff], inspect: Callable[[list[TensorDiff]], Sequence[TensorDiff]]) -> list[TensorDiff]:
    """Add evidence or histograms to the diffs. If a tensor has several facts, the last one is about its values."""
    inspected = inspect([diff.facts[-1] if diff.facts else diff for diff in diffs])
    return [
        replace(diff, facts=(*diff.facts[:-1], new), evidence=new.evidence, histogram=new.histogram)
        if diff.facts
        else new
        for diff, new in zip(diffs, inspected, strict=True)
    ]


def kinds_in(replicas: ReplicaGroup, selection: Selection) -> tuple[str, ...]:
    """Return the kinds of tensors to compare, without reading tensors."""
    present = set(selected_kinds(align(dict(replicas.ranks)), selection).values())
    return tuple(kind for kind in KINDS if kind in present and (kind != "rng" or selection.only or selection.rng))


def selected_kinds(alignment: Alignment, selection: Selection) -> dict[str, str]:
    """Return the kind of each selected tensor by its common name."""
    kinds, wanted = _classify(alignment, selection)
    return {name: kind for name, kind in kinds.by_name.items() if wanted(name, kind)}


def _classify(alignment: Alignment, selection: Selection) -> tuple[Kinds, Callable[[str, str], bool]]:
    """Return the kinds of tensors, and a predicate for the selection that takes names and kinds."""
    kinds = _find_kinds(alignment.tensors, alignment.snapshots, selection)
    return kinds, make_selector(selection.only, selection.include, selection.exclude, kinds.unsure)


def _find_kinds(
    aligned: Mapping[str, Mapping[int, Tensor]], snapshots: Mapping[int, Snapshot], selection: Selection
) -> Kinds:
    firsts = {name: next(iter(tensors.values())) for name, tensors in aligned.items()}
    shapes = {name: tensor.shape for name, tensor in firsts.items()}
    dtypes = {name: tensor.dtype for name, tensor in firsts.items()}
    parameters = [name for name, tensors in aligned.items() if any(t.parameter for t in tensors.values())]
    described = {r: s for r, s in snapshots.items() if s.metadata is not None and s.metadata.buffers is not None}
    metadata = _merge_metadata(described) if described else None
    kinds = classify_tensors(shapes, metadata, selection.buffers, dtypes=dtypes, parameters=parameters)
    # The kind depends on the shape and dtype on the first rank, so it is unsure if shape or dtype differ between ranks.
    selected = [name for name, kind in kinds.by_name.items() if selection.only or kind == "rng"]
    mixed = {name for name in selected if len({(t.shape, t.dtype) for t in aligned[name].values()}) > 1}
    by_name = {name: "buffer" if name in mixed and kind == "rng" else kind for name, kind in kinds.by_name.items()}
    return kinds._replace(by_name=by_name, unsure=kinds.unsure | mixed) if mixed else kinds


def _make_replica(rank: int, snapshot: Snapshot) -> Replica:
    host = None if snapshot.metadata is None else snapshot.metadata.host
    host, mesh = host or snapshot.host, mesh_of(snapshot)
    return Replica(snapshot.path, rank, snapshot.format, len(snapshot.tensors), snapshot.bytes, host, mesh)


def _count_prefixes(names: Mapping[int, Mapping[str, str]], snapshots: Mapping[int, Snapshot]) -> dict[int, int]:
    """Count the names with a wrapper's prefix by rank.

    Empty if all ranks compare wrapped models in memory, because prefixes only matter when files are loaded.
    """
    counts = {rank: sum(a != b for a, b in renamed.items()) for rank, renamed in names.items()}
    if in_memory(snapshots) and all(counts.values()):
        return {}
    return {rank: count for rank, count in counts.items() if count}


def _compare_world_sizes(snapshots: Mapping[int, Snapshot]) -> list[Message]:
    """Return notes if the number of ranks in the metadata is not the number of files."""
    worlds = {
        rank: snapshot.metadata.world_size
        for rank, snapshot in snapshots.items()
        if snapshot.metadata is not None and snapshot.metadata.world_size
    }
    if len(set(worlds.values())) > 1:
        return [Note.WORLD_SIZES(files=len(snapshots), sizes=worlds)]
    if not worlds:
        return []
    world = next(iter(worlds.values()))
    absent = tuple(rank for rank in range(world) if rank not in snapshots)
    if absent:
        return [Note.RANKS_ABSENT(ranks=absent, world_size=world)]
    # In memory, each rank describes itself alone.
    if len(snapshots) > world and not in_memory(snapshots):
        return [Note.TOO_MANY_RANKS(files=len(snapshots), world_size=world)]
    return []


def _make_notes(
    snapshots: Mapping[int, Snapshot], tally: _Tally, selection: Selection, *, guessed: bool
) -> list[Message]:
    """Return notes about files, uncompared ranks, and options."""
    notes = []
    if tally.laid_out and all(
        counts.total() == counts["not_compared"] for kind, counts in tally.by_kind.items() if kind != "optimizer_step"
    ):
        notes.append(Note.ONLY_SHARDS())
    alone = tuple(rank for rank in snapshots if rank not in tally.compared)
    if alone and tally.compared:
        notes.append(Note.RANKS_NOT_COMPARED(ranks=alone))
    notes += _compare_world_sizes(snapshots)
    if equal_states := _find_equal_rng(snapshots, tally):
        notes.append(Note.EQUAL_RNG(names=equal_states))
    if guessed:
        notes.append(Note.KINDS_GUESSED())
    stubs = sorted({stub for snapshot in snapshots.values() for stub in snapshot.stubs})
    # A DTensor or ShardedTensor contains objects of other torch classes.
    if any(stub.endswith((".DTensor", ".ShardedTensor")) for stub in stubs):
        stubs = [stub for stub in stubs if not stub.startswith("torch.")]
    if stubs:
        notes.append(Note.UNKNOWN_CLASSES(classes=tuple(stubs)))
    notes += dict.fromkeys(note for snapshot in snapshots.values() for note in snapshot.notes)
    if len(snapshots) > 1 and selection.quick:
        notes.append(Note.QUICK())
    if len(snapshots) > 1 and selection.reference is not None:
        notes.append(Note.REFERENCE(rank=selection.reference))
    return notes
