"""Gradients are not averaged over the ranks, so each rank trains its own model.

Signature: all trained parameters differ together with their optimizer state, including norm weights and zero biases,
which start equal. The difference grows over the steps, and step counters agree.

With second moments (Adam, RMSprop, Adafactor), about half of their elements are smaller on one rank and half larger,
in each tensor (measured in the trials: 40 % to 60 %). They remember about 1,000 steps, so a single step with separate
gradients is visible much later. The finding is likely if all of three or more ranks differ from each other, or if the
first moments of two ranks point in different directions too. Otherwise it is only consistent with this cause: two ranks
that clip by their local norms look alike, and so does a disturbed gradient of a single rank.

With first moments alone (SGD's momentum_buffer), they point in different directions: on real runs with 2 to 8 ranks, 4
to 128 samples per rank and 3 to 200 steps, the median cosine between ranks was -0.4 to 0.88. SGD counts no steps, and
a step skipped or a momentum lost shortly before has the same effect, unless all of three or more ranks differ.

Without moments the finding is only consistent with this cause. All trained parameters must differ, and at least one
condition must hold:

- The difference between two ranks grows from the first step compared.
- No two of three or more ranks agree.
- A tensor points in another direction (cosine under 0.5) although most do not (0.5 or more). An example is a zero bias,
  which each rank has moved in its own direction.

If only a part of the model differs, the finding is consistent with averaged gradients that some ranks changed
afterwards, if the other ranks agree: without an average, no two ranks would be equal.

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

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires, state_if
from syncheck.diagnose.features import change_whole_parameters, groups_of, single_out_ranks
from syncheck.diagnose.history import suspects
from syncheck.diagnose.measures import cosines, is_at_least, is_below, median_cosine
from syncheck.diagnose.moments import (
    BOTH_SIDES,
    COMMON_START,
    count_squares,
    mean_cosine,
    median_sidedness,
    only_decay,
    share_smaller,
)
from syncheck.diagnose.selection import list_names
from syncheck.diagnose.statements import follower_facts
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from syncheck.findings import Certainty
    from syncheck.records import TensorDiff

CODE = "SYN211"
SLUG = "gradients-not-reduced"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "Ranks train with gradients of their own: gradients are not averaged over the ranks, or changed after the "
        "average on some ranks (noise, a mask, a clip)."
    )
    FIX = (
        "Train through the wrapper, `loss = criterion(ddp_model(x), y)`, not `ddp_model.module(x)`. Use `no_sync()` "
        "only for micro-batches before the last one, around forward and backward. Change averaged gradients alike on "
        "all ranks. Then restart from a checkpoint in which the ranks agree."
    )
    FIX_SHARDED = (
        'Pass `fully_shard` the whole mesh, `init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", '
        '"shard"))`, and not only its dimension of shards. For gradient accumulation, call '
        "`model.set_requires_all_reduce(is_last_micro_batch)` before each backward pass, on all ranks."
    )
    CAUSE_CHANGED = (
        "Some ranks change the averaged gradients of a part of the model (noise, a mask, a clip). Gradients that are "
        "not averaged would leave no two ranks equal."
    )
    FIX_CHANGED = (
        "Look for code between `backward()` and `optimizer.step()` that changes gradients on these ranks only, or "
        "depends on the rank, its loss or its batch. Change averaged gradients alike on all ranks. Then restart from a "
        "checkpoint in which the ranks agree."
    )
    CAUSE_NO_SYNC = (
        "Gradients are not averaged over the ranks, because the training runs within `no_sync()`. Each rank trains its "
        "own model on its share of the data."
    )
    FIX_NO_SYNC = (
        "Leave `no_sync()` before the forward pass of the last micro-batch: its forward and backward pass must both be "
        "outside. Train through the wrapper, `loss = criterion(ddp_model(x), y)`."
    )
    EACH_RANK = (
        "Each rank stepped with its own gradients: first moments of different ranks have a median cosine of "
        "{cosine:.2f}"
    )
    SOME_RANKS = (
        "{ranks:Ranks} stepped with {ranks:verb its|their} own gradients: first moments of different ranks have a "
        "median cosine of {cosine:.2f}"
    )
    EACH_RANK_BY_SQUARES = (
        "Each rank stepped with its own gradients in some steps at least: about half of the elements of the second "
        "moments are smaller than on the first rank, and half are larger"
    )
    CONSISTENT = (
        "Consistent with unreduced gradients: first moments of different ranks have a median cosine of {cosine:.2f}"
    )
    CONSISTENT_DIGESTS = "Consistent with unreduced gradients: only digests were compared"
    CONSISTENT_WITHOUT_MOMENTS = "Consistent with unreduced gradients: no first moments were compared"
    CHANGED = (
        "Consistent with gradients of {names:names} that {ranks:ranks} changed after the average: the other ranks agree"
    )
    MOMENTS = "{count} of {total:count first moment} {count:verb differs|differ}"
    UNCOUNTED = (
        "the optimizer does not count steps, so a step skipped or a momentum lost shortly before would look the same"
    )
    ALL_RANKS_DIFFER = "all ranks differ from each other"
    COSINES = "the cosines of the parameters are {least:.2f} to {most:.2f}"


# Least share of differing trained parameters. An unused parameter may agree.
MOST = 0.9
# Largest mean cosines of first moments of ranks with different gradients: without and with equal step counts.
ALIKE, ALIKE_COUNTED = 0.9, 0.95
# Largest one-sidedness of second moments in each tensor, if all ranks have gradients of their own.
SIDED = 0.75
# Without moments: a parameter with another direction, while most parameters still have the direction of a common start.
ELSEWHERE = 0.5
# Codes of other causes of differing momenta if no steps are counted, and of differing parameters without any state.
_UNCOUNTED = ("SYN213", "SYN214", "SYN215")
_STATELESS = ("SYN213", "SYN214")


class _Differing(NamedTuple):
    """The differing tensors of the optimizer's parameters."""

    parameters: list[TensorDiff]
    moments: list[TensorDiff]
    """The first moments."""


