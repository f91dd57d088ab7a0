"""Only an averaged copy of the weights (EMA or SWA) differs.

Signature: tensors of an averaged copy (`ema.*`, `swa_model.*`, `n_averaged`, ...) differ, while the parameters and the
optimizer state were compared and agree. Differences in only the BatchNorm buffers of the copy do not match, because
they depend on each rank's batches.

Cause: only some ranks update or restored the copy: `if rank == 0: ema.update()`, loading it on one rank when resuming,
or an update from each rank's own batch. The difference is harmless until the copy is evaluated on another rank, or
copied back into the model.

Fix: update the copy on every rank after `optimizer.step()`, and load it on every rank. Or keep it on rank 0 only, and
save it on no other rank.

Incidents: HorizonRobotics/alf#1475, lucidrains/ema-pytorch#9 (EMA on rank 0 only, then copied to the online model).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match, evidence_of, largest_difference
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from collections.abc import Collection

    from syncheck.records import TensorDiff

CODE = "SYN219"
SLUG = "averaged-copy-stale"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "Only some ranks updated or restored the averaged copy of the weights; the model itself agrees."
    FIX = (
        "Update the copy on every rank after optimizer.step(), not under 'if rank == 0': "
        "ema.update_parameters(model) with torch's AveragedModel. Load it on every rank when resuming."
    )
    COPY_DIFFERS = "Only the averaged copy of the weights differs, in {count:count tensor} ({names:names}), {size}"
    MODEL_AGREES = "all {count:count parameter} of the model agree"
    UPDATES = "{name} is {values:by_rank}"


_OF_BATCHES = ("running_mean", "running_var", "num_batches_tracked")


def apply(case: Case) -> Match | None:
    """Match an averaged copy that differs although the model agrees."""
    copies = case.differing("ema")
    model = {name.replace(".", "") for name in case.names_of("parameter")}
    weights = [diff for diff in copies if not diff.name.endswith(_OF_BATCHES) and _is_copy(diff, model)]
    agree = case.compared("parameter") and case.agrees("parameter", "optimizer", "optimizer_step")
    # A few differing elements are damage; a missed update changes all elements.
    if not weights or not agree or all(diff.extent in ("one", "contiguous") and diff.numel > 1 for diff in weights):
        return None
    names = tuple(diff.name for diff in weights)
    facts = [
        Text.COPY_DIFFERS(count=len(weights), names=names, size=largest_difference(weights)),
        Text.MODEL_AGREES(count=case.compared("parameter")),
    ]
    # A single number counts the updates.
    numbers = [diff for diff in weights if diff.numel == 1 and evidence_of(diff).values]
    facts += [Text.UPDATES(name=diff.name, values=dict(sorted(evidence_of(diff).values.items()))) for diff in numbers]
    facts += case.trend_facts("ema")[1]
    return case.make_match(weights, facts, copies)


def _is_copy(diff: TensorDiff, model: Collection[str]) -> bool:
    """Whether a tensor is a copy of a parameter or counts updates. Other modules may be named ema too.

    model: the names of the parameters without dots, because some averages omit the dots.
    """
    parts = diff.name.split(".")
    return diff.numel == 1 or any("".join(parts[i:]) in model for i in range(1, len(parts)))
