"""Compare the replicas of one group: align names, compare each tensor and value, and count the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.comparison.attributes import compare_attributes, compare_registration, note_attributes
from syncheck.comparison.classification import classify
from syncheck.comparison.group_metadata import get_metadata, hyperparameters, merge_metadata
from syncheck.comparison.group_notes import make_notes
from syncheck.comparison.group_tensors import GroupTensors
from syncheck.comparison.model_values import note_unknown_values
from syncheck.comparison.notes import note_if
from syncheck.comparison.runs import find_claimed_twice, find_differing_settings, find_repeated_ranks
from syncheck.comparison.tally import Tally
from syncheck.comparison.values import compare_values, in_memory, note_absent_values
from syncheck.layout.alignment import align
from syncheck.layout.copies import broken_ties, common_ties
from syncheck.layout.replica_groups import mesh_of
from syncheck.messages import Grouping, Note
from syncheck.records import Comparison, Counts, GroupEvidence, Replica
from syncheck.tensors.blocks import Files
from syncheck.tensors.finiteness import prepare
from syncheck.tensors.value_kinds import counts_updates, stores_progress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.comparison.classification import Classification
    from syncheck.comparison.selection import Selection
    from syncheck.layout.alignment import Alignment
    from syncheck.layout.groups import ReplicaGroup
    from syncheck.records import ValueDiff
    from syncheck.snapshots import Snapshot


def compare_group(replicas: ReplicaGroup, selection: Selection) -> Comparison:
    """Compare a group of replicas. Raises CheckpointError if a file can no longer be read."""
    alignment = align(dict(replicas.ranks))
    snapshots = alignment.snapshots
    classification = classify(alignment, selection)
    tally = _compare_tensors(alignment, classification, selection)
    values = _compare_values(
        replicas,
        alignment,
        classification,
        selection,
    )
    counts = tally.count_kinds()
    claimed_twice = _find_claimed_twice(replicas, snapshots)
    name = replicas.run
    if replicas.step is not None:
        name = f"{replicas.run} step {replicas.step}"

    notes = note_if(claimed_twice, Note.RANKS_TWICE(ranks=claimed_twice))
    notes += make_notes(
        snapshots,
        tally,
        selection,
        guessed=classification.kinds.guessed,
    )
    notes += note_absent_values(snapshots, values)
    notes += note_attributes(values)
    notes += note_unknown_values(values)
    return Comparison(
        name=name,
        run=replicas.run,
        label=replicas.label,
        uncompared=tally.find_uncompared(alignment.ranks),
        step=replicas.step,
        replicas=tuple(_make_replica(rank, snapshot) for rank, snapshot in snapshots.items()),
        counts=sum(counts.values(), Counts()),
        tensors=tuple(tally.diffs),
        ties=broken_ties(snapshots, alignment.names),
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
            claimed_twice,
        ),
        not_finite=tally.list_not_finite(),
    )


def _compare_tensors(alignment: Alignment, classification: Classification, selection: Selection) -> Tally:
    """Return the results of all tensors; empty for a single replica."""
    tally = Tally()
    snapshots = alignment.snapshots
    if len(snapshots) > 1:
        # Importing numpy for the search for NaN pays off only for large files.
        prepare(max(snapshot.bytes for snapshot in snapshots.values()))
        with Files(jobs=selection.jobs) as files:
            GroupTensors(
                alignment,
                classification,
                selection,
                files,
                tally,
            ).compare()

    return tally


def _compare_values(
    replicas: ReplicaGroup, alignment: Alignment, classification: Classification, selection: Selection
) -> list[ValueDiff]:
    """Return the diffs of values, and of the attributes of modules in memory."""
    snapshots = alignment.snapshots
    # A running job holds all values, but files of other formats may lack some.
    is_strict = in_memory(snapshots) and not replicas.two_models
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
    replicas: ReplicaGroup, alignment: Alignment, tally: Tally, claimed_twice: tuple[int, ...]
) -> GroupEvidence:
    """Return what rules need to know about the files. claimed_twice: ranks that several files claim."""
    snapshots = alignment.snapshots
    first = next(iter(snapshots.values()))
    differing_settings = {}
    if _are_files_of_ranks(replicas):
        differing_settings = find_differing_settings(snapshots)

    return GroupEvidence(
        metadata=merge_metadata(snapshots),
        names=tally.names,
        hyperparameters=hyperparameters(first.values),
        normalized=_count_prefixes(alignment),
        stores_progress=any(map(stores_progress, snapshots.values())),
        counts_updates=all(map(counts_updates, snapshots.values())),
        runs=differing_settings,
        repeated_ranks=find_repeated_ranks(snapshots),
        claimed_twice=claimed_twice,
        tied=common_ties(snapshots, alignment.names),
    )


def _are_files_of_ranks(replicas: ReplicaGroup) -> bool:
    """Whether a group may mix the files of several runs, unlike the ranks of a running job, and two models."""
    return not replicas.paired and not replicas.two_models


def _find_claimed_twice(replicas: ReplicaGroup, snapshots: Mapping[int, Snapshot]) -> tuple[int, ...]:
    """Return the ranks that several files claim; empty if the user grouped the files, or they are no files of ranks."""
    if in_memory(snapshots) or not _are_files_of_ranks(replicas):
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
    if are_all_wrapped and in_memory(alignment.snapshots):
        return {}

    return counts
