"""Which ranks saved an optimizer, and no state in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.kinds import OPTIMIZER

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case


def without_state(case: Case) -> tuple[int, ...]:
    """Return the ranks whose optimizer has parameter groups but no state, where that of the others has both.

    Empty where the optimizer itself is missing, as in files of the model only, or where each rank holds a part of the
    state.
    """
    group = case.group
    # Of all that is missing: what an earlier rule covers, as NaNs beside it, is missing all the same.
    lacking = [diff for diff in group.tensors if diff.reason == "missing" and diff.kind in OPTIMIZER]
    if (
        not lacking
        or not group.evidence.hyperparameters
        or (group.evidence.metadata is not None and group.evidence.metadata.optimizer_sharded)
    ):
        return ()
    if len(lacking) < sum(kind in OPTIMIZER for kind in group.evidence.names.values()):
        return ()
    holders = {frozenset(rank for ranks in diff.clusters for rank in ranks) for diff in lacking}
    without = tuple(rank for rank in group.ranks if not any(rank in ranks for ranks in holders))
    if len(holders) != 1 or not without:
        return ()
    # A rank that has no parameter groups either has no optimizer in its file.
    absent = any(rank in value.lost for value in group.values if ".param_groups." in value.name for rank in without)
    return () if absent else without
