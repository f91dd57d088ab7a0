"""The loss scalers of the ranks are in different states.

Signature: the scale of the gradient scaler, or its count of steps without overflow, is not equal on all ranks. If the
scale differs, so do parameters and optimizer state, and the optimizer's step counters may lag by the skipped steps. If
only the count differs, the finding covers nothing else.

Cause: a rank found an overflow in its own gradients or shards, skipped the step and halved its scale. From then on,
gradients with different scales are averaged, and each rank divides them by its own scale. Plain DDP averages before the
scaler checks for overflow, so its scalers stay equal. They diverge with unreduced gradients, sharded optimizers, `join`
with uneven inputs, different values of `init_scale`, or a scaler restored on some ranks only.

Fix: reduce the scaler's `found_inf` over the ranks, as ShardedGradScaler does; use the same scale on all ranks; or use
bfloat16, which needs no scaler.

Incidents: pytorch/pytorch#136009, pytorch/pytorch#90057 (join, uneven inputs), NVIDIA-NeMo/Megatron-Bridge#5591 (scales
4 and 8); facebookresearch/fairscale#181 (`found_inf` has to be reduced if the optimizer is sharded).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match, evidence_of, limit_facts
from syncheck.diagnose.counters import (
    below_highest,
    counters_of,
    farthest,
    find_minority,
    names_of_values,
    scales_of,
    steps_by_rank,
    trackers,
)
from syncheck.diagnose.history import suspects
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.records import TensorDiff

CODE = "SYN216"
SLUG = "grad-scaler-diverged"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = (
        "The loss scalers of the ranks are in different states: a rank found an overflow of its own, or was given "
        "another scale."
    )
    FIX = (
        "Before scaler.step(optimizer) and after `scaler.unscale_(optimizer)`, share overflows with all ranks: for "
        "`found_inf` in `scaler._found_inf_per_device(optimizer).values()`: `dist.all_reduce(found_inf, "
        "op=dist.ReduceOp.MAX)`. Or use `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`, which does "
        "this, or train in bfloat16 without a scaler. Then restart from a checkpoint in which the ranks agree."
    )
    SCALES_DIFFER = "The loss scales differ by a factor of {ratio:number}"
    ZERO_SCALE = "The loss scales differ, and some are 0"
    STATES_DIFFER = "The states of the loss scalers differ, but no difference of the scale is known"
    VALUE = "{name:name} is {values:by_rank}"
    VALUE_UNKNOWN = "{name:name} differs"
    MORE = "and {count} more"
    OVERFLOW = "the optimizer counted different steps, because an overflow skips a step: {steps:by_rank}"


_MOST = 3  # listed values


def apply(case: Case) -> Match | None:
    """Match a loss scaler whose state differs; if the scale differs, cover all trained tensors."""
    # Other modules may be named scaler too; the state of a loss scaler consists of single numbers.
    values, own = trackers(case), tuple(diff for diff in case.of_kind("scaler") if diff.numel == 1)
    if not values and not own:
        return None
    scales = scales_of(case.group)
    moved = _trained_tensors(case) if scales else ()
    by_name = {value.name: value.by_rank for value in case.group.values if value.name in values}
    facts = [_summary(scales), *_value_facts(by_name, own)]
    counters = counters_of(case) if moved else ()
    if most := farthest(counters):
        facts.append(Text.OVERFLOW(steps=steps_by_rank(most)))
    facts += case.parameter_facts(moved)
    ranks = _suspects(case, scales, by_name, own)
    return Match((*own, *moved), ranks, facts, (*values, *names_of_values(counters)))


def _summary(scales: Mapping[int, float]) -> Message:
    if not scales:
        return Text.STATES_DIFFER()
    least, most = min(scales.values()), max(scales.values())
    return Text.SCALES_DIFFER(ratio=most / least) if least > 0 else Text.ZERO_SCALE()


def _value_facts(by_name: Mapping[str, Mapping[int, object]], own: tuple[TensorDiff, ...]) -> list[Message]:
    names = sorted(by_name, key=lambda name: (not name.endswith("scale"), name))
    facts = [Text.VALUE(name=name, values=dict(by_name[name])) for name in names]
    for diff in own:
        values = dict(evidence_of(diff).values)
        facts.append(Text.VALUE(name=diff.name, values=values) if values else Text.VALUE_UNKNOWN(name=diff.name))
    return limit_facts(facts, _MOST, Text.MORE)


def _trained_tensors(case: Case) -> tuple[TensorDiff, ...]:
    """Return all trained tensors, which different scales affect; empty if only a few parameters differ."""
    frozen = case.frozen
    parameters = [diff for diff in case.of_kind("parameter") if diff.name not in frozen]
    if 2 * len(parameters) < case.compared("parameter") - len(frozen):
        return ()
    statistics = BN_STATISTICS if case.agrees("bn_count") else ()
    return (*parameters, *case.of_kind("optimizer", "optimizer_step", "ema", *statistics))


def _suspects(
    case: Case,
    scales: Mapping[int, float],
    by_name: Mapping[str, Mapping[int, object]],
    own: tuple[TensorDiff, ...],
) -> tuple[int, ...]:
    """Return the ranks outside the majority; without a majority the ranks with a reduced scale, if known."""
    for by_rank in (scales, *by_name.values()):
        if odd := find_minority(by_rank):
            return odd
    lowest = set(below_highest(scales))
    behind = {rank for counter in counters_of(case) for rank in counter.behind}
    trackers_by_rank = [v for name, v in by_name.items() if name.endswith("_growth_tracker") and None not in v.values()]
    recent = {rank for v in trackers_by_rank for rank in below_highest({r: _number(n) for r, n in v.items()})}
    if lowest and lowest in (behind, recent):
        return tuple(lowest)
    return suspects(own, case.group)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.inf
