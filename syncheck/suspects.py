"""Which ranks are to blame for some differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.records import Group, TensorDiff


def suspects(tensors: Iterable[TensorDiff], group: Group) -> tuple[int, ...]:
    """Return the ranks outside the majority of these tensors; where no majority stands, all that do not agree."""
    diffs = list(tensors)
    odd = {rank for diff in diffs for rank in diff.minority}
    if not odd or len(odd) >= len(group.replicas):
        odd = {rank for diff in diffs for found in diff.clusters for rank in found}
    return tuple(sorted(odd)) or group.ranks