@requires(Case.in_step, Case.differing_parameters, change_whole_parameters)
def apply(case: Case) -> Match | None:
    """Match a model that differs because ranks used their own gradients, or a part that some ranks alone changed."""
    differing = _Differing(
        parameters=list(case.differing_parameters().values()),
        moments=list(case.differing_moments().values()),
    )
    if not _is_whole_model(case, differing):
        return _match_changed_part(case, differing)

    trend, since = case.trend_facts("parameter")
    reason = _find_reason(case, differing, trend)
    if reason is None:
        return None
    covered = case.with_followers(differing.parameters)
    facts = [
        reason.summary,
        *case.parameter_facts(differing.parameters),
        *reason.details,
        *since,
        *follower_facts(covered, "optimizer"),
    ]
    match = case.make_match(differing.parameters, facts, covered)

    cosine = mean_cosine(differing.parameters)
    if is_below(cosine, COMMON_START):
        # Ranks without a common start may be separate runs, whose files do not say so.
        alternatives = dict.fromkeys((*reason.alternatives, "SYN108"))
        return match.as_consistent(*alternatives)
    return replace(match, certainty=reason.certainty, alternatives=reason.alternatives)


def _match_changed_part(case: Case, differing: _Differing) -> Match | None:
    """Match a part of the model with its moments, if the ranks that agree show that its gradients were averaged."""
    if only_decay(case) or not single_out_ranks(case, differing.parameters):
        return None
    number = len(differing.parameters)
    # Every parameter of the part differs together with its state, and no other state differs.
    owners = case.owners_of(case.differing("optimizer"))
    if len(differing.moments) < number or len(owners) > number:
        return None

    covered = case.with_followers(differing.parameters)
    changed = Text.CHANGED(
        names=list_names(differing.parameters),
        ranks=suspects(differing.parameters, case.group),
    )
    facts = [
        changed,
        *case.parameter_facts(differing.parameters),
        *_count_moments(case, differing),
        *follower_facts(covered, "optimizer"),
    ]
    match = case.make_match(differing.parameters, facts, covered).with_cause(Text.CAUSE_CHANGED, Text.FIX_CHANGED)
    return match.as_consistent("SYN213", "SYN225", "SYN224")


