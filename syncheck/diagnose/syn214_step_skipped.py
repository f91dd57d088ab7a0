"""A rank left out an optimizer step that the others took.

Signature: the optimizer's step counters differ by one or two steps, or by less than 5 % of the larger count, and
parameters or optimizer state differ with them. The checkpoint's own step is equal, or none is stored. BatchNorm's
counts usually agree, for the forward ran; where they lag too, the rank missed the whole step. SGD counts no steps:
there a skipped step is told from other causes only where the step itself was saved and the one before: parameters and
optimizer state of the rank are then, to the byte, the others' of the step before, and BatchNorm's counts agree.

Cause: a rank decided alone to pass over a batch: `continue` on a bad or short batch, a loss or a gradient that was not
finite on this rank only, gradients that were None there. In a run of a few steps a state that was lost at the start
looks the same; the evidence says so.

Fix: decide together. All-reduce the flag (MAX) before the step, and let all ranks step or none; then restart from a
checkpoint in which the ranks agree, or broadcast parameters and optimizer state of one rank.

Incidents: NVIDIA-NeMo/Automodel#2468 (per-rank `continue`, micro-step counts apart), ecmwf/WeatherGenerator#2718 and
#2724 (the same). Whether steps were left out again and again shows over several saved steps: the lag then grows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, counted, parameters_text
from syncheck.diagnose.counters import (
    FEW,
    SHORT,
    counters_of,
    farthest,
    fitting,
    followers,
    forwards_lag,
    lag_text,
    names_of_values,
    odd_ranks,
    other_lag_text,
    scales_of,
    trackers,
)
from syncheck.diagnose.origin import only_skipped, stale_at_first, stale_text

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.diagnose.counters import StepCounter
    from syncheck.records import Severity

CODE = "SYN214"
SLUG = "step-skipped"
SEVERITY: Severity = "error"
CAUSE = "A rank left out an optimizer step that the others took: it decided alone to pass over a batch."
FIX = (
    "Decide together: bad = torch.tensor(float(skip), device=device); dist.all_reduce(bad, op=dist.ReduceOp.MAX); "
    "if bad: optimizer.zero_grad(); continue. Then restart from a checkpoint in which the ranks agree."
)
IN_A_JOB = (
    f"{FIX.partition(' Then ')[0]} To go on with this run: syncheck.live.resync(model, optimizer) on all ranks, with "
    "source=RANK where there is no majority."
)


def apply(case: Case) -> Match | None:
    """Fit counters that are a few steps apart, or a step that was saved in the making; cover what follows from it."""
    counters = fitting(case, far=False)
    first = stale_at_first(case)
    if first is not None and (not only_skipped(first) or scales_of(case.group)):
        first = None
    if first is not None:
        counters = counters_of(case)
    elif not counters:
        return None
    tensors = followers(case, counters)
    if not any(diff.kind in ("parameter", "optimizer") for diff in tensors) and not counters:
        return None
    most = farthest(counters)
    moved = [diff for diff in tensors if diff.kind == "parameter"]
    then = "" if most is None else other_lag_text(most, case.series)
    texts = [
        lag_text(counters),
        parameters_text(case, moved),
        "" if first is None else f"{stale_text(first)}, and had counted that step's batches",
        "" if first is not None else _forwards(case, counters),
        f"{then}: it happened more than once" if then else "",
        "" if most is None or first is not None else _doubt(case, most),
    ]
    ranks = odd_ranks(counters) if first is None else tuple(first.evidence.stale)
    evidence = "; ".join(filter(None, texts))
    fix = IN_A_JOB if case.in_memory else ""
    return Match(tensors, ranks, evidence, (*names_of_values(counters), *trackers(case, ranks)), fix=fix)


def _forwards(case: Case, counters: tuple[StepCounter, ...]) -> str:
    if forwards_lag(case, counters):
        return "num_batches_tracked lags as well: the whole step was missed, its forward too, or undone"
    if case.compared("bn_count") and case.agrees("bn_count"):
        return "num_batches_tracked agrees"
    return ""


def _doubt(case: Case, counter: StepCounter) -> str:
    lag, texts = int(counter.lag), []
    if lag > FEW or max(counter.by_rank.values()) <= SHORT:
        texts.append(f"an optimizer state that was lost after {counted(lag, 'step')} would look the same")
    if not case.group.evidence.stores_progress and not case.in_memory:
        texts.append("the files do not say that they are of one step")
    return ", and ".join(texts)
