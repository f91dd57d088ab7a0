"""Necessary conditions of the rules. A rule that cannot match a group is not imported, because that takes longer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.features import with_reason
from syncheck.diagnose.measures import evidence_of
from syncheck.diagnose.selection import exclude_kinds, has_kind
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.diagnose.case import Case

# Kinds of tensors that change without a step of the optimizer.
_BUFFERS = (*BN_STATISTICS, "bn_count", "buffer")


def differs(*kinds: str) -> Callable[[Case], bool]:
    """Return a condition: an uncovered difference is of one of the kinds."""

    def has_difference(case: Case) -> bool:
        return has_kind(case.tensors, *kinds)

    return has_difference


def has_reason(*reasons: str) -> Callable[[Case], bool]:
    """Return a condition: an uncovered tensor was not compared by value for one of the reasons."""

    def has_tensor(case: Case) -> bool:
        return bool(with_reason(case.tensors, *reasons))

    return has_tensor


def any_difference(case: Case) -> bool:
    """Whether any difference is not covered."""
    return bool(case.tensors or case.values)


def differs_by_training(case: Case) -> bool:
    """Whether tensors of the optimizer or weights differ, or any Python value does."""
    if case.group.values:
        return True
    return bool(exclude_kinds(case.tensors, *_BUFFERS))


def may_be_damage(case: Case) -> bool:
    """Whether more than running statistics differ, or a single tensor, or two models are compared."""
    if case.group.is_pair or len(case.tensors) == 1:
        return True
    return bool(exclude_kinds(case.tensors, *BN_STATISTICS, "bn_count"))


def variances_differ_alone(case: Case) -> bool:
    """Whether running variances differ, and no running mean does."""
    return has_kind(case.tensors, "bn_var") and not has_kind(case.tensors, "bn_mean")


def lacks_tensor_or_value(case: Case) -> bool:
    """Whether some replica may lack a tensor or a Python value."""
    return bool(case.values or with_reason(case.tensors, "missing"))


def has_nonfinite(case: Case) -> bool:
    """Whether a differing tensor holds NaN or infinity."""
    # The counts of finite tensors are 0.
    return any(any(diff.nonfinite.values()) for diff in case.tensors)


def is_damaged(case: Case) -> bool:
    """Whether the bytes of a differing tensor do not match its stored checksum."""
    return any(evidence_of(diff).damaged for diff in case.tensors)


def holds_other_tensor(case: Case) -> bool:
    """Whether a differing tensor has the values or the direction of another tensor."""
    for diff in case.tensors:
        evidence = evidence_of(diff)
        if evidence.holds or evidence.resembles:
            return True
    return False


def has_ranks_of_two_nodes(case: Case) -> bool:
    """Whether there are enough ranks for two nodes with two ranks each."""
    return case.number_of_ranks > 3


def has_mesh(case: Case) -> bool:
    """Whether coordinates of the ranks in a mesh are known."""
    return any(replica.mesh for replica in case.group.replicas)


def records_runs(case: Case) -> bool:
    """Whether the files record different settings of the run."""
    return bool(case.group.evidence.runs)


def averages_periodically(case: Case) -> bool:
    """Whether the metadata describes local SGD."""
    return bool(case.group.evidence.metadata.averaging)


def has_prefixes(case: Case) -> bool:
    """Whether names had a prefix of a wrapper."""
    return bool(case.group.evidence.normalized)


def has_shards(case: Case) -> bool:
    """Whether tensors are sharded."""
    return bool(case.group.shards)


def has_equal_shards(case: Case) -> bool:
    """Whether shards at different positions are equal."""
    return bool(case.group.evidence.equal_shards)


def has_broken_ties(case: Case) -> bool:
    """Whether names share memory on some ranks only."""
    return bool(case.group.ties)
