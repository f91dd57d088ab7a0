"""Each rank updates buffers from its own data: codebooks, observation statistics, observers, queues, centers.

Signature: tensors of the model that no optimizer updates differ, while everything that is trained agrees, with its
optimizer state. Something updates them: their gap changes over the steps of the run. In files of one step they are
integers or single numbers, or their values still have one origin on all ranks (a cosine of 0.5 or more; independent
random starts are near 0), or their names, or those of other buffers in the same module, are those of running
statistics (`cluster_size`, `running_mean` without `num_batches_tracked`, `min_val`, `weight_u`, `queue_ptr`, `center`).
Weights and biases without these signs are frozen parameters instead (SYN218). Without metadata a state dict does not
separate buffers from parameters, so the finding reports "not trained" and how this is known.

Cause: a module updates its buffer in `forward()`, or the training loop does, from the batch of the rank. DDP with
`broadcast_buffers=True` copies rank 0's buffers at the start of each forward, so ranks differ by one update and the
data of the other ranks is lost; with `broadcast_buffers=False`, FSDP, or an update outside the forward they never meet.
A codebook or normalizer that differs changes the model's outputs and gradients on each rank.

Fix: reduce the statistics of the batch over the ranks before the update (sums and counts; for queues gather the
entries), as SyncBatchNorm does; or average or broadcast the buffers before saving.

Incidents: lucidrains/vector-quantize-pytorch#17 and espnet/espnet#6284 (codebooks), Denys88/rl_games#363 and
leggedrobotics/rsl_rl#226 (observations), pytorch/pytorch#85627 (observers).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from syncheck.diagnose.bn import is_batchnorm, running_statistics
from syncheck.diagnose.case import Match, agreement_text, counted, differ, gap_text, is_weight
from syncheck.diagnose.gradients import course, steps_of
from syncheck.evidence.history import trend_of
from syncheck.evidence.suspects import suspects
from syncheck.kinds import BN_STATISTICS
from syncheck.messages import names_text

if TYPE_CHECKING:
    from collections.abc import Collection

    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, TensorDiff

CODE = "SYN205"
SLUG = "buffer-local-state"
SEVERITY: Severity = "error"
CAUSE = (
    "Each rank updates these tensors, which no optimizer trains, from its own data: codebooks, observation statistics, "
    "quantization observers, queues and the like are not reduced over the ranks."
)
FIX = (
    "Reduce what the update takes from the batch: dist.all_reduce(batch_sum); dist.all_reduce(batch_count). Or leave "
    "DDP's broadcast_buffers=True and, before saving: for b in model.buffers(): dist.broadcast(b, 0)."
)

# Cosine from which floating-point values have one origin.
ONE_ORIGIN = 0.5


def apply(case: Case) -> Match | None:
    """Fit untrained tensors that something updates, while all that is trained agrees."""
    apart = _candidates(case)
    names = {diff.name for diff in apart} | case.untrained
    if not apart or any(diff.name not in names for diff in case.of_kind("parameter", "optimizer", "optimizer_step")):
        return None
    trend, since = course(case, names={diff.name for diff in apart})
    if not _moves(case, {diff.name for diff in apart}):
        apart = _updated(case, apart, steady=trend is not None)
    if not apart:
        return None
    buffers = all(diff.kind != "parameter" for diff in apart)
    what = counted(len(apart), "buffer" if buffers else "untrained tensor")
    listed = names_text([diff.name for diff in apart])
    text = f"{what} {differ(len(apart))} ({listed}), {gap_text(apart)}{_trained_text(case, buffers)}{since}"
    if trend is None:
        text += "; consistent with updates from each rank's own data: files of one step do not show the updates"
    return Match(tuple(apart), suspects(apart, case.group), text + agreement_text(apart, case.group))


def _candidates(case: Case) -> list[TensorDiff]:
    """Return the differing buffers, and tensors that may be buffers."""
    found = []
    described = case.group.evidence.metadata is not None and case.group.evidence.metadata.buffers is not None
    untrained = case.untrained - case.frozen
    statistics = {diff.name for diff in running_statistics(case, case.tensors)} if case.optimized is None else set()
    for diff in case.tensors:
        buffer = diff.kind == "buffer" or (diff.kind in BN_STATISTICS and not is_batchnorm(case, diff.name))
        if diff.kind == "parameter" and not described:
            buffer = diff.name in untrained or diff.name in statistics
        if buffer and diff.status == "different":
            found.append(diff)
    return found


def _moves(case: Case, names: Collection[str]) -> bool:
    """Whether the gaps of these tensors change from any step to the next."""
    steps = [[diff for diff in group.tensors if diff.out_of_sync and diff.name in names] for group in steps_of(case)]
    return any(trend_of(pair) not in (None, "constant") for pair in pairwise(steps))


def _updated(case: Case, apart: list[TensorDiff], *, steady: bool) -> list[TensorDiff]:
    """Return the tensors that are updated, by what they are and hold. steady: whether their gap stays as it is."""
    found = running_statistics(case, apart)
    modules = {diff.name.rpartition(".")[0] for diff in found}
    for diff in apart:
        of_one_origin = not steady and not is_weight(diff.name) and _is_of_one_origin(diff)
        if of_one_origin or (diff.name.rpartition(".")[0] in modules and not is_weight(diff.name)):
            found.append(diff)
    names = {diff.name for diff in found}
    return [diff for diff in apart if diff.name in names]


def _is_of_one_origin(diff: TensorDiff) -> bool:
    """Whether the values of a tensor are no independent starts; single numbers are hardly ever drawn at random."""
    cosine = None if diff.evidence is None else diff.evidence.cosine
    return diff.numel == 1 or (cosine is not None and cosine >= ONE_ORIGIN)


def _trained_text(case: Case, buffers: bool) -> str:
    """Say what agrees, and how it is known that the tensors are not trained."""
    optimized, states = case.optimized, case.compared("optimizer")
    if optimized is None:
        known = "" if buffers else "; by their names: the files do not say what is trained"
        return f"{known}; all other parameters agree"
    return f"; all {counted(len(optimized), 'trained parameter')} agree" + (
        f", and {counted(states, 'optimizer tensor')}" if states else ""
    )
