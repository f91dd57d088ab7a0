"""Gradients are not averaged over the ranks, so each rank trains its own model.

Signature: all trained parameters differ together with their optimizer state, including norm weights and zero biases,
which start equal. The difference grows over the steps, and step counters agree. The first moments point in different
directions: on real runs with 2 to 8 ranks, 4 to 128 samples per rank and 3 to 200 steps, the median cosine between
ranks was -0.4 to 0.88. Averaged gradients with another fault had a cosine of 0.88 in the step of the fault and at least
0.95 soon after. The median cosine must therefore be under 0.99 if the optimizer counts its steps equally on all ranks,
as Adam does. With SGD, which counts no steps, it must be under 0.9, or under 0.97 if the cosine of a parameter is under
0.7 (at least 0.81 after a skipped step or a lost momentum).

Without first moments the evidence is weaker, and the finding says "consistent with". All trained parameters must
differ, and at least one condition must hold:

- The difference between two ranks grows from the first step compared.
- No two of three or more ranks agree.
- A tensor points in another direction (cosine under 0.5) although most do not (0.5 or more). An example is a zero bias,
  which each rank has moved in its own direction.

Cause: the forward pass bypasses the wrapper (`model.module(x)`), so DDP does not average gradients; `no_sync()` covers
every micro-batch, or is off by one at the end of the accumulation; the wrapped model was moved or lost its hooks; or
one rank steps with its local gradients. The loss looks healthy, but the remaining checkpoint has seen 1/N of the data.

Fix: call the wrapper, `loss = criterion(ddp_model(x), y)`, and leave `no_sync()` before the forward pass of the last
micro-batch. With HSDP, pass `fully_shard` the whole mesh and not only its dimension of shards: each replica then trains
alone. `set_requires_all_reduce(False)` on all micro-batches does not cause this, because no gradient reaches the
optimizer (measured with torch 2.14). In a running job, the finding names `no_sync()` if it is active.

Incidents: jingyaogong/minimind#853, jingyaogong/minimind#854, kohya-ss/sd-scripts#924, kohya-ss/sd-scripts#604,
pytorch/pytorch#104336 (moved after the wrap), modelscope/FunASR#3472 (`no_sync` off by one).
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from syncheck.diagnose.case import TOUCHED, Case, Match, cosines, follower_facts, is_share_below
from syncheck.diagnose.history import suspects
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from syncheck.records import TensorDiff

CODE = "SYN211"
SLUG = "gradients-not-reduced"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "Gradients are not averaged over the ranks: each rank trains its own model on its share of the data."
    FIX = (
        "Train through the wrapper, loss = criterion(ddp_model(x), y), not ddp_model.module(x). Use no_sync() only for "
        "micro-batches before the last one, around forward and backward."
    )
    FIX_SHARDED = (
        'Pass fully_shard the whole mesh, init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", '
        '"shard")), and not only its dimension of shards. For gradient accumulation, call '
        "model.set_requires_all_reduce(is_last_micro_batch) before each backward pass, on all ranks."
    )
    CAUSE_NO_SYNC = (
        "Gradients are not averaged over the ranks, because the training runs within no_sync(). Each rank trains its "
        "own model on its share of the data."
    )
    FIX_NO_SYNC = (
        "Leave no_sync() before the forward pass of the last micro-batch: its forward and backward pass must both be "
        "outside. Train through the wrapper, loss = criterion(ddp_model(x), y)."
    )
    EACH_RANK = (
        "Each rank stepped with its own gradients: first moments of different ranks have a median cosine of "
        "{cosine:.2f}"
    )
    SOME_RANKS = (
        "{ranks:Ranks} stepped with {ranks:verb its|their} own gradients: first moments of different ranks have a "
        "median cosine of {cosine:.2f}"
    )
    CONSISTENT = (
        "Consistent with unreduced gradients: first moments of different ranks have a median cosine of {cosine:.2f}"
    )
    CONSISTENT_DIGESTS = "Consistent with unreduced gradients: only digests were compared"
    CONSISTENT_WITHOUT_MOMENTS = "Consistent with unreduced gradients: no first moments were compared"
    MOMENTS = "{count} of {total:count first moment} {count:verb differs|differ}"
    UNCOUNTED = (
        "the optimizer does not count steps, so a step skipped or a momentum lost shortly before would look the same"
    )
    ALL_RANKS_DIFFER = "all ranks differ from each other"
    COSINES = "the cosines of the parameters are {least:.2f} to {most:.2f}"


# Least share of differing trained parameters. An unused parameter may agree.
MOST = 0.9
# Median cosines of first moments from which gradients count as averaged, without and with equal step counts.
ALIKE, ALIKE_COUNTED = 0.9, 0.99
# The first limit if a parameter has another direction, by its cosine.
ALIKE_ASTRAY, ASTRAY = 0.97, 0.7
# Without moments: a parameter with another direction, while most parameters still have the direction of a common start.
ELSEWHERE = 0.5


def apply(case: Case) -> Match | None:
    """Match a model whose trained parameters all differ because each rank used its own gradients."""
    parameters, moments = case.differing_parameters(), case.differing_moments()
    model, states = case.trained_parameters(), case.with_moment()
    # If the names of the optimizer's ids are unknown, their number is still the number of trained parameters.
    total = min(len(model), len(states)) if states and not states & model else len(model)
    if not parameters or len(model & set(parameters)) < MOST * total or not case.in_step():
        return None
    if is_share_below(parameters.values(), TOUCHED) or len(moments) < MOST * len(states):
        return None
    differing = list(parameters.values())
    trend, since = case.trend_facts("parameter")
    if states:
        reasons = _facts_of_moments(case, differing, list(moments.values()))
    else:
        reasons = _facts_without_moments(case, differing, trend)
    if not reasons:
        return None
    summary, *details = reasons
    covered = case.with_followers(differing)
    facts = [
        summary,
        *case.parameter_facts(differing),
        *details,
        *since,
        *follower_facts(covered, "optimizer"),
    ]
    return case.make_match(differing, facts, covered)


def _facts_of_moments(case: Case, parameters: list[TensorDiff], moments: list[TensorDiff]) -> list[Message]:
    """State how the first moments show different gradients, a summary first; empty if they do not."""
    measured, counting = cosines(moments), case.counts_steps()
    if case.only_decay():
        return []
    number = Text.MOMENTS(count=len(moments), total=len(case.with_moment()))
    if not measured:
        # If a single rank of three or more differs, it may have clipped its gradients.
        certain = counting and (len(case.group.replicas) == 2 or _no_two_agree(case, parameters))
        return [Text.CONSISTENT_DIGESTS(), number] if certain else []
    cosine, least = median(measured), min(cosines(parameters), default=1.0)
    if counting:
        return [_summary(case, parameters, cosine), number] if cosine < ALIKE_COUNTED else []
    if cosine >= (ALIKE_ASTRAY if least < ASTRAY else ALIKE) or case.just_began():
        return []
    if least < ASTRAY or _no_two_agree(case, parameters):
        return [_summary(case, parameters, cosine), number]
    return [Text.CONSISTENT(cosine=cosine), number, Text.UNCOUNTED()]


def _summary(case: Case, parameters: list[TensorDiff], cosine: float) -> Message:
    odd = suspects(parameters, case.group)
    if set(odd) == set(case.group.ranks):
        return Text.EACH_RANK(cosine=cosine)
    return Text.SOME_RANKS(ranks=odd, cosine=cosine)


def _facts_without_moments(case: Case, differing: list[TensorDiff], trend: str | None) -> list[Message]:
    """State why the parameters alone are consistent with this finding; empty if another cause is as likely."""
    if not case.agrees("optimizer"):
        return []
    measured = cosines(differing)
    summary = Text.CONSISTENT_WITHOUT_MOMENTS()
    if trend == "growing" and len(case.group.replicas) == 2 and not case.agreed_before():
        return [summary]
    common_start = bool(measured) and median(measured) >= ELSEWHERE
    if common_start and _no_two_agree(case, differing):
        return [summary, Text.ALL_RANKS_DIFFER()]
    if common_start and min(measured) < ELSEWHERE:
        return [summary, Text.COSINES(least=min(measured), most=max(measured))]
    return []


def _no_two_agree(case: Case, differing: list[TensorDiff]) -> bool:
    """Whether each replica group has three or more ranks, and no two of them agree on a differing tensor."""
    ranks = case.group.ranks
    return all(
        len(diff.clusters) == len(ranks) and min(map(len, diff.replica_groups or (ranks,))) > 2 for diff in differing
    )
