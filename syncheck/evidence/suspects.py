"""Which ranks are to blame for some differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.records import Comparison, TensorDiff


def suspects(tensors: Iterable[TensorDiff], group: Comparison) -> tuple[int, ...]:
    """Return the ranks outside the majority of these tensors; where no majority stands, all that do not agree.

    That two ranks agree on a few tensors of many, as on a bias of which only the rounding moves, makes no majority.
    """
    # Running statistics differ between ranks by themselves, so they accuse nobody beside tensors that do not.
    diffs = list(tensors)
    diffs = [diff for diff in diffs if diff.kind not in BN_STATISTICS] or diffs
    odd = {rank for diff in diffs for rank in diff.minority}
    without = sum(len(diff.clusters) > 1 and not diff.minority for diff in diffs)
    if not odd or len(odd) >= len(group.replicas) or 2 * without > len(diffs):
        odd = {rank for diff in diffs for found in diff.clusters for rank in found}
    return tuple(sorted(odd)) or group.ranks


def sets_within(diff: TensorDiff) -> list[list[tuple[int, ...]]]:
    """Return, of each replica group within which bytes differ, the sets of ranks that hold equal bytes."""
    if len(diff.replica_groups) < 2:
        return [list(diff.clusters)] if len(diff.clusters) > 1 else []
    # By the first rank, for a set lies in one group whole: of a thousand ranks there may be hundreds of either.
    group_of = {rank: i for i, group in enumerate(diff.replica_groups) for rank in group}
    found: list[list[tuple[int, ...]]] = [[] for _ in diff.replica_groups]
    for ranks in diff.clusters:
        found[group_of[ranks[0]]].append(ranks)
    return [sets for sets in found if len(sets) > 1]
