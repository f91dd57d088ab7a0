"""Notes about a group: limits of its files, ranks that were not compared, and options that limit the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.comparison.group_metadata import get_metadata
from syncheck.comparison.notes import note_if
from syncheck.comparison.values import in_memory
from syncheck.messages import Note

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.comparison.selection import Selection
    from syncheck.comparison.tally import Tally
    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot

# Elements of the smallest RNG state, that of a CUDA generator.
_SMALLEST_STATE = 16


def make_notes(
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
    is_too_many = len(snapshots) > world_size and not in_memory(snapshots)
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
