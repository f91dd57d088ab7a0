"""The ranks started from different parameters, or some ranks changed theirs later, and equal gradients keep that.

Signature: parameters differ in nearly every element and point in different directions (median cosine under 0.9), while
the optimizer state, which consists of averaged gradients, agrees. Parameters that start as constants (norm weights,
zero biases) agree too. Over several steps the difference stays constant, or shrinks by (1 - lr x weight decay) per
step. If a single tensor differs, the series of steps must show this, because the tensor may have been overwritten.

SGD's momentum contains the weight decay of the parameters, so it differs too: by at most wd / (1 - momentum) times the
difference of the parameters (measured: 0.27 to 1.04 times, over 3 to 200 steps; at least 6 times if gradients were not
averaged). The cosine rises over the run because all ranks take the same steps: from 0.02 at the start to 0.95 after 600
steps of SGD at lr 0.1, and to 0.39 with AdamW. One skipped step leaves a cosine of 0.999.

Without saved optimizer state, the cosine must be under 0.5 if some parameters agree, or under 0.2 otherwise, or the
series must show a difference that does not grow.

If the parameters agreed at an earlier step, the ranks started alike: some ranks loaded, reset or edited their
parameters after that step. A single step shows the difference, but not when it began.

Cause: the ranks used different seeds and nothing broadcast the parameters of rank 0 (`DDP(init_sync=False)`, HSDP
without `sync_module_states`), or only rank 0 loaded weights after the model was wrapped. Averaged gradients then move
all ranks alike, each from its own start, although the gradients belong to different models. Or some ranks loaded or
re-initialised parameters during the training (a warm restart, a head for new classes), without a broadcast.

Fix: load weights before wrapping, keep `init_sync` on, or broadcast the parameters after loading. FSDP1 broadcasts them
with `sync_module_states=True`. `fully_shard` broadcasts nothing: use the same seed on all ranks, or load the weights on
every rank. After a step in sync, look for the code that loads or resets parameters on some ranks, and broadcast there.

Incidents: mosaicml/llm-foundry#830, pytorch/pytorch#75870, pytorch/pytorch#140183, pytorch/torchtitan#1777,
pytorch/xla#3216.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires, select_codes, state_if
from syncheck.diagnose.features import single_out_ranks
from syncheck.diagnose.history import last_agreement, suspects
from syncheck.diagnose.measures import differing_share, is_below, median_cosine
from syncheck.diagnose.moments import decay_share, only_decay
from syncheck.diagnose.sentences import is_sharded
from syncheck.diagnose.statements import follower_facts
from syncheck.frozen import record
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from syncheck.records import TensorDiff

CODE = "SYN210"
SLUG = "init-not-broadcast"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "The ranks hold different parameters, and equal gradients keep the difference: nothing broadcast the initial "
        "parameters of rank 0, or some ranks loaded, reset or edited their parameters later."
    )
    CAUSE_PART = (
        "The ranks hold different values of some parameters: nothing broadcast them, for example because their layer "
        "was added after wrapping, or some ranks loaded, reset or edited them later."
    )
    CAUSE_LATER = (
        "Some ranks loaded, reset or edited their parameters after a step at which all ranks agreed, and nothing "
        "broadcast the new values. Equal gradients keep the difference."
    )
    FIX = (
        "Load weights before wrapping, and keep `init_sync` of DDP on (FSDP1: `sync_module_states=True`; `fully_shard` "
        "broadcasts nothing, so use the same seed on all ranks). Or broadcast after loading: `for t in "
        "model.state_dict().values(): dist.broadcast(t, 0)`."
    )
    FIX_PART = (
        "Add layers and load weights before wrapping: DDP neither broadcasts nor averages a layer that is added later "
        "(`init_sync` stays on; FSDP1: `sync_module_states=True`; `fully_shard` broadcasts nothing, so use the same "
        "seed on all ranks). Or broadcast after loading: `for t in model.state_dict().values(): dist.broadcast(t, 0)`. "
        "To see whether the gradients of these parameters are averaged, save the optimizer state too."
    )
    FIX_LATER = (
        "Look for code that loads, resets or edits parameters on some ranks only, after the last step in sync. Run "
        "that code on all ranks, and broadcast after it: `for t in model.state_dict().values(): dist.broadcast(t, 0)`. "
        "Or resume all ranks from the last step in sync."
    )
    FIX_LATER_SHARDED = (
        "Look for code that loads, resets or edits parameters on some ranks only, after the last step in sync. Run "
        "that code on all ranks, and broadcast after it: `for p in model.parameters(): dist.broadcast(p.to_local(), "
        "group=mesh['replicate'].get_group(), group_src=0)`."
    )
    FIX_SHARDED = (
        "`fully_shard` broadcasts nothing: build the model from the same seed on all ranks, or load the weights on "
        "every rank. To make the replicas of a sharded model equal: `for p in model.parameters(): "
        "dist.broadcast(p.to_local(), group=mesh['replicate'].get_group(), group_src=0)`."
    )
    DIFFERENT_STARTS = "The ranks hold different parameters, and have stepped with equal gradients"
    OTHER_START = (
        "{ranks:Ranks} {ranks:verb holds|hold} other parameters than the other ranks, and all ranks have stepped with "
        "equal gradients"
    )
    CONSISTENT = "Consistent with parameters loaded or initialised on each rank: no optimizer state was compared"
    DIGESTS = (
        "The digests of some parameters differ, and those of other parameters and of the optimizer state agree, so "
        "the gradients were equal"
    )
    AGREED = "all parameters agreed at step {step}, so the ranks did not start differently"
    SHARE = "{share:.0%} of their elements differ"
    COSINE = "their median cosine between ranks is {cosine:.2f}"
    AGREEING = "{count:count parameter} {count:verb agrees|agree} ({names:names})"
    OPTIMIZER_AGREES = "all {tensors:count optimizer tensor} agree"
    ONLY_DECAY = (
        "the momentum differs by no more than weight decay explains, wd / (1 - momentum) = {share:.3g} times the "
        "difference of the parameters"
    )


# Share of elements. Different initial values differ nearly everywhere.
WHOLE = 0.9
# Share of the trained parameters. Only those with constant initial values agree.
MOST_OF_MODEL = 0.25
# Median cosines under which parameters started differently: if the optimizer state agrees; if it differs by weight
# decay alone; without saved state, if other parameters agree; without saved state, if all parameters differ.
UNLIKE, UNLIKE_BUT_DECAY, UNLIKE_WITHOUT_STATE, UNLIKE_ALONE = 0.9, 0.97, 0.5, 0.2


@record
class _Difference:
    """The differing trained parameters and their directions."""

    parameters: list[TensorDiff]
    share: float | None
    """The median share of differing elements; None if only digests were compared."""
    cosine: float | None
    """The median cosine between ranks; None if it was not measured."""
    has_state: bool
    """Whether optimizer state was compared."""


def _have_equal_gradients(case: Case) -> bool:
    """Whether the optimizer state agrees, apart from the weight decay of different parameters."""
    return case.agrees("optimizer") or only_decay(case)


# A different learning rate or weight decay also moves parameters apart, and leaves Adam's moments equal.
@requires(Case.in_step, Case.differing_parameters, _have_equal_gradients)
def apply(case: Case) -> Match | None:
    """Match parameters that differ since the start, while the averaged gradients agree."""
    parameters = list(case.differing_parameters().values())
    state = _state_facts(case)
    difference = _Difference(
        parameters,
        share=differing_share(parameters),
        cosine=median_cosine(parameters),
        has_state=bool(state),
    )
    trend, since = case.trend_facts("parameter")
    if not _started_differently(case, difference, trend):
        return None

    agreed = last_agreement(case.names_of("parameter"), case.steps())
    covered = case.with_followers(parameters)
    facts = [
        _summarize(case, difference),
        *state_if(agreed is not None, Text.AGREED(step=agreed)),
        *case.parameter_facts(parameters),
        *_direction_facts(case, difference),
        *state,
        *since,
        *follower_facts(covered, "optimizer"),
    ]
    match = case.make_match(parameters, facts, covered)
    if agreed is not None:
        fix = Text.FIX_LATER_SHARDED if is_sharded(case.group) else Text.FIX_LATER
        match = match.with_cause(Text.CAUSE_LATER, fix)
    return _limit_certainty(case, match, difference)


def _limit_certainty(case: Case, match: Match, difference: _Difference) -> Match:
    """Return the match with other causes that fit the parameters as well."""
    if not difference.has_state:
        # Without optimizer state, it is unknown which parameters are trained.
        # Nor whether equal gradients kept the difference, or a layer outside the wrapper had gradients of its own.
        if not case.agreeing("parameter"):
            return match.as_consistent()
        if match.fix is None and not is_sharded(case.group):
            match = match.with_cause(Text.CAUSE_PART, Text.FIX_PART)
        # Ranks that agree had averaged gradients.
        may_be_outside = not single_out_ranks(case, difference.parameters)
        return match.as_consistent(*select_codes({"SYN212": may_be_outside, "SYN218": True}))
    if difference.cosine is None:
        return match
    # Edited values have the direction of the old values.
    if difference.cosine >= UNLIKE_BUT_DECAY:
        return match.as_consistent()

    has_matrix = any(len(diff.shape) > 1 for diff in difference.parameters)
    # Two tensors may hold the values of each other, trained since.
    is_large_part = len(difference.parameters) > max(2, MOST_OF_MODEL * len(case.trained_parameters()))
    if has_matrix and is_large_part:
        return match
    # A few tensors may contain the values of each other, or were loaded.
    return match.as_consistent("SYN224")


def _summarize(case: Case, difference: _Difference) -> Message:
    """State which ranks hold other parameters, and how this is known."""
    if not difference.has_state:
        return Text.CONSISTENT()
    if difference.share is None:
        return Text.DIGESTS()
    deviating_ranks = suspects(difference.parameters, case.group)
    if case.are_all_ranks(deviating_ranks):
        return Text.DIFFERENT_STARTS()
    return Text.OTHER_START(ranks=deviating_ranks)


def _direction_facts(case: Case, difference: _Difference) -> tuple[Message, ...]:
    """State the share of differing elements, the cosine, and which parameters agree."""
    share, cosine = difference.share, difference.cosine
    agreeing = tuple(sorted(case.agreeing("parameter")))
    return (
        *state_if(share is not None, Text.SHARE(share=share)),
        *state_if(cosine is not None, Text.COSINE(cosine=cosine)),
        *state_if(agreeing, Text.AGREEING(count=len(agreeing), names=agreeing)),
    )


def _state_facts(case: Case) -> tuple[Message, ...]:
    """State how the optimizer state agrees; empty if nothing was compared."""
    if not case.agrees("optimizer"):
        return (Text.ONLY_DECAY(share=decay_share(case)),)
    number = case.compared("optimizer")
    return state_if(number, Text.OPTIMIZER_AGREES(tensors=number))


def _started_differently(case: Case, difference: _Difference, trend: str | None) -> bool:
    """Whether the ranks started from different parameters, judged by their directions or by a constant difference."""
    # A difference of the start does not grow with equal gradients.
    if trend == "growing":
        return False
    if difference.share is None:
        return _have_digests_of_part(case, difference)
    if difference.share < WHOLE:
        return False
    is_steady = trend in ("constant", "shrinking")
    if is_steady and not case.agreed_before():
        return True
    # A single tensor at a single step may have been overwritten.
    are_several = len(difference.parameters) > 1
    return are_several and is_below(difference.cosine, _largest_cosine(case, difference))


def _have_digests_of_part(case: Case, difference: _Difference) -> bool:
    """Whether the digests of several parameters differ, and all other digests, also of the optimizer state, agree."""
    are_several = len(difference.parameters) > 1
    return are_several and difference.has_state and bool(case.agreeing("parameter"))


def _largest_cosine(case: Case, difference: _Difference) -> float:
    """Return the median cosine under which parameters started differently."""
    if difference.has_state:
        return UNLIKE if case.agrees("optimizer") else UNLIKE_BUT_DECAY
    return UNLIKE_WITHOUT_STATE if case.agreeing("parameter") else UNLIKE_ALONE
