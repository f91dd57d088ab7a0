"""A rank holds what the others held at an earlier step.

Signature: of a rank's parameters and optimizer state all that differ from the others' are, to the byte, the others' of
an earlier step that was saved too. BatchNorm's statistics and counts follow.

Cause: the rank's last save did not happen and an older file stayed in the folder, a gather of parameters that overlaps
the forward returned the values from before the step, or the rank was set back. Where BatchNorm's counts agree and the
optimizer's state is old too, the rank ran the forward and left out the step: that is SYN214, or SYN216 where its loss
scale shows the overflow. Without BatchNorm a step that was left out last looks the same.

Fix: compare the step that each file names with the time it was written, and let no rank go on until all have written;
wait for the gather (`dist.barrier()`, the handle's `wait()`) before saving.

Incidents: NVIDIA/Megatron-LM#663, #950, #7131, #4609 and #3693 (parameters of the step before, from an overlapped
gather).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, counted, differ
from syncheck.diagnose.counters import fitting, scales_of
from syncheck.diagnose.origin import only_skipped, ran_forward, stale_at_first, stale_text
from syncheck.kinds import BN_STATISTICS
from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from collections.abc import Collection

    from syncheck.diagnose.case import Case
    from syncheck.records import Comparison, Severity, TensorDiff, ValueDiff

CODE = "SYN217"
SLUG = "stale-replica"
SEVERITY: Severity = "error"
CAUSE = "A rank holds the state of an earlier step: an old file, a gather that came too early, or a rank set back."
FIX = (
    "Let every rank write to a new path and call dist.barrier() after saving, so that no older file can stand in; wait "
    "for an overlapped parameter gather (handle.wait()) before state_dict()."
)
_STATE = ("parameter", "optimizer", "optimizer_step")


def apply(case: Case) -> Match | None:
    """Fit ranks that are where the others were, and cover what differs because of them."""
    group = case.group
    if group.evidence.stale:
        return None if _step_left_out(group) else _stale_now(case)
    # A rank that was set back and trained on is not where the others were any more; the series shows that it was.
    first = stale_at_first(case)
    if first is None or _step_left_out(first) or ran_forward(first) is True:
        return None
    if ran_forward(first) is None and fitting(case, far=False):  # the optimizer's counters then tell of a step
        return None
    stale = tuple(first.evidence.stale)
    covered = tuple(diff for diff in case.tensors if _explained(diff, stale) and set(diff.minority) <= set(stale))
    with_counts = ", with BatchNorm's counts" if ran_forward(first) is False else ""
    text = f"{stale_text(first)}{with_counts}, and trained on from there"
    return Match(covered, stale, text) if any(diff.kind == "parameter" for diff in covered) else None


def _step_left_out(group: Comparison) -> bool:
    """Whether the ranks ran the step's forward, or found an overflow, and left out the optimizer's part."""
    return only_skipped(group) or (bool(scales_of(group)) and ran_forward(group) is not False)


def _stale_now(case: Case) -> Match | None:
    stale = case.group.evidence.stale
    covered = tuple(diff for diff in case.tensors if _explained(diff, tuple(stale)))
    if not any(diff.kind == "parameter" for diff in covered):
        return None
    texts = []
    for rank, step in sorted(stale.items()):
        same = [diff for diff in covered if diff.kind in _STATE and any(rank in ranks for ranks in diff.clusters)]
        parameters = sum(diff.kind == "parameter" for diff in same)
        others = len(same) - parameters
        now = "" if case.group.step is None else f", this is step {case.group.step}"
        texts.append(
            f"rank {rank} is at step {step}{now}: {counted(parameters, 'parameter')}"
            + (f" and {counted(others, 'optimizer tensor')}" if others else "")
            + (" are" if len(same) > 1 else " is")
            + f" to the byte what other ranks held at step {step}"
        )
    texts = texts[:4] + ([f"{len(texts) - 4} more ranks alike"] if len(texts) > 4 else [])
    statistics = sum(diff.kind in (*BN_STATISTICS, "bn_count") for diff in covered)
    if statistics:
        texts.append(f"{counted(statistics, 'tensor')} of BatchNorm {differ(statistics)} with it")
    values = [value for value in case.of_values() if _of_stale(value, stale)]
    if any(value.kind == "progress" for value in values):
        texts.append(f"the file of {ranks_text(sorted(stale))} names another step as well")
    return Match(covered, tuple(stale), "; ".join(texts), tuple(value.name for value in values))


def _explained(diff: TensorDiff, stale: Collection[int]) -> bool:
    """Whether a tensor differs only because of these ranks. Running statistics differ between ranks anyway."""
    return diff.kind in BN_STATISTICS or sum(not set(ranks) <= set(stale) for ranks in diff.clusters) <= 1


def _of_stale(value: ValueDiff, stale: Collection[int]) -> bool:
    return len({str(found) for rank, found in value.by_rank.items() if rank not in stale}) <= 1
