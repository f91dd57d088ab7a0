"""Only an averaged copy of the weights differs: EMA or SWA.

Signature: tensors of an averaged copy (`ema.*`, `swa_model.*`, `n_averaged`, ...) differ, while the parameters and the
optimizer's state, which were compared, agree. The copy's own BatchNorm buffers alone are none of it: they follow each
rank's batches, as the model's do.

Cause: the copy is updated, or was restored, on some ranks only: `if rank == 0: ema.update()`, a resume that loads it
on one rank, or an update from each rank's own batch. It does no harm until it is evaluated on another rank, or copied
back into the model.

Fix: update the copy on every rank after `optimizer.step()`, and load it on every rank; or keep it on rank 0 only and
save it nowhere else.

Incidents: HorizonRobotics/alf#1475, lucidrains/ema-pytorch#9 (EMA on rank 0 only, then copied to the online model).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, agreement_text, counted, gap_text
from syncheck.diagnose.gradients import course
from syncheck.evidence.suspects import suspects
from syncheck.messages import names_text

if TYPE_CHECKING:
    from collections.abc import Collection

    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, TensorDiff

CODE = "SYN219"
SLUG = "averaged-copy-stale"
SEVERITY: Severity = "error"
CAUSE = "The averaged copy of the weights was updated, or restored, on some ranks only; the model itself agrees."
FIX = (
    "After optimizer.step() update the copy on every rank, not under 'if rank == 0': ema.update_parameters(model) with "
    "torch's AveragedModel. Load it on every rank when resuming."
)

_OF_BATCHES = ("running_mean", "running_var", "num_batches_tracked")


def apply(case: Case) -> Match | None:
    """Fit an averaged copy that differs where what it is the average of does not."""
    copies = tuple(diff for diff in case.of_kind("ema") if diff.status == "different")
    copied = {name.replace(".", "") for name, kind in case.group.evidence.names.items() if kind == "parameter"}
    weights = [diff for diff in copies if not diff.name.endswith(_OF_BATCHES) and _is_copy(diff, copied)]
    agree = case.compared("parameter") and case.agrees("parameter", "optimizer", "optimizer_step")
    # Few elements of it are damage rather than an update: those that are apart at all are apart everywhere.
    if not weights or not agree or all(diff.extent in ("one", "contiguous") and diff.numel > 1 for diff in weights):
        return None
    names = names_text([diff.name for diff in weights])
    text = (
        f"{counted(len(weights), 'tensor')} of the averaged copy differ ({names}), {gap_text(weights)}; "
        f"all {case.compared('parameter')} parameters that it averages agree"
    )
    for diff in weights:
        text += _numbers(diff)
    text += course(case, "ema")[1]
    return Match(copies, suspects(weights, case.group), text + agreement_text(weights, case.group))


def _is_copy(diff: TensorDiff, copied: Collection[str]) -> bool:
    """Whether a tensor is a copy of one of the model's, or counts the updates; other modules may be called ema too.

    copied: the model's names without dots, which some averages leave out.
    """
    parts = diff.name.split(".")
    return diff.numel == 1 or any("".join(parts[i:]) in copied for i in range(1, len(parts)))


def _numbers(diff: TensorDiff) -> str:
    """'; n_averaged is 12 on rank 0, 7 on rank 1': how often each rank has updated it."""
    if diff.numel != 1 or diff.evidence is None or not diff.evidence.values:
        return ""
    listed = ", ".join(f"{value} on rank {rank}" for rank, value in sorted(diff.evidence.values.items())[:8])
    return f"; {diff.name} is {listed}"
