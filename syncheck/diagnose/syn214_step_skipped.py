"""Some ranks skipped an optimizer step, or took a step more than the other ranks.

Signature: the optimizer's step counters differ by one or two steps, or by less than 5 % of the larger count, and
parameters differ too. If all parameters agree, no step was skipped, and the finding is SYN215. The steps stored in the
checkpoints are equal, or there are none. BatchNorm's counts usually agree, because the forward pass ran; if they lag
too, the rank missed the whole step. With several optimizers, as in a GAN, the counters of a whole optimizer may lag.
The stored step, or else the majority, shows which ranks took a step less or more; without both, the finding names the
ranks behind, and claims no direction.

A rank that loaded its optimizer state, or its model and optimizer, of a few steps before has the same counters
(SYN215), so that the finding is "consistent". Two observations support it: the lag grew since an earlier step, or this
step and the previous step were saved, and the parameters and the optimizer state of the rank are bitwise equal to the
other ranks' values at the previous step while BatchNorm's counts agree. SGD counts no steps, so that only the second
observation shows a skipped step.

Cause: a rank skipped a batch on its own: `continue` for a bad or short batch, a NaN or infinite loss or gradient on
this rank only, or missing gradients (None). Or a rank called `optimizer.step()` twice for a batch, or had a batch more.

Fix: decide on all ranks together. Each rank sets a flag to 1 if it would skip the batch; all-reduce this flag with MAX
before the step, so either all ranks step or none. Then
restart from a checkpoint in which the ranks agree, or broadcast the parameters and optimizer state of one rank. After
a step too many: call `optimizer.step()` once per batch on every rank, and give all ranks the same number of batches.

Incidents: NVIDIA-NeMo/Automodel#2468 (per-rank `continue`, different micro-step counts), ecmwf/WeatherGenerator#2718
and #2724 (the same). Checkpoints of several steps show whether a rank skips steps repeatedly: its lag then grows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import select_codes, state_if
from syncheck.diagnose.counters import (
    FEW,
    SHORT,
    are_partial,
    counter_facts,
    counters_of,
    earlier_lag,
    farthest,
    healthy_count,
    lag_grew,
    may_be_old,
    names_of_values,
)
from syncheck.diagnose.loss_scales import find_scaler_values, scales_of
from syncheck.diagnose.selection import has_kind, join_ranks, ranks_outside
from syncheck.diagnose.skipped_steps import counters_of_skipped_steps, followers, forwards_lag
from syncheck.diagnose.stale_ranks import only_skipped, stale_at_first, stale_facts
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from syncheck.diagnose.counters import StepCounter
    from syncheck.records import Comparison

CODE = "SYN214"
SLUG = "step-skipped"
SEVERITY = "error"
CERTAINTY = "consistent"
_DECIDE_TOGETHER = (
    "Decide on all ranks together: `bad = torch.tensor(float(skip), device=device)`; "
    "`dist.all_reduce(bad, op=dist.ReduceOp.MAX)`; `if bad: optimizer.zero_grad(); continue`."
)


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "A rank took fewer optimizer steps than the other ranks: it decided on its own to skip a batch, or went back "
        "by a few steps when it loaded a checkpoint."
    )
    CAUSE_EXTRA = (
        "A rank took more optimizer steps than the other ranks: it called optimizer.step() twice for a batch, or had a "
        "batch that the other ranks did not have or skipped."
    )
    CAUSE_UNEQUAL = (
        "The ranks took different numbers of optimizer steps: a rank skipped a step on its own, or another rank took a "
        "step more. Or only some ranks restored the optimizer state of a checkpoint."
    )
    CAUSE_REDUCTION = (
        "The ranks step after different reductions: a rank skipped a step alone, or a counter of accumulated batches "
        "or another condition of the step depends on the rank."
    )
    CAUSE_TURN = (
        "The ranks step in turn, after different reductions: the counters of accumulated batches differ, or a "
        "condition of the step depends on the rank. Each rank steps with gradients of other batches."
    )
    CAUSE_CLEARED = (
        "No parameter had a gradient on a rank: `zero_grad()` came between `backward()` and `step()`, other code set "
        "`.grad = None`, no backward pass came before the step, or the optimizer trains tensors outside of the model, "
        "as after `load_state_dict(assign=True)` or the replacement of a module or parameter."
    )
    DIFF_CAUSE = "One of the runs skipped an optimizer step that the other run took."
    DIFF_FIX = "Look for skipped batches, overflows of the loss scaler and NaN in the logs of both runs."
    DIFF_BATCHES_COUNTED = "BatchNorm counted the same batches in both runs"
    FIX = f"{_DECIDE_TOGETHER} Then restart from a checkpoint in which the ranks agree."
    FIX_UNEQUAL = FIX
    FIX_TURN = (
        "Decide when to step with equal numbers on all ranks: count batches from the same start, and reset "
        "the counter on all ranks together. Then restart from a checkpoint in which the ranks agree."
    )
    FIX_REDUCTION = (
        "Decide when to step with equal numbers on all ranks, for example a counter of batches with the same start. "
        f"{_DECIDE_TOGETHER} Then restart from a checkpoint in which the ranks agree."
    )
    FIX_CLEARED = (
        "Look for code on some ranks only which clears gradients: call `zero_grad()` before `backward()` or after "
        "`step()`, on all ranks. Create the optimizer again after code that replaces parameters. Then restart from a "
        "checkpoint in which the ranks agree."
    )
    FIX_EXTRA = (
        "Call `optimizer.step()` once per batch on every rank, and give all ranks the same number of batches "
        "(DistributedSampler, `drop_last=True`). Decide on all ranks together whether to skip a batch. Then restart "
        "from a checkpoint in which the ranks agree."
    )
    IN_A_JOB = f"{_DECIDE_TOGETHER} To continue this run: `syncheck.live.resync(model, optimizer)` on all ranks."
    IN_A_JOB_NO_MAJORITY = (
        f"{_DECIDE_TOGETHER} To continue this run: `syncheck.live.resync(model, optimizer, source=RANK)` on all ranks, "
        "with a rank that took all steps."
    )
    SKIPPED = "{ranks:Ranks} took {lag:count optimizer step} less than {others:ranks}"
    SKIPPED_UP_TO = "{ranks:Ranks} took up to {lag:count optimizer step} less than {others:ranks}"
    EXTRA = "{ranks:Ranks} took {lag:count optimizer step} more than {others:ranks}"
    EXTRA_UP_TO = "{ranks:Ranks} took up to {lag:count optimizer step} more than {others:ranks}"
    COUNTED_SKIPPED = "The optimizer of {ranks:ranks} counts {lag:count step} less than {others:ranks}"
    COUNTED_SKIPPED_UP_TO = "The optimizer of {ranks:ranks} counts up to {lag:count step} less than {others:ranks}"
    COUNTED_EXTRA = "The optimizer of {ranks:ranks} counts {lag:count step} more than {others:ranks}"
    COUNTED_EXTRA_UP_TO = "The optimizer of {ranks:ranks} counts up to {lag:count step} more than {others:ranks}"
    SKIPPED_AFTER_FORWARD = "{ranks:Ranks} ran the forward pass but skipped the optimizer step"
    BATCHES_COUNTED = "BatchNorm counted the same batches on all ranks"
    FORWARD_MISSING = "`num_batches_tracked` lags too, so the forward pass was also skipped or undone"
    FORWARD_RAN = "`num_batches_tracked` agrees"
    REPEATED = "at step {step} the lag was {lag:count step}, so steps were skipped more than once"
    LOADED_STATE = "a state of {lag:count step} before, loaded on the ranks with fewer steps, would look the same"
    LOST_STATE = "optimizer state lost after {lag:count step} would look the same"
    STEP_UNKNOWN = "the files do not store their step, so they may be of different steps"


def apply(case: Case) -> Match | None:
    """Match step counters with a small lag, or a rank with stale values after its forward pass."""
    first = stale_at_first(case)
    # A lower loss scale shows an overflow, which is SYN216.
    have_equal_scales = not scales_of(case.group)
    if first is not None and only_skipped(first) and have_equal_scales:
        return _match_stale(case, first)
    counters = counters_of_skipped_steps(case)
    largest = farthest(counters)
    # A rank with equal parameters took every step.
    if largest is None or case.is_in_sync("parameter"):
        return None
    return _match_lag(case, counters, largest)


def _match_stale(case: Case, first: Comparison) -> Match | None:
    """Return the match for ranks with the values of the step before. first: the group that shows them."""
    counters = counters_of(case)
    tensors = followers(case, counters)
    has_old_values = has_kind(tensors, "parameter", "optimizer")
    if not counters and not has_old_values:
        return None
    ranks, largest = tuple(first.evidence.stale), farthest(counters)
    summary, repetition = Text.SKIPPED_AFTER_FORWARD(ranks=ranks), []
    if largest is not None:
        summary, *_ = _Progress(case, largest).facts()
        repetition = _repetition_facts(case, largest)
    facts = [
        summary,
        *counter_facts(counters),
        *case.parameter_facts(tensors),
        *stale_facts(first),
        Text.BATCHES_COUNTED(),
        *repetition,
    ]
    values = (*names_of_values(counters), *find_scaler_values(case, ranks))
    return Match(
        tensors=tensors,
        ranks=ranks,
        facts=facts,
        values=values,
    )


def _match_lag(case: Case, counters: tuple[StepCounter, ...], largest: StepCounter) -> Match:
    """Return the match for step counters with a small lag. largest: the counter with the largest lag."""
    tensors, progress = followers(case, counters), _Progress(case, largest)
    ranks = tuple(sorted(join_ranks(_Progress(case, counter).deviating for counter in counters)))
    alternatives = _find_alternatives(case, largest)
    facts = [
        # A counter may differ because of loaded state.
        *progress.facts("COUNTED_" * bool(alternatives)),
        *counter_facts(counters),
        *case.parameter_facts(tensors),
        *_forward_facts(case, counters),
        *_repetition_facts(case, largest),
        *_doubts(case, largest),
    ]
    values = (*names_of_values(counters), *find_scaler_values(case, ranks))
    match = Match(
        tensors=tensors,
        ranks=ranks,
        facts=facts,
        values=values,
    )
    if not case.group.is_pair:  # two runs have a cause of their own
        match = match.with_cause(progress.choose_cause(), progress.choose_fix())
    return match.as_consistent(*alternatives or ("SYN217",))


class _Progress:
    """Which ranks took fewer or more steps than the healthy ranks, by a step counter.

    healthy_count: the count of the healthy ranks; the highest count if nothing shows it.
    """

    def __init__(self, case: Case, counter: StepCounter) -> None:
        """Find the healthy ranks of a counter."""
        count = healthy_count(case, counter)
        self.is_known = count is not None
        self.healthy_count = counter.highest if count is None else count
        self.by_rank = dict(sorted(counter.by_rank.items()))
        self.behind = tuple(rank for rank, count in self.by_rank.items() if count < self.healthy_count)
        self.ahead = tuple(rank for rank, count in self.by_rank.items() if count > self.healthy_count)
        self.healthy = ranks_outside(self.by_rank, self.deviating)

    @property
    def deviating(self) -> tuple[int, ...]:
        """The ranks that took fewer or more steps."""
        return (*self.behind, *self.ahead)

    def facts(self, prefix: str = "") -> list[Message]:
        """State which ranks took, or count, how many steps fewer or more than the healthy ranks.

        prefix: of the names of sentences about what the optimizers count.
        """
        facts = []
        if self.behind:
            facts.append(self._describe(self.behind, f"{prefix}SKIPPED"))
        if self.ahead:
            facts.append(self._describe(self.ahead, f"{prefix}EXTRA"))
        return facts

    def _describe(self, ranks: tuple[int, ...], name: str) -> Message:
        """State by how many steps some ranks deviate. name: of the sentence if they deviate by as many steps."""
        lags = {abs(self.by_rank[rank] - self.healthy_count) for rank in ranks}
        sentence = Text[name if len(lags) == 1 else f"{name}_UP_TO"]
        return sentence(
            ranks=ranks,
            lag=int(max(lags)),
            others=self.healthy,
        )

    @property
    def is_only_ahead(self) -> bool:
        """Whether some ranks took more steps, and none fewer."""
        return bool(self.ahead) and not self.behind

    def choose_cause(self) -> Sentence | None:
        """Return the cause; None for ranks that skipped a step."""
        if not self.is_known:
            return Text.CAUSE_UNEQUAL
        return Text.CAUSE_EXTRA if self.is_only_ahead else None

    def choose_fix(self) -> Sentence | None:
        """Return the fix; None for ranks that skipped a step."""
        return Text.FIX_EXTRA if self.is_only_ahead else None


def _repetition_facts(case: Case, counter: StepCounter) -> list[Message]:
    """State that steps were skipped more than once, if the lag changed since an earlier step."""
    earlier = earlier_lag(counter, case.series)
    if earlier is None:
        return []
    step, lag = earlier
    return [Text.REPEATED(step=step, lag=lag)]


def _forward_facts(case: Case, counters: tuple[StepCounter, ...]) -> tuple[Message, ...]:
    """State whether the ranks ran the forward pass, as far as BatchNorm's counts show it."""
    is_missing = forwards_lag(case, counters)
    has_run = not is_missing and case.is_in_sync("bn_count")
    return (
        *state_if(is_missing, Text.FORWARD_MISSING()),
        *state_if(has_run, Text.FORWARD_RAN()),
    )


def _find_alternatives(case: Case, counter: StepCounter) -> tuple[str, ...]:
    """Return the codes of other causes with the same evidence; empty if steps were skipped again and again."""
    is_partial = are_partial(case)
    # Counters of a part of the parameters may lag because these were not updated.
    are_skipped_again = lag_grew(counter, case.series) and not is_partial
    if are_skipped_again:
        return ()
    fits = {
        # The state of earlier steps, loaded together with the model or alone, has the same counters.
        "SYN215": True,
        "SYN225": is_partial,
        "SYN217": may_be_old(case),
    }
    return select_codes(fits)


def _doubts(case: Case, counter: StepCounter) -> list[Message]:
    """State other causes with the same evidence."""
    if lag_grew(counter, case.series):
        return []
    lag = int(counter.lag)
    # A lag of more than a few steps, or in a short run, is as large as that of state lost at the start.
    is_loss = lag > FEW or counter.highest <= SHORT
    sentence = Text.LOST_STATE if is_loss else Text.LOADED_STATE
    return [sentence(lag=lag), *state_if(may_be_old(case), Text.STEP_UNKNOWN())]
