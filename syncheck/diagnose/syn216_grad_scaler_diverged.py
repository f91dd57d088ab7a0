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
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires, state_if
from syncheck.diagnose.counters import counters_of, farthest, names_of_values, steps_by_rank
from syncheck.diagnose.features import select_numbers
from syncheck.diagnose.history import suspects
from syncheck.diagnose.loss_scales import find_scaler_values, scales_of
from syncheck.diagnose.measures import evidence_of
from syncheck.diagnose.rank_values import below_highest, find_minority
from syncheck.diagnose.selection import exclude_names, join_ranks
from syncheck.diagnose.statements import limit_facts
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.records import TensorDiff

CODE = "SYN216"
SLUG = "grad-scaler-diverged"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "The loss scalers of the ranks are in different states: a rank found an overflow of its own, or was given "
        "another scale."
    )
    FIX = (
        "Before `scaler.step(optimizer)` and after `scaler.unscale_(optimizer)`, share overflows with all ranks: for "
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


class _ScalerState(NamedTuple):
    """The state of a loss scaler that differs, as Python values and as tensors."""

    scales: Mapping[int, float]
    """The loss scale by rank; empty unless it differs."""
    values: Mapping[str, Mapping[int, object]]
    """The differing Python values, by name and rank."""
    tensors: tuple[TensorDiff, ...]


def _find_state(case: Case) -> _ScalerState:
    """Return the differing state of the loss scaler."""
    names = find_scaler_values(case)
    return _ScalerState(
        scales=scales_of(case.group),
        values={value.name: value.by_rank for value in case.group.values if value.name in names},
        # Other modules may be named scaler too; the state of a loss scaler consists of single numbers.
        tensors=tuple(select_numbers(case.of_kind("scaler"))),
    )


def _has_other_state(case: Case) -> bool:
    """Whether the state of the loss scaler differs."""
    state = _find_state(case)
    return bool(state.values or state.tensors)


@requires(_has_other_state)
def apply(case: Case) -> Match | None:
    """Match a loss scaler whose state differs; if the scale differs, cover all trained tensors."""
    state = _find_state(case)
    # A count of steps without overflow changes no gradient, unlike the scale.
    affected = _trained_tensors(case) if state.scales else ()
    counters = counters_of(case) if affected else ()
    largest = farthest(counters)
    steps = {} if largest is None else steps_by_rank(largest)
    facts = [
        _summarize(state.scales),
        *_value_facts(state),
        *state_if(steps, Text.OVERFLOW(steps=steps)),
        *case.parameter_facts(affected),
    ]
    return Match(
        tensors=(*state.tensors, *affected),
        ranks=_find_suspects(case, state),
        facts=facts,
        values=(*state.values, *names_of_values(counters)),
    )


def _summarize(scales: Mapping[int, float]) -> Message:
    """State by which factor the scales differ, if they are known."""
    if not scales:
        return Text.STATES_DIFFER()
    least, most = min(scales.values()), max(scales.values())
    if least > 0:
        return Text.SCALES_DIFFER(ratio=most / least)
    return Text.ZERO_SCALE()


def _value_facts(state: _ScalerState) -> list[Message]:
    """State the differing values by rank, the scale first."""
    facts = []
    for name in sorted(state.values, key=_value_order):
        facts.append(Text.VALUE(name=name, values=dict(state.values[name])))
    for diff in state.tensors:
        values = dict(evidence_of(diff).values)
        if values:
            facts.append(Text.VALUE(name=diff.name, values=values))
        else:
            facts.append(Text.VALUE_UNKNOWN(name=diff.name))
    return limit_facts(facts, _MOST, Text.MORE)


def _value_order(name: str) -> tuple[bool, str]:
    """Sort values by name, the scale first."""
    return not name.endswith("scale"), name


def _trained_tensors(case: Case) -> tuple[TensorDiff, ...]:
    """Return all trained tensors, which different scales affect; empty if only a few parameters differ."""
    frozen = case.frozen
    parameters = exclude_names(case.of_kind("parameter"), frozen)
    if 2 * len(parameters) < case.compared("parameter") - len(frozen):
        return ()
    # If the counts differ, the statistics have a cause of their own.
    statistics = BN_STATISTICS if case.agrees("bn_count") else ()
    return (*parameters, *case.of_kind("optimizer", "optimizer_step", "ema", *statistics))


def _find_suspects(case: Case, state: _ScalerState) -> tuple[int, ...]:
    """Return the ranks outside the majority; without a majority the ranks with a reduced scale, if known."""
    for by_rank in (state.scales, *state.values.values()):
        minority = find_minority(by_rank)
        if minority:
            return minority
    # A rank with an overflow halves its scale, skips the step, and counts anew.
    reduced = set(below_highest(state.scales))
    behind = join_ranks(counter.behind for counter in counters_of(case))
    if reduced and reduced in (behind, _ranks_after_overflow(state)):
        return tuple(reduced)
    return suspects(state.tensors, case.group)


def _ranks_after_overflow(state: _ScalerState) -> set[int]:
    """Return the ranks with fewer steps since the last overflow than another rank."""
    ranks: set[int] = set()
    for name, by_rank in state.values.items():
        is_complete = None not in by_rank.values()
        if name.endswith("_growth_tracker") and is_complete:
            counts = {rank: _as_number(value) for rank, value in by_rank.items()}
            ranks.update(below_highest(counts))
    return ranks


def _as_number(value: object) -> float:
    """Return the number; infinity for any other value."""
    if isinstance(value, (int, float)):
        return float(value)
    return math.inf
