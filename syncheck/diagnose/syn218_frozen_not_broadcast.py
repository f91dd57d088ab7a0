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
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.diagnose.history import last_agreement
from syncheck.diagnose.measures import is_share_below
from syncheck.diagnose.sentences import is_sharded
from syncheck.diagnose.statements import follower_facts, largest_difference
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS, OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Collection

    from syncheck.diagnose.case import Case, Match

CODE = "SYN218"
SLUG = "frozen-not-broadcast"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence):
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


def apply(case: Case) -> Match | None:
    """Match frozen parameters if nothing else is unexplained, or plain buffers if all parameters agree."""
    frozen = {diff.name: diff for diff in case.differing("parameter")}
    kinds = ("parameter",) if frozen else ("buffer",)
    differing = tuple(frozen.values()) or case.differing("buffer")
    if not differing or not case.in_step() or not case.agrees("optimizer") or case.differing_moments():
        return None
    trend, since = case.trend_facts(*kinds)
    if is_share_below(differing, WHOLE) or trend not in (None, "constant"):
        return None
    reason = _reason_for_frozen(case, frozen) if frozen else Text.PARAMETERS_AGREE(count=case.compared("parameter"))
    if reason is None or not (frozen or case.agrees("parameter")):
        return None
    sentence = Text.UNTRAINED if case.loose & frozen.keys() else Text.FROZEN
    # Running statistics behind a layer with different weights differ, as they do without SyncBatchNorm.
    covered = (*differing, *(case.of_kind(*BN_STATISTICS, "buffer") if frozen else ()))
    names = tuple(diff.name for diff in differing)
    copies = tuple(name for name in names if _COPY.search(name))
    agreed = last_agreement(names, case.steps())
    facts = [
        (sentence if frozen else Text.BUFFERS)(count=len(differing), names=names, size=largest_difference(differing)),
        reason,
        *since,
        *(() if agreed is None else (Text.AGREED(count=len(differing), step=agreed),)),
        *((Text.COPIES(count=len(copies), names=copies),) if copies else ()),
        *((Text.ONE_STEP(),) if not frozen and trend is None and agreed is None else ()),
        *follower_facts(covered, *kinds),
    ]
    match = case.make_match(differing, facts, covered)
    if agreed is not None:
        fix = None if is_sharded(case.group) else Text.FIX_CHANGED
        match = replace(match, cause=Text.CAUSE_CHANGED, fix=fix)
    alternatives: tuple[str, ...] = ("SYN219",) if copies else ()
    if trend is None and agreed is None and (not frozen or sentence is Text.UNTRAINED):
        alternatives += ("SYN205",)
    if reason.code is Text.IDS_ONLY:
        alternatives += ("SYN210", "SYN220")
    return replace(match, certainty="consistent", alternatives=alternatives[:3]) if alternatives else match


def _reason_for_frozen(case: Case, differing: Collection[str]) -> Message | None:
    """State why the differing parameters are not trained; None if they may be."""
    optimized, count = case.optimized, len(differing)
    if set(differing) <= case.frozen:
        return Text.FROZEN_BY_METADATA(count=count)
    if case.group.evidence.metadata.optimizer_sharded:
        return None
    if optimized is not None:
        return Text.NO_STATE(count=count, others=len(optimized)) if set(differing) <= case.untrained else None
    states = frozenset(
        case.owner_of(name)
        for name, kind in case.group.evidence.names.items()
        if kind in OPTIMIZER and ".param_groups." not in name
    )
    everything = case.names_of("parameter")
    if states and all(name.isdigit() for name in states) and len(states) + count <= len(everything):
        return Text.IDS_ONLY(states=len(states), total=len(everything))
    return None
