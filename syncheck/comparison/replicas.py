"""Compare the replicas of one group: align names, compare each tensor and value, and count the results."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.comparison.attributes import compare_attributes, compare_registration, note_attributes
from syncheck.comparison.group_tensors import GroupTensors
from syncheck.comparison.model_values import note_unknown_values
from syncheck.comparison.runs import find_claimed_twice, find_differing_settings, find_repeated_ranks
from syncheck.comparison.selection import classify, merge_metadata
from syncheck.comparison.values import compare_values, note_absent_values
from syncheck.layout.alignment import align
from syncheck.layout.copies import broken_ties, common_ties, list_ties_by_rank
from syncheck.layout.replica_groups import mesh_of
from syncheck.messages import Grouping, Note, note_if
from syncheck.records import Comparison, Counts, GroupEvidence, Replica
from syncheck.settings.ranks import compare_settings
from syncheck.snapshots import are_in_memory, get_metadata
from syncheck.tensors.value_kinds import counts_updates, stores_progress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.comparison.group_tensors import Tally
    from syncheck.comparison.selection import Classification, Selection
    from syncheck.layout.alignment import Alignment
    from syncheck.layout.groups import CheckpointGroup
    from syncheck.messages import Message
    from syncheck.records import ValueDiff
    from syncheck.snapshots import Snapshot

# The names under which trainers store the number of the step.
_STEPS = ("step", "global_step", "iteration", "iter_num")
_SETTINGS = ("lr", "weight_decay", "momentum", "decoupled_weight_decay")
# Elements of the smallest RNG state, that of a CUDA generator.
_SMALLEST_STATE = 16


def compare_group(replicas: CheckpointGroup, selection: Selection) -> Comparison:
    """Compare a group of replicas. Raises CheckpointError if a file can no longer be read."""
    alignment = align(dict(replicas.ranks))
    snapshots = alignment.snapshots
    classification = classify(alignment, selection)
    tally = GroupTensors(alignment, classification, selection).compare()
    values = _compare_values(
        replicas,
        alignment,
        classification,
        selection,
    )
    counts = tally.count_kinds()
    claimed_twice = _find_claimed_twice(replicas, snapshots)
    ties_by_rank = list_ties_by_rank(snapshots, alignment.names)
    name = replicas.run
    if replicas.step is not None:
        name = f"{replicas.run} step {replicas.step}"

    notes = note_if(claimed_twice, Note.RANKS_TWICE(ranks=claimed_twice))
    notes += _make_notes(
        snapshots,
        tally,
        selection,
        guessed=classification.kinds.guessed,
    )
    notes += note_absent_values(snapshots, values)
    notes += note_attributes(values)
    notes += note_unknown_values(values)
    # `diff` compares the settings of two models after it has joined their files.
    if not replicas.two_models:
        differing_settings, setting_notes = compare_settings(snapshots, selection.exclude)
        values += differing_settings
        notes += setting_notes

    return Comparison(
        name=name,
        run=replicas.run,
        label=replicas.label,
        uncompared=tally.find_uncompared(alignment.ranks),
        step=replicas.step,
        replicas=tuple(_make_replica(rank, snapshot) for rank, snapshot in snapshots.items()),
        counts=sum(counts.values(), Counts()),
        tensors=tuple(tally.diffs),
        ties=broken_ties(ties_by_rank, alignment.names),
        shards=tally.summarize_shards(),
        values=tuple(values),
        kinds=counts,
        left_out=tally.left_out,
        grouping=replicas.grouping,
        notes=tuple(notes),
        evidence=_collect_evidence(
            replicas,
            alignment,
            tally,
            claimed_twice=claimed_twice,
            tied=common_ties(ties_by_rank, alignment.ranks),
        ),
        not_finite=tally.list_not_finite(),
    )


def _compare_values(
    replicas: CheckpointGroup, alignment: Alignment, classification: Classification, selection: Selection
) -> list[ValueDiff]:
    """Return the diffs of values, and of the attributes of modules in memory."""
    snapshots = alignment.snapshots
    # A running job holds all values, but files of other formats may lack some.
    is_strict = are_in_memory(snapshots.values()) and not replicas.two_models
    values = compare_values(
        alignment,
        classification.is_selected,
        selection.exclude,
        strict=is_strict,
    )
    if replicas.paired:
        values += compare_registration(snapshots, classification.is_selected)

    return values + compare_attributes(snapshots, classification.is_selected)


def _collect_evidence(
    replicas: CheckpointGroup,
    alignment: Alignment,
    tally: Tally,
    *,
    claimed_twice: tuple[int, ...],
    tied: tuple[tuple[str, ...], ...],
) -> GroupEvidence:
    """Return what rules need to know about the files.

    claimed_twice: ranks of several files.
    tied: the names that share memory on every rank.
    """
    snapshots = alignment.snapshots
    first = next(iter(snapshots.values()))
    differing_settings = {}
    if _are_files_of_ranks(replicas):
        differing_settings = find_differing_settings(snapshots)

    metadata = merge_metadata(snapshots)
    step = _find_stored_step(snapshots) if metadata.step is None else metadata.step
    return GroupEvidence(
        metadata=replace(metadata, step=step),
        names=tally.names,
        hyperparameters=list_hyperparameters(first.values),
        normalized=_count_prefixes(alignment),
        stores_progress=any(map(stores_progress, snapshots.values())),
        counts_updates=all(map(counts_updates, snapshots.values())),
        runs=differing_settings,
        repeated_ranks=find_repeated_ranks(snapshots),
        claimed_twice=claimed_twice,
        absent_shards=_find_absent_shards(alignment, tally),
        tied=tied,
        equal_shards=tally.equal_shards,
        unclear_parts=tally.unclear_parts,
    )


def _find_absent_shards(alignment: Alignment, tally: Tally) -> Message | None:
    """Return why shards without a file leave the verdict open; None for the ranks of a running job."""
    # A check may compare some of the ranks only, and replicas without shards need no search.
    if are_in_memory(alignment.snapshots.values()) or not tally.shard_sets:
        return None
    from syncheck.layout.absent_shards import find_absent_shards  # only for shards

    return find_absent_shards(tally.names, alignment)


def _find_stored_step(snapshots: Mapping[int, Snapshot]) -> int | None:
    """Return the step that files store under a usual name; None for no step, and for different steps."""
    steps: set[int] = set()
    for snapshot in snapshots.values():
        numbers = [snapshot.values.get(name) for name in _STEPS]
        steps.update(number for number in numbers if isinstance(number, int))

    return steps.pop() if len(steps) == 1 else None


def _are_files_of_ranks(replicas: CheckpointGroup) -> bool:
    """Whether a group may mix the files of several runs, unlike the ranks of a running job, and two models."""
    return not replicas.paired and not replicas.two_models


def _find_claimed_twice(replicas: CheckpointGroup, snapshots: Mapping[int, Snapshot]) -> tuple[int, ...]:
    """Return the ranks that several files claim; empty if the user grouped the files, or they are no files of ranks."""
    if are_in_memory(snapshots.values()) or not _are_files_of_ranks(replicas):
        return ()

    codes = [message.code for message in replicas.grouping]
    if Grouping.EXPRESSION in codes:
        return ()

    return find_claimed_twice(snapshots)


def _make_replica(rank: int, snapshot: Snapshot) -> Replica:
    # The training's host: a file may have been copied to another machine, or into another folder.
    host = get_metadata(snapshot).host or snapshot.host
    tensor_count = len(snapshot.tensors)
    return Replica(
        snapshot.path,
        rank,
        snapshot.format,
        tensor_count,
        snapshot.bytes,
        host,
        mesh_of(snapshot),
    )


def _count_prefixes(alignment: Alignment) -> dict[int, int]:
    """Count the names with a wrapper's prefix by rank.

    Empty if all ranks compare wrapped models in memory, because prefixes only matter when files are loaded.
    """
    counts: dict[int, int] = {}
    for rank, names in alignment.names.items():
        count = sum(stored_name != name for stored_name, name in names.items())
        if count:
            counts[rank] = count

    are_all_wrapped = len(counts) == len(alignment.ranks)
    if are_all_wrapped and are_in_memory(alignment.snapshots.values()):
        return {}

    return counts


def list_hyperparameters(values: Mapping[str, Any]) -> dict[str, float]:
    """Return lr, weight decay and momentum of the first parameter group from the values of a snapshot.

    decoupled_weight_decay: 1.0 if the decay is not part of the gradients, as with AdamW.
    """
    numbers: dict[str, float] = {}
    for setting in _SETTINGS:
        value = values.get(f"optimizer.param_groups.0.{setting}")
        if isinstance(value, (int, float)):
            numbers[setting] = float(value)

    return numbers


def _make_notes(
    snapshots: Mapping[int, Snapshot], tally: Tally, selection: Selection, *, guessed: bool
) -> list[Message]:
    """Return notes about files, uncompared ranks, and options. guessed: whether kinds were guessed from names."""
    uncompared_ranks = tally.find_uncompared(tuple(snapshots))
    equal_states = _find_equal_rng(snapshots, tally)
    unknown_classes = _list_unknown_classes(snapshots)
    # A single file is not compared, so options have no effect.
    is_comparison = len(snapshots) > 1
    has_reference = is_comparison and selection.reference is not None
    return [
        *note_if(tally.has_only_shards(), Note.ONLY_SHARDS()),
        *note_if(uncompared_ranks, Note.RANKS_NOT_COMPARED(ranks=uncompared_ranks)),
        *_compare_world_sizes(snapshots),
        *note_if(equal_states, Note.EQUAL_RNG(names=equal_states)),
        *note_if(guessed and tally.by_kind, Note.KINDS_GUESSED()),
        *note_if(unknown_classes, Note.UNKNOWN_CLASSES(classes=unknown_classes)),
        *_list_file_notes(snapshots),
        *note_if(is_comparison and selection.quick, Note.QUICK()),
        *note_if(has_reference, Note.REFERENCE(rank=selection.reference)),
    ]


def _compare_world_sizes(snapshots: Mapping[int, Snapshot]) -> list[Message]:
    """Return notes if the number of ranks in the metadata is not the number of files."""
    world_sizes: dict[int, int] = {}
    for rank, snapshot in snapshots.items():
        world_size = get_metadata(snapshot).world_size
        if world_size:
            world_sizes[rank] = world_size

    if not world_sizes:
        return []

    world_size, *other_sizes = set(world_sizes.values())
    if other_sizes:
        return [Note.WORLD_SIZES(files=len(snapshots), sizes=world_sizes)]

    absent_ranks = tuple(rank for rank in range(world_size) if rank not in snapshots)
    if absent_ranks:
        return [Note.RANKS_ABSENT(ranks=absent_ranks, world_size=world_size)]

    # In memory, each rank describes itself alone.
    is_too_many = len(snapshots) > world_size and not are_in_memory(snapshots.values())
    note = Note.TOO_MANY_RANKS(files=len(snapshots), world_size=world_size)
    return note_if(is_too_many, note)


def _find_equal_rng(snapshots: Mapping[int, Snapshot], tally: Tally) -> tuple[str, ...]:
    """Return the RNG states that were compared and are equal on all ranks."""
    differing = {diff.name for diff in tally.diffs}
    states = [name for name, kind in tally.names.items() if kind == "rng"]
    equal_states = []
    for name in states:
        if name not in differing and _is_whole_state(name, snapshots):
            equal_states.append(name)

    return tuple(equal_states)


def _is_whole_state(name: str, snapshots: Mapping[int, Snapshot]) -> bool:
    """Whether an RNG state has at least the size of the smallest one; smaller tensors are positions in a state."""
    sizes = [snapshot.tensors[name].numel for snapshot in snapshots.values() if name in snapshot.tensors]
    return min(sizes, default=0) >= _SMALLEST_STATE


def _list_unknown_classes(snapshots: Mapping[int, Snapshot]) -> tuple[str, ...]:
    """Return the unknown classes in the pickles of all ranks."""
    stubs: set[str] = set()
    for snapshot in snapshots.values():
        stubs.update(snapshot.stubs)

    # A DTensor or ShardedTensor contains objects of other torch classes.
    if any(stub.endswith((".DTensor", ".ShardedTensor")) for stub in stubs):
        stubs = {stub for stub in stubs if not stub.startswith("torch.")}

    return tuple(sorted(stubs))


def _list_file_notes(snapshots: Mapping[int, Snapshot]) -> list[Message]:
    """Return the notes of the readers, each note once."""
    notes: dict[Message, None] = {}
    for snapshot in snapshots.values():
        notes |= dict.fromkeys(snapshot.notes)

    return list(notes)
