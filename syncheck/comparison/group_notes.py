"""Notes about a group: limits of its files, ranks that were not compared, and options that limit the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.comparison.values import in_memory
from syncheck.messages import Note

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.comparison.selection import Selection
    from syncheck.comparison.tally import Tally
    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot

# Elements of the smallest RNG state.
_SMALLEST_STATE = 16


def make_notes(
    snapshots: Mapping[int, Snapshot], tally: Tally, selection: Selection, *, guessed: bool
) -> list[Message]:
    """Return notes about files, uncompared ranks, and options. guessed: whether kinds were guessed from names."""
    notes: list[Message] = []
    if tally.has_only_shards():
        notes.append(Note.ONLY_SHARDS())

    uncompared_ranks = tally.find_uncompared(tuple(snapshots))
    if uncompared_ranks and tally.compared:
        notes.append(Note.RANKS_NOT_COMPARED(ranks=uncompared_ranks))

    notes += _compare_world_sizes(snapshots)
    equal_states = _find_equal_rng(snapshots, tally)
    if equal_states:
        notes.append(Note.EQUAL_RNG(names=equal_states))

    if guessed and tally.by_kind:
        notes.append(Note.KINDS_GUESSED())

    stubs = _list_unknown_classes(snapshots)
    if stubs:
        notes.append(Note.UNKNOWN_CLASSES(classes=stubs))

    notes += _list_file_notes(snapshots)
    if len(snapshots) > 1 and selection.quick:
        notes.append(Note.QUICK())

    if len(snapshots) > 1 and selection.reference is not None:
        notes.append(Note.REFERENCE(rank=selection.reference))

    return notes


def _compare_world_sizes(snapshots: Mapping[int, Snapshot]) -> list[Message]:
    """Return notes if the number of ranks in the metadata is not the number of files."""
    world_sizes: dict[int, int] = {}
    for rank, snapshot in snapshots.items():
        if snapshot.metadata is not None and snapshot.metadata.world_size:
            world_sizes[rank] = snapshot.metadata.world_size

    if not world_sizes:
        return []

    if len(set(world_sizes.values())) > 1:
        return [Note.WORLD_SIZES(files=len(snapshots), sizes=world_sizes)]

    world_size = next(iter(world_sizes.values()))
    absent_ranks = tuple(rank for rank in range(world_size) if rank not in snapshots)
    if absent_ranks:
        return [Note.RANKS_ABSENT(ranks=absent_ranks, world_size=world_size)]

    # In memory, each rank describes itself alone.
    if len(snapshots) > world_size and not in_memory(snapshots):
        return [Note.TOO_MANY_RANKS(files=len(snapshots), world_size=world_size)]

    return []


def _find_equal_rng(snapshots: Mapping[int, Snapshot], tally: Tally) -> tuple[str, ...]:
    """Return the RNG states that were compared and are equal on all of several ranks."""
    if len(snapshots) < 2:
        return ()

    differing = {diff.name for diff in tally.diffs}
    equal_states = []
    for name, kind in tally.names.items():
        if kind != "rng" or name in differing:
            continue

        # Smaller tensors are positions in a state. The state of a CUDA generator has 16 bytes.
        sizes = [snapshot.tensors[name].numel for snapshot in snapshots.values() if name in snapshot.tensors]
        if min(sizes, default=0) >= _SMALLEST_STATE:
            equal_states.append(name)

    return tuple(equal_states)


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
