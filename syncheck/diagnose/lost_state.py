"""Optimizers without state on some ranks, although other ranks have state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.measures import evidence_of
from syncheck.diagnose.optimizer_names import is_setting
from syncheck.diagnose.selection import join_ranks, ranks_outside, select_missing
from syncheck.tensors.kinds import OPTIMIZER

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Comparison

# Least share of the moments that differ if ranks have lost all of them.
WHOLE = 0.9


def ranks_without_state(case: Case) -> tuple[int, ...]:
    """Return the ranks whose optimizer has parameter groups but no state, although other ranks have both.

    Empty if the optimizer itself is missing, as in files of the model only, or if each rank holds a part of the state.
    """
    group = case.group
    # Without parameter groups, no file has an optimizer. A part of the state on each rank is no loss.
    if not group.evidence.hyperparameters or group.evidence.metadata.optimizer_sharded:
        return ()
    # Look at all missing tensors, because an earlier rule may cover some of them, for example for NaNs beside them.
    missing = select_missing(group.tensors, *OPTIMIZER)
    all_states = case.names_of(*OPTIMIZER)
    is_whole_state = len(missing) >= len(all_states)
    sets_of_holders = {frozenset(join_ranks(diff.clusters)) for diff in missing}
    # A part of the state is missing on ranks that never updated some parameters (SYN225).
    if not is_whole_state or len(sets_of_holders) != 1:
        return ()

    (holders,) = sets_of_holders
    without_state = ranks_outside(group.ranks, holders)
    without_optimizer = _ranks_without_groups(group)
    return without_state if without_optimizer.isdisjoint(without_state) else ()


def _ranks_without_groups(group: Comparison) -> set[int]:
    """Return the ranks without parameter groups, whose files have no optimizer."""
    ranks: set[int] = set()
    for value in group.values:
        if is_setting(value.name):
            ranks.update(value.lost)
    return ranks


def ranks_with_zeros(case: Case) -> tuple[int, ...]:
    """Return the ranks whose moments are all 0, although no moment of the other ranks is; empty without such ranks."""
    zero_ranks: set[tuple[int, ...]] = set()
    moments = case.differing("optimizer")
    for diff in moments:
        norms = evidence_of(diff).norms
        zero_ranks.add(tuple(rank for rank in sorted(norms) if norms[rank] == 0))
    # A reset clears the moments of all parameters, and of one parameter they may be 0 for another reason.
    is_whole_state = len(moments) >= WHOLE * len(case.names_of("optimizer"))
    if not is_whole_state or len(zero_ranks) != 1:
        return ()
    return zero_ranks.pop()
