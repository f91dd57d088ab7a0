"""The replica that the user wants differences described against, in place of the majority.

It changes the words and the numbers, and never whether a tensor differs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.errors import OptionError
from syncheck.messages import names_text, ranks_text
from syncheck.snapshots import index_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.kernel.blocks import Files
    from syncheck.layout.groups import ReplicaGroup
    from syncheck.records import TensorDiff, Unreadable
    from syncheck.snapshots import Tensor

_MOST_PATHS = 6
_MOST_DIGITS = 100


def find_reference_rank(reference: str | int | None, replicas: ReplicaGroup) -> int | None:
    """Return the reference's rank in a group, None where the group does not have it.

    reference: a rank, the path of a replica, or a folder in which one replica of the group lies. A file that is called
    like a number comes before the rank of that number.
    """
    if reference is None:
        return None
    if isinstance(reference, str) and "\0" in reference:  # no path has one, and the system's functions refuse it
        return None
    ranks = [rank for rank, _ in replicas.ranks]
    if isinstance(reference, int):
        return reference if reference in ranks else None
    for found in (_at(reference, replicas), _below(reference, replicas)):
        if len(found) == 1:
            return found[0]
    # int() refuses thousands of digits.
    short = len(reference) <= _MOST_DIGITS and reference.isdecimal()
    return int(reference) if short and int(reference) in ranks else None


def check_reference(
    reference: str | int | None, groups: Sequence[ReplicaGroup], unreadable: Sequence[Unreadable] = ()
) -> None:
    """Raise OptionError, which lists what there is, where no group has the reference.

    A rank counts in each group that has it, so it need not be in all of them.
    """
    if (
        reference is None
        or not groups
        or any(find_reference_rank(reference, replicas) is not None for replicas in groups)
    ):
        return
    for file in unreadable:
        if isinstance(reference, str) and "\0" not in reference and _same(reference, file.path):
            raise OptionError(f"it cannot be read: {file.reason}", reference=reference)
    ranks = sorted({rank for replicas in groups for rank, _ in replicas.ranks})
    paths = [snapshot.path for replicas in groups for _, snapshot in replicas.ranks]
    raise OptionError(
        f"no replica has this rank or path; there are {ranks_text(ranks)}: {names_text(paths, _MOST_PATHS)}",
        reference=reference,
    )


def describe_from_reference(diff: TensorDiff, rank: int, tensors: Mapping[int, Tensor], files: Files) -> TensorDiff:
    """Return a difference as seen from a rank: the others are the minority, and the gaps are those to its bytes.

    Where ranks hold several parts of a tensor (`replica_groups`), only the minority changes: the numbers are those of
    the part that differs most.
    """
    own = next((group for group in diff.replica_groups if rank in group), ())
    others = {other for group in diff.replica_groups if group != own for other in group}
    told = {found for cluster in diff.clusters for found in cluster}
    # A rank in no cluster lacks the tensor, as do the others like it.
    alike = next((found for found in diff.clusters if rank in found), tuple(r for r in own if r not in told))
    if not own or not alike:
        return diff
    apart = [found for found in diff.clusters if rank not in found]
    minority = {found for found in own if found not in alike} | (others & set(diff.minority))
    diff = replace(diff, minority=tuple(sorted(minority)))
    # Between two clusters the gap is one and the same; and what was not read has none.
    if len(diff.replica_groups) > 1 or len(apart) < 2 or not diff.mismatched or diff.reason == "missing":
        return diff
    from syncheck.differences.measurement import measure_differences  # and numpy with it
    from syncheck.tolerance import Tolerance

    gaps = measure_differences([tensors[found[0]] for found in (alike, *apart)], files, Tolerance(), majority=True)
    return replace(
        diff,
        max_abs=gaps.max_abs,
        max_rel=gaps.max_rel,
        max_ulp=gaps.max_ulp,
        index=None if gaps.worst is None else index_at(gaps.worst, diff.shape),
    )


def _at(path: str, replicas: ReplicaGroup) -> list[int]:
    exact = [rank for rank, snapshot in replicas.ranks if snapshot.path == path]
    return exact or [rank for rank, snapshot in replicas.ranks if _same(path, snapshot.path)]


def _below(folder: str, replicas: ReplicaGroup) -> list[int]:
    top = os.path.join(os.path.realpath(folder), "")
    return [rank for rank, snapshot in replicas.ranks if os.path.realpath(snapshot.path).startswith(top)]


def _same(a: str, b: str) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)
