"""BatchNorm counted different numbers of training batches on the ranks.

Signature: `num_batches_tracked` differs. It counts the forward passes in training mode since the buffers were
created.

Cause: the ranks ran different numbers of training forwards: uneven data (with or without `join`), a batch skipped on
one rank, one more forward in training mode (a warm-up, a calibration, an evaluation without `.eval()`), or buffers
that were loaded on some ranks only.

Fix: give every rank the same number of batches (DistributedSampler, drop_last) or make the decision to skip one
together; call `.eval()` before evaluation; load the checkpoint on all ranks. Then broadcast the buffers once.

Incidents: NVIDIA-NeMo/Automodel#2468 (per-rank skip), ecmwf/WeatherGenerator#2718, pytorch/pytorch#111138.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, agreement_text, counted, gap_text
from syncheck.evidence.suspects import suspects
from syncheck.kinds import BN_STATISTICS
from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity

CODE = "SYN203"
SLUG = "bn-count-mismatch"
SEVERITY: Severity = "error"
CAUSE = (
    "The ranks ran different numbers of forward passes in training mode, so their running statistics saw "
    "different data."
)
FIX = (
    "Give every rank the same number of batches, decide together to skip one, call .eval() before evaluating; "
    "then broadcast the buffers once: for b in model.buffers(): dist.broadcast(b, 0)."
)


def apply(case: Case) -> Match | None:
    """Fit differing counts, and cover the running statistics that follow from them."""
    counts = case.of_kind("bn_count")
    if not counts:
        return None
    apart = f"by up to {counted(max(int(d.max_abs or 0) for d in counts), 'batch', 'batches')}"
    if any(diff.mismatched is None for diff in counts):
        apart = "by how many batches is not known"
    odd = suspects(counts, case.group)
    everyone = len(odd) == len(case.group.replicas)
    whom = "" if everyone else f", suspect {ranks_text(odd)}"
    evidence = (
        f"num_batches_tracked differs in {counted(len(counts), 'layer')}, {apart}{whom}"
        f"{agreement_text(counts, case.group)}"
    )
    statistics = case.of_kind(*BN_STATISTICS)
    if statistics:
        evidence += f"; {len(statistics)} running statistics differ with it, {gap_text(statistics)}"
    return Match((*counts, *statistics), odd, evidence)
