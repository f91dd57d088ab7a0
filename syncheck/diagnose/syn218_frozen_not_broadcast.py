"""Only frozen parameters or plain buffers differ: nothing synchronizes them.

Signature: all differing parameters are frozen, either by the metadata, or because the optimizer holds state of other
parameters only. Or no parameter differs, but plain buffers do. All trained parameters and the optimizer state agree.
Over several steps the difference is constant. A buffer whose difference changes is updated from each rank's own data,
and is not part of this finding.

If the optimizer's ids have no names, as in a plain `torch.save` of a model with frozen parts, the differing parameters
and the optimizer's states together may not outnumber all parameters.

Cause: DDP broadcasts the parameters and buffers of rank 0 when it wraps a model. Tensors outside the wrapper (a module
without trainable parameters is often left out), tensors filled by `to_empty` or a random initializer after wrapping,
and buffers with `broadcast_buffers=False` keep each rank's own values. Gradients are then averaged through different
layers. Frozen tensors may also have changed later on some ranks only: an adapter merged into the weights, a cast,
weight decay, a load, or training. If the tensors agreed at an earlier step of the run, this is the cause.

In files of one step, a plain buffer, or a tensor that may be a buffer, is also consistent with updates from each rank's
own data (SYN205). A copy of the model inside the model, called ema, swa, teacher, shadow or target, is also consistent
with missed updates (SYN219).

Fix: after building the model, broadcast the tensors outside the wrapper: `torch.distributed.broadcast(tensor, 0)` for
each frozen parameter and buffer. Or build the model with the same seed, or load it, on every rank. If the tensors
changed later, find the code that changes frozen tensors, run it on all ranks or on none, and copy the tensors from a
rank with the right values.

Incidents: speechbrain/speechbrain#2814, pytorch/pytorch#111138 (buffers, because `broadcast_buffers=False` also skips
the initial broadcast), pytorch/pytorch#178569, pytorch/pytorch#108331 (uninitialized buffers on other nodes).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import doubt, requires, select_codes, state_if
from syncheck.diagnose.features import are_numbered
from syncheck.diagnose.history import last_agreement
from syncheck.diagnose.measures import is_share_below
from syncheck.diagnose.selection import list_names
from syncheck.diagnose.sentences import is_sharded
from syncheck.diagnose.statements import follower_facts, largest_difference
from syncheck.frozen import record
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from syncheck.records import TensorDiff

CODE = "SYN218"
SLUG = "frozen-not-broadcast"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "Frozen parameters or buffers had different initial values, or were changed on some ranks only. Nothing "
        "broadcasts them."
    )
    CAUSE_CHANGED = (
        "Frozen parameters or buffers, which nothing broadcasts, were changed later, on some ranks only or differently "
        "on each rank."
    )
    FIX_CHANGED = (
        "Find the code that changes frozen tensors on some ranks: a merge of adapters, a cast, weight decay, a load, "
        "or a step without the freeze. Run the code on every rank or on none. Then copy the tensors from a rank with "
        "the right values: `for t in [*model.parameters(), *model.buffers()]: torch.distributed.broadcast(t.data, "
        "rank)`."
    )
    FIX = (
        "Broadcast the tensors outside the wrapper before training: `for t in [*model.parameters(), *model.buffers()]: "
        "torch.distributed.broadcast(t.data, 0)`. Or load them, or build them from the same seed, on every rank. If "
        "they were equal at the start, find the code that changes frozen tensors on some ranks."
    )
    FIX_SHARDED = (
        "`fully_shard` broadcasts nothing. Load frozen parameters and buffers, or build them from the same seed, on "
        "every rank. To make the replicas equal: `for p in model.parameters(): dist.broadcast(p.to_local(), "
        "group=mesh['replicate'].get_group(), group_src=0)`. If they were equal at the start, find the code that "
        "changes frozen tensors on some ranks."
    )
    FROZEN = "{count:count frozen parameter} {count:verb differs|differ} ({names:names}), {size}"
    UNTRAINED = "{count:count untrained tensor} {count:verb differs|differ} ({names:names}), {size}"
    BUFFERS = "{count:count plain buffer} {count:verb differs|differ} ({names:names}), {size}"
    AGREED = "all ranks agreed in {count:verb it|them} at step {step}, so some ranks changed {count:verb it|them} later"
    FROZEN_BY_METADATA = "the metadata lists {count:verb it|them} as frozen, and all other parameters agree"
    NO_STATE = (
        "the optimizer holds no state of {count:verb it|them}, and its {others:count other parameter} "
        "{others:verb agrees|agree}"
    )
    IDS_ONLY = (
        "consistent with frozen parameters or buffers, or with overwritten trained parameters: the optimizer "
        "holds state of {states} of {total:count parameter}, but their names are unknown"
    )
    COPIES = "by name, {names:names} {count:verb is|are} part of a copy of the weights"
    PARAMETERS_AGREE = "all {count:count parameter} agree"
    ONE_STEP = "a single step does not show whether they started unequal or depend on each rank's data"


# Words in the names of copies of a model inside a model. An optimizer trains no copy, but something updates it.
_COPY = re.compile(r"(?:^|[._])(?:ema|swa|averaged|teacher|shadow|target)(?:[._]|$)")
# Share of elements. A damaged element or run is no unsynchronized tensor.
WHOLE = 0.5


@record
class _Untrained:
    """The differing tensors that nothing trains."""

    tensors: tuple[TensorDiff, ...]
    are_parameters: bool
    """Whether they are parameters; buffers otherwise."""
    may_be_buffers: bool
    """Whether some of the parameters may be buffers."""
    reason: Message
    """Why they are not trained."""
    trend: str | None
    """How their difference developed over the steps."""
    agreed: int | None
    """The last earlier step at which all of them agreed."""
    copies: tuple[str, ...]
    """The names of tensors in a copy of the weights."""

    @property
    def is_single_step(self) -> bool:
        """Whether no other step shows since when the tensors differ."""
        return self.trend is None and self.agreed is None


def _has_equal_optimizer(case: Case) -> bool:
    """Whether the optimizer state agrees. Ranks that took steps with other gradients have another cause."""
    return case.agrees("optimizer")


@requires(Case.in_step, _has_equal_optimizer)
def apply(case: Case) -> Match | None:
    """Match frozen parameters if nothing else is unexplained, or plain buffers if all parameters agree."""
    untrained = _find_untrained(case)
    if untrained is None:
        return None

    covered = untrained.tensors
    if untrained.are_parameters:
        # Running statistics behind a layer with different weights differ, as they do without SyncBatchNorm.
        covered += case.of_kind(*BN_STATISTICS, "buffer")
    match = case.make_match(untrained.tensors, _list_facts(case, untrained, covered), covered)
    if untrained.agreed is not None:
        # The fix for shards names changes too.
        fix = None if is_sharded(case.group) else Text.FIX_CHANGED
        match = match.with_cause(Text.CAUSE_CHANGED, fix)
    return doubt(match, _list_alternatives(untrained))


def _find_untrained(case: Case) -> _Untrained | None:
    """Return the differing frozen parameters, or else buffers; None if they are trained, updated or damaged."""
    parameters = case.differing("parameter")
    tensors = parameters or case.differing("buffer")
    # A damaged element or run is no unsynchronized tensor.
    is_damage = is_share_below(tensors, WHOLE)
    if not tensors or is_damage:
        return None
    trend, _ = case.trend_facts("parameter" if parameters else "buffer")
    if trend not in (None, "constant"):
        return None

    names = list_names(tensors)
    reason = _reason_for_frozen(case, names) if parameters else _reason_for_buffers(case)
    if reason is None:
        return None
    return _Untrained(
        tensors,
        are_parameters=bool(parameters),
        may_be_buffers=not case.loose.isdisjoint(names),
        reason=reason,
        trend=trend,
        agreed=last_agreement(names, case.steps()),
        copies=tuple(filter(_COPY.search, names)),
    )


def _list_facts(case: Case, untrained: _Untrained, covered: Sequence[TensorDiff]) -> list[Message]:
    """State which tensors differ, why they are untrained, and since when they differ."""
    number, kind = len(untrained.tensors), "parameter" if untrained.are_parameters else "buffer"
    summary = _choose_summary(untrained)
    _, since = case.trend_facts(kind)
    agreed, copies = untrained.agreed, untrained.copies
    # A single step does not show whether buffers depend on each rank's data.
    is_unclear = untrained.is_single_step and not untrained.are_parameters
    return [
        summary(
            count=number,
            names=list_names(untrained.tensors),
            size=largest_difference(untrained.tensors),
        ),
        untrained.reason,
        *since,
        *state_if(agreed is not None, Text.AGREED(count=number, step=agreed)),
        *state_if(copies, Text.COPIES(count=len(copies), names=copies)),
        *state_if(is_unclear, Text.ONE_STEP()),
        *follower_facts(covered, kind),
    ]


def _choose_summary(untrained: _Untrained) -> Sentence:
    """Return the sentence for the differing tensors: buffers, frozen parameters, or either."""
    if not untrained.are_parameters:
        return Text.BUFFERS
    return Text.UNTRAINED if untrained.may_be_buffers else Text.FROZEN


def _list_alternatives(untrained: _Untrained) -> tuple[str, ...]:
    """Return the codes of other causes that fit as well, at most three."""
    may_be_buffers = untrained.may_be_buffers or not untrained.are_parameters
    are_ids_unknown = untrained.reason.code is Text.IDS_ONLY
    fits = {
        # Something updates copies, although no optimizer trains them.
        "SYN219": untrained.copies,
        # A single step does not show whether buffers depend on each rank's data.
        "SYN205": may_be_buffers and untrained.is_single_step,
        "SYN210": are_ids_unknown,
        "SYN220": are_ids_unknown,
    }
    return select_codes(fits)[:3]


def _reason_for_buffers(case: Case) -> Message | None:
    """State that all parameters agree; None if they do not."""
    if not case.agrees("parameter"):
        return None
    return Text.PARAMETERS_AGREE(count=case.compared("parameter"))


def _reason_for_frozen(case: Case, differing: Collection[str]) -> Message | None:
    """State why the differing parameters are not trained; None if they may be."""
    count = len(differing)
    if case.frozen.issuperset(differing):
        return Text.FROZEN_BY_METADATA(count=count)
    if case.group.evidence.metadata.optimizer_sharded:
        return None
    if case.optimized is None:
        return _reason_by_number(case, count)
    if not case.untrained.issuperset(differing):
        return None
    return Text.NO_STATE(count=count, others=len(case.optimized))


def _reason_by_number(case: Case, count: int) -> Message | None:
    """State that the optimizer has too few states for all parameters, if it has ids instead of names."""
    states = case.state_owners()
    total = len(case.names_of("parameter"))
    if not states or not are_numbered(states):
        return None
    # Other parameters are enough for all states.
    are_enough = len(states) + count <= total
    if not are_enough:
        return None
    return Text.IDS_ONLY(states=len(states), total=total)
