"""Measure differences against a user-selected reference replica instead of the majority.

The reference affects descriptions and numbers, but never whether a tensor differs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from syncheck.errors import OptionError
from syncheck.records import Reason
from syncheck.text import find_set, names_text, ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.layout.groups import CheckpointGroup
    from syncheck.records import TensorDiff, Unreadable
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

_MOST_PATHS = 6
_MOST_DIGITS = 100


def find_reference_rank(reference: str | int | None, replicas: CheckpointGroup) -> int | None:
    """Return the rank of the reference in a group; None if the group does not contain it.

    reference: a rank, the path of a replica, or a folder with exactly one replica of the group. If a file name
    is a number, the file takes precedence over the rank with this number.
    """
    if isinstance(reference, str):
        matching_files = _find_path(reference, replicas)
        matching_folders = _find_below(reference, replicas)
        for matches in (matching_files, matching_folders):
            if len(matches) == 1:
                return matches[0]

        reference = _parse_rank(reference)

    ranks = [rank for rank, _ in replicas.ranks]
    return reference if reference in ranks else None


def _parse_rank(text: str) -> int | None:
    """Return the number in a text; None if it is no number."""
    # int() raises ValueError for thousands of digits.
    if len(text) > _MOST_DIGITS:
        return None

    return int(text) if text.isdecimal() else None


def check_reference(
    reference: str | int | None, groups: Sequence[CheckpointGroup], unreadable: Sequence[Unreadable] = ()
) -> None:
    """Raise OptionError with the available ranks and paths if no group contains the reference."""
    if reference is None:
        return

    # A comparison without replicas is an error of its own.
    if not groups:
        return

    ranks: set[int] = set()
    paths: list[str] = []
    for replicas in groups:
        if find_reference_rank(reference, replicas) is not None:
            return

        for rank, snapshot in replicas.ranks:
            ranks.add(rank)
            paths.append(snapshot.path)

    for file in unreadable:
        if isinstance(reference, str) and _is_same_path(reference, file.path):
            raise OptionError(f"it cannot be read: {file.reason}", reference=reference)

    verb = "is only" if len(ranks) == 1 else "are"
    candidates = f"{ranks_text(sorted(ranks))}: {names_text(paths, _MOST_PATHS)}"
    raise OptionError(
        f"no replica has this rank or path; there {verb} {candidates}",
        reference=reference,
    )


def describe_from_reference(diff: TensorDiff, rank: int, tensors: Mapping[int, Tensor], files: Files) -> TensorDiff:
    """Return a difference relative to a rank: ranks that differ from it are the minority, and numbers are against it.

    If ranks hold several shards of a tensor (`replica_groups`), only the minority changes, because the numbers are
    taken from the worst shard.
    """
    ranks_to_compare = set(find_set(rank, diff.replica_groups))
    if not ranks_to_compare:
        return diff

    equal_ranks = set(find_set(rank, diff.clusters))
    if not equal_ranks:
        # Ranks without the tensor are in no cluster, and count as equal to each other.
        equal_ranks = ranks_to_compare - set(chain.from_iterable(diff.clusters))

    # The reference is in one replica group, so the minority of the other groups stays.
    ranks_of_other_groups = set(chain.from_iterable(diff.replica_groups)) - ranks_to_compare
    minority = ranks_of_other_groups.intersection(diff.minority)
    minority |= ranks_to_compare - equal_ranks
    diff = replace(diff, minority=tuple(sorted(minority)))
    different = [cluster for cluster in diff.clusters if rank not in cluster]
    # With two clusters, the difference is the same from both sides.
    if len(different) < 2 or len(diff.replica_groups) > 1:
        return diff

    # Without numbers, there is nothing to measure again.
    if not diff.mismatched or diff.reason is Reason.MISSING:
        return diff

    from syncheck.tensors.differences import measure_differences  # needs numpy
    from syncheck.tensors.tolerance import Tolerance

    representatives = [tensors[cluster[0]] for cluster in different]
    statistics = measure_differences(
        [tensors[rank], *representatives],
        files,
        Tolerance(),
        majority=True,
    )
    return replace(diff, **statistics.size(diff.shape))


def _find_path(path: str, replicas: CheckpointGroup) -> list[int]:
    """Return the ranks of the replicas with a path, in this spelling or in another one."""
    exact = [rank for rank, snapshot in replicas.ranks if snapshot.path == path]
    if exact:
        return exact

    return [rank for rank, snapshot in replicas.ranks if _is_same_path(path, snapshot.path)]


def _find_below(folder: str, replicas: CheckpointGroup) -> list[int]:
    """Return the ranks of the replicas in a folder."""
    top = os.path.join(_resolve(folder), "")
    return [rank for rank, snapshot in replicas.ranks if _resolve(snapshot.path).startswith(top)]


def _is_same_path(a: str, b: str) -> bool:
    return _resolve(a) == _resolve(b)


def _resolve(path: str) -> str:
    """Return a path without links; a text with a null character, which is no path, as it is."""
    # Path functions raise ValueError for a null character.
    return path if "\0" in path else os.path.realpath(path)
