"""Only frozen parameters or plain buffers differ: nothing synchronized them, and nothing updates them.

Signature: all differing parameters are frozen, either by the metadata, or because the optimizer holds state of other
parameters only. Or no parameter differs, but plain buffers do. All trained parameters and the optimizer state agree.
Over several steps the difference is constant. A buffer whose difference changes is updated from each rank's own data,
and is not part of this finding.

If the optimizer's ids have no names, as in a plain `torch.save` of a model with frozen parts, the differing parameters
and the optimizer's states together may not outnumber all parameters.

Cause: DDP broadcasts the parameters and buffers of rank 0 when it wraps a model. Tensors outside the wrapper (a module
without trainable parameters is often left out), tensors filled by `to_empty` or a random initializer after wrapping,
and buffers with `broadcast_buffers=False` keep each rank's own values. Gradients are then averaged through different
layers.

Fix: after building the model, broadcast the tensors outside the wrapper: `torch.distributed.broadcast(tensor, 0)` for
each frozen parameter and buffer. Or build the model with the same seed, or load it, on every rank.

Incidents: speechbrain/speechbrain#2814, pytorch/pytorch#111138 (buffers, because `broadcast_buffers=False` also skips
the initial broadcast), pytorch/pytorch#178569, pytorch/pytorch#108331 (uninitialized buffers on other nodes).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match, follower_facts, is_share_below, largest_difference
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS, OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Collection


CODE = "SYN218"
SLUG = "frozen-not-broadcast"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "Frozen parameters or buffers had different initial values, and nothing broadcasts or updates them."
    FIX = (
        "Broadcast the tensors outside the wrapper before training: "
        "for t in [*model.parameters(), *model.buffers()]: torch.distributed.broadcast(t.data, 0). Or load them, or "
        "build them from the same seed, on every rank."
    )
    FIX_SHARDED = (
        "fully_shard broadcasts nothing. Load frozen parameters and buffers, or build them from the same seed, on "
        "every rank. To make the replicas equal: for p in model.parameters(): "
        "dist.broadcast(p.to_local(), group=mesh['replicate'].get_group(), group_src=0)."
    )
    FROZEN = "{count:count frozen parameter} {count:verb was|were} never synchronized ({names:names}), {size}"
    UNTRAINED = "{count:count untrained tensor} {count:verb was|were} never synchronized ({names:names}), {size}"
    BUFFERS = "{count:count plain buffer} {count:verb was|were} not synchronized ({names:names}), {size}"
    FROZEN_BY_METADATA = "the metadata lists {count:verb it|them} as frozen, and all other parameters agree"
    NO_STATE = (
        "the optimizer holds no state of {count:verb it|them}, and its {others:count other parameter} "
        "{others:verb agrees|agree}"
    )
    IDS_ONLY = (
        "consistent with frozen parameters or buffers, or with overwritten trained parameters: the optimizer "
        "holds state of {states} of {total:count parameter}, but their names are unknown"
    )
    PARAMETERS_AGREE = "all {count:count parameter} agree"
    ONE_STEP = "a single step does not show whether they started unequal or depend on each rank's data"


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
    facts = [
        (sentence if frozen else Text.BUFFERS)(
            count=len(differing), names=tuple(diff.name for diff in differing), size=largest_difference(differing)
        ),
        reason,
        *since,
        *((Text.ONE_STEP(),) if not frozen and trend is None else ()),
        *follower_facts(covered, *kinds),
    ]
    match = case.make_match(differing, facts, covered)
    if reason.code is Text.IDS_ONLY:
        return replace(match, certainty="consistent", alternatives=("SYN210", "SYN220"))
    return match


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
