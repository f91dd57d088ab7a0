"""The optimizer state was loaded or lost on some ranks only.

Signature: the optimizer's step counters are far apart, by more than two steps and at least 5 % of the larger count; or
the optimizer of some ranks holds no state at all; or all moments of some ranks are 0, other ranks have other moments,
and all parameters agree: the state was reset, and scaled gradients would have changed the parameters, too. Right after
the resume the parameters still agree, because DDP broadcasts them, and any lag then proves this cause, because a
skipped step changes parameters. One step later all of them differ, and ranks that skipped steps may look the same
(SYN214). If only a part of the counters lags, parameters without a gradient look the same (SYN225). Without a majority,
the rank that contradicts the stored step is suspect; if the step does not show it, the rank with far fewer steps, or
all ranks. SGD counts no steps. After its first step only parameters and momentum differ, which other causes explain as
well, unless an earlier step shows the missing state: then the finding is likely. In a watched run that saw each step,
and no skipped one, every lag is of lost state.

Cause: only rank 0 called `optimizer.load_state_dict()` on resume, a rank did not find its file and continued with empty
state, or some ranks created a new optimizer. Nothing broadcasts the optimizer state.

Fix: load the optimizer state on every rank before the first step. To check it, all-gather one step counter and stop if
the values differ.

Incidents: vllm-project/speculators#926 (only rank 0 loaded), PaddlePaddle/PaddleNLP#7256 (the same).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires, select_codes, state_if
from syncheck.diagnose.counters import (
    BURST,
    are_partial,
    counter_facts,
    deviating_ranks,
    earlier_lag,
    farthest,
    healthy_count,
    lag_stayed,
    may_be_old,
    names_of_values,
)
from syncheck.diagnose.loss_scales import find_scaler_values
from syncheck.diagnose.lost_state import ranks_with_zeros, ranks_without_state
from syncheck.diagnose.measures import is_below
from syncheck.diagnose.optimizer_classes import has_one_class
from syncheck.diagnose.selection import count_kinds, ranks_outside, select_missing
from syncheck.diagnose.skipped_steps import counters_of_lost_state, counters_of_skipped_steps, followers
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.diagnose.counters import StepCounter
    from syncheck.records import TensorDiff

CODE = "SYN215"
SLUG = "optimizer-state-not-restored"
SEVERITY = "error"
CERTAINTY = "consistent"
MOST_ALTERNATIVES = 3
# The code of skipped steps.
_SKIPPED = "SYN214"
_LOAD_EVERYWHERE = (
    "Load the optimizer state on every rank before the first step: `optimizer.load_state_dict(torch.load(path, "
    "map_location=device)['optimizer'])`, not under 'if rank == 0'. DDP broadcasts the model, never the optimizer."
)


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = "The optimizer state was loaded or lost on some ranks only, so its moments and step counts differ."
    FIX = _LOAD_EVERYWHERE
    FIX_SHARDED = (
        "Load the optimizer state of every rank before the first step, with "
        "`torch.distributed.checkpoint.state_dict.set_optimizer_state_dict`, not under 'if rank == 0'. Nothing copies "
        "the state from one replica of a sharded model to another."
    )
    # The majority may have lost its state, so resync needs a source.
    IN_A_JOB = (
        f"{_LOAD_EVERYWHERE} To continue this run: `syncheck.live.resync(model, optimizer, source=RANK)` on all ranks, "
        "with a rank whose optimizer still has its state."
    )
    ON_SOME_RANKS = "The optimizer state of {ranks:ranks} is of another step than the state of the other ranks"
    OF_DIFFERENT_STEPS = "The ranks hold optimizer state of different steps"
    EMPTY = (
        "The optimizer of {ranks:ranks} holds no state, but the optimizer of {others:ranks} holds "
        "{tensors:count tensor}"
    )
    ZEROS = (
        "All {count:count moment} of the optimizer {count:verb is|are} 0 on {ranks:ranks}, and not on {others:ranks}: "
        "the state was reset"
    )
    STATE_DIFFERS = "{count:count other optimizer tensor} {count:verb differs|differ}"
    PARAMETERS_AGREE = "all parameters still agree"
    NO_STEP_SINCE = "all parameters still agree, so no step was taken since"
    SCALER_DIFFERS = "the state of the loss scaler differs too"
    REPEATED = "at step {step} the lag was {lag:count step}, so this happened repeatedly, or steps were skipped"
    NONE_SKIPPED = "the run was watched, and no rank skipped a step"
    STEP_UNKNOWN = "the files do not store their step, so they may be of different steps"


@requires(has_one_class)
def apply(case: Case) -> Match | None:
    """Match step counters with a large lag, and optimizers without state or moments beside optimizers with state."""
    empty_ranks = ranks_without_state(case)
    lost_tensors = tuple(select_missing(case.tensors, *OPTIMIZER))
    if empty_ranks and lost_tensors:
        return _match_empty_state(case, empty_ranks, lost_tensors)
    counters = counters_of_lost_state(case)
    # A skipped step changes parameters, so a small lag of equal parameters was loaded too.
    if not counters and case.is_in_sync("parameter"):
        counters = counters_of_skipped_steps(case)
    largest = farthest(counters)
    if largest is None:
        return _match_zeros(case)
    return _match_counters(case, counters, largest)


def _match_counters(case: Case, counters: Sequence[StepCounter], largest: StepCounter) -> Match:
    """Match step counters that are far apart. largest: the counter with the largest lag."""
    tensors, ranks = followers(case, counters), _find_suspects(case, counters, largest)
    scaler_values = find_scaler_values(case, ranks)
    parameters = case.parameter_facts(tensors)
    states = count_kinds(tensors, "optimizer")
    took_no_step = not parameters and case.is_in_sync("parameter")
    facts = [
        _summarize(case, ranks),
        *counter_facts(counters),
        *state_if(states, Text.STATE_DIFFERS(count=states)),
        *parameters,
        *state_if(took_no_step, Text.NO_STEP_SINCE()),
        *state_if(scaler_values, Text.SCALER_DIFFERS()),
        *state_if(_SKIPPED in case.impossible, Text.NONE_SKIPPED()),
        *_doubts(case, largest),
    ]
    values = (*names_of_values(counters), *scaler_values)
    match = Match(
        tensors=tensors,
        ranks=ranks,
        facts=facts,
        values=values,
    )
    if took_no_step:
        # No step changes the state and leaves the parameters equal.
        return replace(match, certainty="proved")
    alternatives = _find_alternatives(case, largest) if parameters else ()
    others = alternatives or (_SKIPPED,)
    return match.as_consistent(*(code for code in others if code not in case.impossible))


def _find_suspects(case: Case, counters: Sequence[StepCounter], largest: StepCounter) -> tuple[int, ...]:
    """Return the ranks with state of a wrong step; all ranks if neither a majority nor a stored step shows them."""
    healthy = healthy_count(case, largest)
    # State that is far behind was lost. If it is near, an older or a newer state was loaded.
    was_lost = healthy is None and largest.far
    if largest.minority or was_lost:
        return deviating_ranks(counters)
    return tuple(rank for rank in sorted(largest.by_rank) if largest.by_rank[rank] != healthy)


def _summarize(case: Case, ranks: tuple[int, ...]) -> Message:
    """State which ranks have state of another step."""
    are_all_suspect = len(ranks) == case.number_of_ranks
    return Text.OF_DIFFERENT_STEPS() if are_all_suspect else Text.ON_SOME_RANKS(ranks=ranks)


def _doubts(case: Case, counter: StepCounter) -> list[Message]:
    """State other causes with the same evidence."""
    doubts: list[Message] = []
    earlier = earlier_lag(counter, case.series)
    if earlier is not None:
        step, lag = earlier
        doubts.append(Text.REPEATED(step=step, lag=lag))
    return [*doubts, *state_if(may_be_old(case), Text.STEP_UNKNOWN())]


def _find_alternatives(case: Case, counter: StepCounter) -> tuple[str, ...]:
    """Return the codes of other causes with the same evidence, if parameters differ."""
    is_old = may_be_old(case)
    fits = {
        "SYN225": are_partial(case),
        _SKIPPED: _may_be_skipped(case, counter),
        # Files of two epochs, each complete, or a file that a later checkpoint did not replace.
        "SYN106": is_old,
        "SYN217": is_old,
    }
    return select_codes(fits)[:MOST_ALTERNATIVES]


def _may_be_skipped(case: Case, counter: StepCounter) -> bool:
    """Whether skipped or additional steps explain the lag too."""
    # A lag of the same size at two steps has a single cause, but a rank may skip a few steps in a row.
    has_single_cause = counter.lag > BURST and lag_stayed(counter, case.series)
    if has_single_cause:
        return False
    # A rank that skips steps takes at least half of them.
    if 2 * counter.lag < counter.highest:
        return True
    # A rank ahead may have taken extra steps.
    return is_below(healthy_count(case, counter), counter.highest)


def _match_zeros(case: Case) -> Match | None:
    """Match moments that are 0 on some ranks, if all parameters agree."""
    zero_ranks = ranks_with_zeros(case)
    if not zero_ranks or not case.is_in_sync("parameter"):
        return None
    moments = case.differing("optimizer")
    holders = ranks_outside(case.group.ranks, zero_ranks)
    facts = [Text.ZEROS(count=len(moments), ranks=zero_ranks, others=holders), Text.PARAMETERS_AGREE()]
    # A wrapper that copies the parameters after each step hides gradients of 0.
    return Match(moments, zero_ranks, facts, certainty="likely")


def _match_empty_state(case: Case, empty_ranks: tuple[int, ...], lost_tensors: tuple[TensorDiff, ...]) -> Match:
    """Return the match for ranks without optimizer state. The smaller set is suspect, of two equal sets the empty."""
    holders = ranks_outside(case.group.ranks, empty_ranks)
    facts = [
        Text.EMPTY(
            ranks=empty_ranks,
            others=holders,
            tensors=len(lost_tensors),
        )
    ]
    suspects = holders if len(holders) < len(empty_ranks) else empty_ranks
    if case.is_in_sync("parameter"):
        facts.append(Text.PARAMETERS_AGREE())
        return Match(
            tensors=lost_tensors,
            ranks=suspects,
            facts=facts,
            certainty="proved",
        )
    # The rank may not have taken any step so far.
    return Match(lost_tensors, suspects, facts).as_consistent("SYN214")
