"""The optimizer state was loaded or lost on some ranks only.

Signature: the optimizer's step counters are far apart, by more than two steps and at least 5 % of the larger count; or
the optimizer of some ranks holds no state at all. Right after the resume the parameters still agree, because DDP
broadcasts them, and any lag then proves this cause, because a skipped step changes parameters. One step later all of
them differ, and ranks that skipped steps may look the same (SYN214). If only a part of the counters lags, parameters
without a gradient look the same (SYN225). SGD counts no steps. After its first step only parameters and momentum
differ, which other causes explain as well.

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
from syncheck.diagnose.counters import (
    BURST,
    are_partial,
    counter_facts,
    earlier_lag,
    farthest,
    fitting,
    followers,
    healthy_count,
    lag_stayed,
    may_be_old,
    names_of_values,
    odd_ranks,
    parameters_agree,
    trackers,
    without_state,
)
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import OPTIMIZER

if TYPE_CHECKING:
    from syncheck.diagnose.counters import StepCounter
    from syncheck.records import TensorDiff

CODE = "SYN215"
SLUG = "optimizer-state-not-restored"
SEVERITY = "error"
CERTAINTY = "consistent"
MOST_ALTERNATIVES = 3
_LOAD_EVERYWHERE = (
    "Load the optimizer state on every rank before the first step: optimizer.load_state_dict(torch.load(path, "
    "map_location=device)['optimizer']), not under 'if rank == 0'. DDP broadcasts the model, never the optimizer."
)


class Text(Sentence):
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
        f"{_LOAD_EVERYWHERE} To continue this run: syncheck.live.resync(model, optimizer, source=RANK) on all ranks, "
        "with a rank whose optimizer still has its state."
    )
    ON_SOME_RANKS = "The optimizer state of {ranks:ranks} is of another step than the state of the other ranks"
    OF_DIFFERENT_STEPS = "The ranks hold optimizer state of different steps"
    EMPTY = (
        "The optimizer of {ranks:ranks} holds no state, but the optimizer of {others:ranks} holds "
        "{tensors:count tensor}"
    )
    STATE_DIFFERS = "{count:count other optimizer tensor} {count:verb differs|differ}"
    PARAMETERS_AGREE = "all parameters still agree"
    NO_STEP_SINCE = "all parameters still agree, so no step was taken since"
    SCALER_DIFFERS = "the state of the loss scaler differs too"
    REPEATED = "at step {step} the lag was {lag:count step}, so this happened repeatedly, or steps were skipped"
    STEP_UNKNOWN = "the files do not store their step, so they may be of different steps"


def apply(case: Case) -> Match | None:
    """Match step counters with a large lag, and optimizers without state beside optimizers with state."""
    empty, lacking = without_state(case), tuple(diff for diff in case.tensors if _is_lost(diff))
    if empty and lacking:
        return _match_empty_state(case, empty, lacking)
    counters = fitting(case, far=True)
    # A skipped step changes parameters, so a small lag of equal parameters was loaded too.
    if not counters and parameters_agree(case):
        counters = fitting(case, far=False)
    most = farthest(counters)
    if most is None:
        return None
    tensors, ranks = followers(case, counters), odd_ranks(counters)
    scaler = trackers(case, ranks)
    facts = [_summary(case, ranks), *counter_facts(counters)]
    if state := sum(diff.kind == "optimizer" for diff in tensors):
        facts.append(Text.STATE_DIFFERS(count=state))
    parameters = case.parameter_facts(tensors)
    facts += parameters
    if not parameters and parameters_agree(case):
        facts.append(Text.NO_STEP_SINCE())
    if scaler:
        facts.append(Text.SCALER_DIFFERS())
    if earlier := earlier_lag(most, case.series):
        facts.append(Text.REPEATED(step=earlier[0], lag=earlier[1]))
    if may_be_old(case):
        facts.append(Text.STEP_UNKNOWN())
    match = Match(tensors, ranks, facts, (*names_of_values(counters), *scaler))
    others = _find_alternatives(case, most, parameters_differ=bool(parameters))
    if not parameters and parameters_agree(case):
        # No step changes the state and leaves the parameters equal.
        return replace(match, certainty="proved")
    return replace(match, certainty="consistent", alternatives=others or ("SYN214",))


def _summary(case: Case, ranks: tuple[int, ...]) -> Message:
    """State which ranks have state of another step."""
    if len(ranks) == len(case.group.replicas):
        return Text.OF_DIFFERENT_STEPS()
    return Text.ON_SOME_RANKS(ranks=ranks)


def _find_alternatives(case: Case, counter: StepCounter, *, parameters_differ: bool) -> tuple[str, ...]:
    """Return the codes of other causes with the same evidence."""
    if not parameters_differ:
        return ()
    others = []
    if are_partial(case):
        others.append("SYN225")
    # A rank that skips steps takes at least half of them. A lag of the same size at two steps has a single cause, but a
    # rank may skip a few steps in a row. A rank ahead may have taken extra steps.
    is_small = 2 * counter.lag < max(counter.by_rank.values())
    is_single = counter.lag > BURST and lag_stayed(counter, case.series)
    healthy = healthy_count(case, counter)
    is_ahead = healthy is not None and max(counter.by_rank.values()) > healthy
    if (is_small or is_ahead) and not is_single:
        others.append("SYN214")
    if may_be_old(case):
        # Files of two epochs, each complete, or a file that a later checkpoint did not replace.
        others += ["SYN106", "SYN217"]
    return tuple(others[:MOST_ALTERNATIVES])


def _is_lost(diff: TensorDiff) -> bool:
    return diff.reason == "missing" and diff.kind in OPTIMIZER


def _match_empty_state(case: Case, ranks: tuple[int, ...], lacking: tuple[TensorDiff, ...]) -> Match:
    """Return the match for ranks without optimizer state. The smaller set is suspect, of two equal sets the empty."""
    others = tuple(rank for rank in case.group.ranks if rank not in ranks)
    facts = [Text.EMPTY(ranks=ranks, others=others, tensors=len(lacking))]
    match = Match(lacking, others if len(others) < len(ranks) else ranks, facts)
    if parameters_agree(case):
        facts.append(Text.PARAMETERS_AGREE())
        return replace(match, certainty="proved")
    # The rank may not have taken any step so far.
    return replace(match, certainty="consistent", alternatives=("SYN214",))
