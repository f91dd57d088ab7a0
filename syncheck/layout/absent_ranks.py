"""Find the ranks whose files are missing in one step, by the metadata, the other steps, and gaps between ranks."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.layout.groups import rank_of
from syncheck.layout.path_numbers import split_path
from syncheck.messages import Grouping, Note
from syncheck.snapshots import are_in_memory, get_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.layout.groups import CheckpointGroup
    from syncheck.messages import Message

    # A step and the folder of its files, without the numbers of ranks and steps.
    Place = tuple[int | None, str]

# Groups whose ranks are positions in the order of the files.
_POSITIONS = frozenset({Grouping.NO_RANKS, Grouping.NO_RANKS_ONE_STEP, Grouping.NUMBERED_BY_ORDER, Grouping.MEMORY})


def note_absent_ranks(groups: Sequence[CheckpointGroup], unreadable: Iterable[str]) -> list[Message]:
    """Return a note that names the ranks without a file in a step; none if no file is missing.

    A file is missing if the metadata lists its rank. Without metadata, it is missing if another step of the run has a
    file of this rank, or if the group has a file of a higher rank.

    unreadable: the paths of files that exist, and that no group holds.
    """
    present = _find_present(groups, unreadable)
    ranks_of_runs: dict[str, set[int]] = defaultdict(set)
    compared = [group for group in groups if _has_known_ranks(group)]
    for group in compared:
        ranks_of_runs[group.run].update(dict(group.ranks))
    absences = []
    for group in compared:
        expected_ranks = _find_expected(group, ranks_of_runs[group.run])
        absent_ranks = expected_ranks - dict(group.ranks).keys() - present[_get_place(group)]
        if absent_ranks:
            title = group.run if group.step is None else f"{group.run} step {group.step}"
            absences.append(Note.RANKS_OF_GROUP(ranks=tuple(sorted(absent_ranks)), group=title))
    return [Note.NO_FILES(absences=absences)] if absences else []


def _find_present(groups: Iterable[CheckpointGroup], unreadable: Iterable[str]) -> dict[Place, set[int | None]]:
    """Return the ranks with any file by place: the files of one step may be several groups, or damaged."""
    present: dict[Place, set[int | None]] = defaultdict(set)
    for group in groups:
        present[_get_place(group)].update(dict(group.ranks))
    for path in unreadable:
        parts = split_path(path)
        present[parts.number_of("step"), _get_folder(path)].add(parts.number_of("rank"))
    return present


def _get_place(group: CheckpointGroup) -> Place:
    return group.step, _get_folder(group.ranks[0][1].path)


def _get_folder(path: str) -> str:
    """Return the folder of a file with `*` for ranks and steps."""
    return os.path.dirname(split_path(path).key().run)


def _has_known_ranks(group: CheckpointGroup) -> bool:
    """Whether a group of several files has the ranks of its metadata or names. A single file has no replica at all."""
    # A check of a running job may concern some of its ranks.
    if are_in_memory(snapshot for _, snapshot in group.ranks):
        return False
    codes = {message.code for message in group.grouping}
    return len(group.ranks) > 1 and codes.isdisjoint(_POSITIONS)


def _find_expected(group: CheckpointGroup, ranks_of_run: set[int]) -> set[int]:
    """Return the ranks that should have a file. ranks_of_run: the ranks with a file in any step."""
    _, first_snapshot = group.ranks[0]
    # Contradicting numbers have a note of their own.
    world_size = get_metadata(first_snapshot).world_size
    # A run may go on with another number of ranks.
    if world_size:
        return set(range(world_size))
    are_named = all(rank_of(snapshot) == rank for rank, snapshot in group.ranks)
    last_rank = max(ranks_of_run)
    # A number without the word rank may count something else, so its gaps show nothing.
    return set(range(last_rank)) | ranks_of_run if are_named else ranks_of_run
