"""Measure differences against a user-selected reference replica instead of the majority.

The reference affects descriptions and numbers, but never whether a tensor differs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.errors import OptionError
from syncheck.text import names_text, ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.layout.groups import ReplicaGroup
    from syncheck.records import TensorDiff, Unreadable
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

_MOST_PATHS = 6
_MOST_DIGITS = 100


def find_reference_rank(reference: str | int | None, replicas: ReplicaGroup) -> int | None:
    """Return the rank of the reference in a group; None if the group does not contain it.

    reference: a rank, the path of a replica, or a folder with exactly one replica of the group. If a file name
    is a number, the file takes precedence over the rank with this number.
    """
    if reference is None:
        return None
    if isinstance(reference, str) and "\0" in reference:  # path functions raise ValueError
        return None
    ranks = [rank for rank, _ in replicas.ranks]
    if isinstance(reference, int):
        return reference if reference in ranks else None
    for matches in (_find_path(reference, replicas), _find_below(reference, replicas)):
        if len(matches) == 1:
            return matches[0]
    # int() raises ValueError for thousands of digits.
    short = len(reference) <= _MOST_DIGITS and reference.isdecimal()
    return int(reference) if short and int(reference) in ranks else None


def check_reference(
    reference: str | int | None, groups: Sequence[ReplicaGroup], unreadable: Sequence[Unreadable] = ()
) -> None:
    """Raise OptionError with the available ranks and paths if no group contains the reference."""
    if (
        reference is None
        or not groups
        or any(find_reference_rank(reference, replicas) is not None for replicas in groups)
    ):
        return
    for file in unreadable:
        if isinstance(reference, str) and "\0" not in reference and _is_same_path(reference, file.path):
            raise OptionError(f"it cannot be read: {file.reason}", reference=reference)
    ranks = sorted({rank for replicas in groups for rank, _ in replicas.ranks})
    paths = [snapshot.path for replicas in groups for _, snapshot in replicas.ranks]
    raise OptionError(
        f"no replica has this rank or path; there are {ranks_text(ranks)}: {names_text(paths, _MOST_PATHS)}",
        reference=reference,
    )


def describe_from_reference(diff: TensorDiff, rank: int, tensors: Mapping[int, Tensor], files: Files) -> TensorDiff:
    """Return a difference relative to a rank: ranks that differ from it are the minority, and numbers are against it.

    If ranks hold several shards of a tensor (`replica_groups`), only the minority changes, because the numbers are
    taken from the worst shard.
    """
    own = next((group for group in diff.replica_groups if rank in group), ())
    others = {other for group in diff.replica_groups if group != own for other in group}
    clustered = {member for cluster in diff.clusters for member in cluster}
    # Ranks without the tensor are in no cluster, and count as equal to each other.
    equal = next((cluster for cluster in diff.clusters if rank in cluster), tuple(r for r in own if r not in clustered))
    if not own or not equal:
        return diff
    different = [cluster for cluster in diff.clusters if rank not in cluster]
    minority = {member for member in own if member not in equal} | (others & set(diff.minority))
    diff = replace(diff, minority=tuple(sorted(minority)))
    # With two clusters, the difference is the same from both sides.
    if len(diff.replica_groups) > 1 or len(different) < 2 or not diff.mismatched or diff.reason == "missing":
        return diff
    from syncheck.tensors.differences import measure_differences  # needs numpy
    from syncheck.tensors.tolerance import Tolerance

    representatives = [tensors[cluster[0]] for cluster in (equal, *different)]
    statistics = measure_differences(representatives, files, Tolerance(), majority=True)
    return replace(diff, **statistics.size(diff.shape))


def _find_path(path: str, replicas: ReplicaGroup) -> list[int]:
    exact = [rank for rank, snapshot in replicas.ranks if snapshot.path == path]
    return exact or [rank for rank, snapshot in replicas.ranks if _is_same_path(path, snapshot.path)]


def _find_below(folder: str, replicas: ReplicaGroup) -> list[int]:
    top = os.path.join(os.path.realpath(folder), "")
    return [rank for rank, snapshot in replicas.ranks if os.path.realpath(snapshot.path).startswith(top)]


def _is_same_path(a: str, b: str) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)