def _is_whole_model(case: Case, differing: _Differing) -> bool:
    """Whether nearly all trained parameters and their first moments differ."""
    trained, with_moment = case.trained_parameters(), case.with_moment()
    total = len(trained)
    has_ids = bool(with_moment) and trained.isdisjoint(with_moment)
    if has_ids:
        # If the names of the optimizer's ids are unknown, their number is still the number of trained parameters.
        total = min(total, len(with_moment))
    if len(trained.intersection(list_names(differing.parameters))) < MOST * total:
        return False
    return len(differing.moments) >= MOST * len(with_moment)


def _find_reason(case: Case, differing: _Differing, trend: str | None) -> _Reason | None:
    """Return what the best evidence shows: second moments, else first moments, else the parameters alone."""
    if case.differing_squares():
        return _judge_squares(case, differing)
    if count_squares(case):
        return None  # the second moments agree, and so do the squares of all gradients
    if case.with_moment():
        return _judge_first_moments(case, differing)
    return _judge_parameters(case, differing.parameters, trend)


class _Reason(NamedTuple):
    """Why the gradients of the ranks differ: a summary, more facts, and other causes of the same differences."""

    summary: Message
    details: tuple[Message, ...] = ()
    certainty: Certainty = "likely"
    alternatives: tuple[str, ...] = ()


def _judge_squares(case: Case, differing: _Differing) -> _Reason | None:
    """Return what second moments show, and first moments beside them; None if the gradients were only scaled."""
    if not share_smaller(case.differing_squares()):  # of digests
        return _judge_first_moments(case, differing)
    number = _count_moments(case, differing)
    cosine = mean_cosine(differing.moments)
    is_turned = is_below(cosine, ALIKE)
    if is_turned and _no_two_agree(case, differing.parameters):
        return _Reason(_summarize(case, differing, cosine), number)

    if _are_on_both_sides(case):
        summary = _summarize(case, differing, cosine)
        # Two ranks that clip by their local norms have a scale each, whose side changes from step to step. Gradients
        # that are nearly equal now were averaged, and changed afterwards.
        if is_turned and case.number_of_ranks == 2:
            return _Reason(summary, number)
        return _Reason(
            summary=summary,
            details=number,
            certainty="consistent",
            alternatives=("SYN213",),
        )

    if cosine is None or cosine > ALIKE_COUNTED:
        return None
    return _Reason(
        summary=Text.CONSISTENT(cosine=cosine),
        details=number,
        certainty="consistent",
        alternatives=("SYN213",),
    )


def _are_on_both_sides(case: Case) -> bool:
    """Whether about half of the elements of the second moments are smaller, and the other half larger."""
    squares = case.differing_squares()
    least, most = BOTH_SIDES
    shares = share_smaller(squares).values()
    is_one_sided = min(shares) < least or max(shares) > most
    if is_one_sided:
        return False
    # Within a tensor, too: in a scaled model, some tensors are smaller and others larger.
    if median_sidedness(squares) > SIDED:
        return False
    return not only_decay(case)


def _count_moments(case: Case, differing: _Differing) -> tuple[Message, ...]:
    """State how many first moments differ; empty if the optimizer has none."""
    total = len(case.with_moment())
    return state_if(total, Text.MOMENTS(count=len(differing.moments), total=total))


