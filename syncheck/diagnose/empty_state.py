"""Find ranks that saved an optimizer without state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.kinds import OPTIMIZER

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case


def without_state(case: Case) -> tuple[int, ...]:
    """Return the ranks whose optimizer has parameter groups but no state, although other ranks have both.

    Empty if the optimizer itself is missing, as in files of the model only, or if each rank holds a part of the state.
    """
    group = case.group
    # Look at all missing tensors, because an earlier rule may cover some of them, for example for NaNs beside them.
    missing = [diff for diff in group.tensors if diff.reason == "missing" and diff.kind in OPTIMIZER]
    sharded = group.evidence.metadata is not None and group.evidence.metadata.optimizer_sharded
    if not missing or not group.evidence.hyperparameters or sharded:
        return ()
    if len(missing) < sum(kind in OPTIMIZER for kind in group.evidence.names.values()):
        return ()
    holders = {frozenset(rank for ranks in diff.clusters for rank in ranks) for diff in missing}
    without = tuple(rank for rank in group.ranks if not any(rank in ranks for ranks in holders))
    if len(holders) != 1 or not without:
        return ()
    # A rank without parameter groups has no optimizer in its file.
    no_groups = any(rank in value.lost for value in group.values if ".param_groups." in value.name for rank in without)
    return () if no_groups else without
