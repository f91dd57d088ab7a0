"""Every rank trains a model of its own: gradients are not averaged.

Signature: all that is trained differs, together with its optimizer state (norm weights and zero biases too, which
start equal), and grows over the steps; step counters agree. The first moments point in directions of their own: the
median cosine between ranks was -0.4 to 0.88 on real runs (2 to 8 ranks, batches of 4 to 128 samples a rank, 3 to 200
steps), where averaged gradients that met another fault came to 0.88 in the very step and to 0.95 or more soon after.
So with SGD, which counts no steps, it must be under 0.9 here, or under 0.97 with a parameter that went another way
(cosine under 0.7; 0.81 at the least where a step was left out or the momentum was lost); with Adam's counters equal,
under 0.99.

Files without first moments tell less: then all trained parameters must differ, and the gap of two ranks grow from the
first step compared, or no two of three or more ranks agree, or a tensor point elsewhere (cosine under 0.5) though most
are alike (0.5 or more), as a zero bias does that each rank has moved its own way. It then says "consistent with".

Cause: the forward goes around the wrapper (`model.module(x)`), which then does not reduce; `no_sync()` around every
micro-batch, or off by one at the accumulation's end; the wrapped model was moved, or its hooks lost; one rank steps
with its local gradient. Losses look healthy, and the one file that is kept has seen 1/N of the data.

Fix: call the wrapper, `loss = criterion(ddp_model(x), y)`, and leave `no_sync()` before the last micro-batch's forward.

Incidents: jingyaogong/minimind#853, jingyaogong/minimind#854, kohya-ss/sd-scripts#924, kohya-ss/sd-scripts#604,
pytorch/pytorch#104336 (moved after the wrap), modelscope/FunASR#3472 (`no_sync` off by one).
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, agreement_text, parameters_text
from syncheck.diagnose.gradients import (
    TOUCHED,
    agreed_before,
    cosines,
    counts_steps,
    course,
    followers_text,
    in_step,
    just_began,
    moments_apart,
    only_decay,
    parameters_apart,
    touched_less,
    trained,
    with_followers,
    with_moment,
)
from syncheck.evidence.suspects import suspects

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, TensorDiff

CODE = "SYN211"
SLUG = "gradients-not-reduced"
SEVERITY: Severity = "error"
CAUSE = "Gradients are not averaged over the ranks: each trains a model of its own on its share of the data."
FIX = (
    "Train through the wrapper, loss = criterion(ddp_model(x), y), not ddp_model.module(x), and enter no_sync() only "
    "for micro-batches before the last, forward and backward both."
)

# Share of what is trained that must differ: an unused parameter may agree.
MOST = 0.9
# Median cosines of first moments above which gradients were averaged, without and with equal counts of steps.
ALIKE, ALIKE_COUNTED = 0.9, 0.99
# The first of these where a parameter went another way, by its cosine.
ALIKE_ASTRAY, ASTRAY = 0.97, 0.7
# Without moments: a parameter that went another way, while most are still of one start.
ELSEWHERE = 0.5


def apply(case: Case) -> Match | None:
    """Fit a whole model that is apart by gradients of each rank's own."""
    parameters, moments = parameters_apart(case), moments_apart(case)
    model, states = trained(case), with_moment(case)
    # Where the optimizer's ids have no names, it still shows how many parameters are trained.
    total = min(len(model), len(states)) if states and not states & model else len(model)
    if not parameters or len(model & set(parameters)) < MOST * total or not in_step(case):
        return None
    if touched_less(parameters.values(), TOUCHED) or len(moments) < MOST * len(states):
        return None
    apart = list(parameters.values())
    trend, since = course(case, "parameter")
    why = _own_gradients(case, apart, list(moments.values())) if states else _without_moments(case, apart, trend)
    if not why:
        return None
    text = f"{parameters_text(case, apart)}; {why}"
    covered = with_followers(case, apart)
    text += since + followers_text(covered, "parameter", "optimizer")
    return Match(covered, suspects(apart, case.group), text + agreement_text(apart, case.group))


def _own_gradients(case: Case, parameters: list[TensorDiff], moments: list[TensorDiff]) -> str:
    """Say how the first moments tell of unequal gradients; '' where they do not."""
    found, counting = cosines(moments), counts_steps(case)
    if only_decay(case):
        return ""
    every = f"so do all {len(moments)} first moments"
    if len(moments) < len(with_moment(case)):
        every = f"so do {len(moments)} of {len(with_moment(case))} first moments"
    if not found:
        # Of three ranks or more one that is apart may as well have clipped.
        told = counting and (len(case.group.replicas) == 2 or _all_unlike(case, parameters))
        return f"{every}, by digests alone: consistent with gradients that are not averaged" if told else ""
    middle, least = median(found), min(cosines(parameters), default=1.0)
    text = f"{every}, of median cosine {middle:.2f}: "
    sure = f"{text}each rank steps with gradients of its own"
    if counting:
        return sure if middle < ALIKE_COUNTED else ""
    if middle >= (ALIKE_ASTRAY if least < ASTRAY else ALIKE) or just_began(case):
        return ""
    if least < ASTRAY or _all_unlike(case, parameters):
        return sure
    return (
        f"{text}consistent with gradients that are not averaged (steps are not counted: one that was left out, or a "
        "momentum that was lost, just before looks alike)"
    )


def _without_moments(case: Case, apart: list[TensorDiff], trend: str | None) -> str:
    """Say why parameters alone look like unreduced gradients; '' where they may as well be something else."""
    if not case.agrees("optimizer"):
        return ""
    found = cosines(apart)
    told = "no first moments were compared: consistent with gradients that are not averaged"
    if trend == "growing" and len(case.group.replicas) == 2 and not agreed_before(case):
        return told
    of_one_start = bool(found) and median(found) >= ELSEWHERE
    if of_one_start and _all_unlike(case, apart):
        return f"{told}; all ranks differ from each other"
    if of_one_start and min(found) < ELSEWHERE:
        return f"{told}; cosines of {min(found):.2f} to {max(found):.2f}"
    return ""


def _all_unlike(case: Case, apart: list[TensorDiff]) -> bool:
    """Whether three ranks or more ought to hold the same, and no two agree on anything that differs."""
    ranks = case.group.ranks
    return all(
        len(diff.clusters) == len(ranks) and min(map(len, diff.replica_groups or (ranks,))) > 2 for diff in apart
    )