def _judge_first_moments(case: Case, differing: _Differing) -> _Reason | None:
    """Return what first moments show; None if they do not show different gradients."""
    if only_decay(case):
        return None
    cosine = mean_cosine(differing.moments)
    if cosine is None:
        return _judge_digests(case, differing)
    if case.counts_steps():
        return _judge_counted_moments(case, differing, cosine)
    have_one_direction = cosine >= ALIKE
    # At the first differing step, a skipped step or a lost momentum is as likely.
    if have_one_direction or case.just_began():
        return None
    number = _count_moments(case, differing)
    if _no_two_agree(case, differing.parameters):
        return _Reason(_summarize(case, differing, cosine), number)
    details = (*number, Text.UNCOUNTED())
    return _Reason(
        summary=Text.CONSISTENT(cosine=cosine),
        details=details,
        certainty="consistent",
        alternatives=_UNCOUNTED,
    )


def _judge_digests(case: Case, differing: _Differing) -> _Reason | None:
    """Return what the digests of first moments show, which have no direction."""
    # If a single rank of three or more differs, it may have clipped its gradients.
    all_differ = case.number_of_ranks == 2 or _no_two_agree(case, differing.parameters)
    if not all_differ or not case.counts_steps():
        return None
    return _Reason(Text.CONSISTENT_DIGESTS(), _count_moments(case, differing), "consistent")


def _judge_counted_moments(case: Case, differing: _Differing, cosine: float) -> _Reason | None:
    """Return what first moments show if the ranks took equal numbers of steps."""
    if cosine >= ALIKE_COUNTED:
        return None
    number = _count_moments(case, differing)
    # A single rank of two may have changed its own gradients.
    if cosine >= COMMON_START and not _no_two_agree(case, differing.parameters):
        return _Reason(
            summary=Text.CONSISTENT(cosine=cosine),
            details=number,
            certainty="consistent",
            alternatives=("SYN213",),
        )
    return _Reason(_summarize(case, differing, cosine), number)


def _summarize(case: Case, differing: _Differing, cosine: float | None) -> Message:
    """State which ranks stepped with gradients of their own. cosine: of the first moments, if there are any."""
    if cosine is None:
        return Text.EACH_RANK_BY_SQUARES()
    deviating = suspects(differing.parameters, case.group)
    if case.are_all_ranks(deviating):
        return Text.EACH_RANK(cosine=cosine)
    return Text.SOME_RANKS(ranks=deviating, cosine=cosine)


def _judge_parameters(case: Case, parameters: list[TensorDiff], trend: str | None) -> _Reason | None:
    """Return why the parameters alone are consistent with this finding; None if another cause is as likely."""
    if not case.agrees("optimizer"):
        return None
    measured = cosines(parameters)
    summary = Text.CONSISTENT_WITHOUT_MOMENTS()
    have_common_start = is_at_least(median_cosine(parameters), ELSEWHERE)
    if have_common_start and _no_two_agree(case, parameters):
        return _Reason(
            summary,
            details=(Text.ALL_RANKS_DIFFER(),),
            certainty="consistent",
            alternatives=("SYN213",),
        )

    # A difference that grows from the start is no single event.
    grows_from_start = trend == "growing" and not case.agreed_before()
    if grows_from_start and case.number_of_ranks == 2:
        return _Reason(
            summary,
            certainty="consistent",
            alternatives=_STATELESS,
        )

    # A tensor without a common direction, like a zero bias, was moved by each rank's own gradients.
    if have_common_start and min(measured) < ELSEWHERE:
        return _Reason(
            summary,
            details=(Text.COSINES(least=min(measured), most=max(measured)),),
            certainty="consistent",
            alternatives=_STATELESS,
        )
    return None


def _no_two_agree(case: Case, parameters: list[TensorDiff]) -> bool:
    """Whether each replica group has three or more ranks, and no two of them agree on a differing tensor."""
    smallest_groups = [min(map(len, groups_of(diff, case.group.ranks))) for diff in parameters]
    return case.ranks_differ(parameters) and min(smallest_groups, default=3) > 2
