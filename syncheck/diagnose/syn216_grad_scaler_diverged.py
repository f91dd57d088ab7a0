"""The loss scalers of the ranks are not in the same state.

Signature: the scale of the gradient scaler, or its count of steps without an overflow, is not equal on all ranks. With
the scale, parameters and optimizer state differ; the optimizer's step counters may lag by the steps that were left out.
Where the scale is equal and only the count of good steps differs, nothing else is laid to the scaler.

Cause: a rank found an overflow in its own gradients or shards that the others did not see, left out the step and
halved its scale. From then on gradients of unlike scale are averaged, and each rank divides them by its own. Plain DDP
averages before the scaler looks, so that its scalers stay equal. They do not with gradients that are not averaged,
sharded optimizers, `join` with uneven inputs, unequal `init_scale`, or a scaler that was restored on some ranks only.

Fix: reduce the scaler's `found_inf` over the ranks (ShardedGradScaler does), give all ranks one scale, or use bfloat16,
which needs no scaler.

Incidents: pytorch/pytorch#136009, pytorch/pytorch#90057 (join, uneven inputs), NVIDIA-NeMo/Megatron-Bridge#5591 (scales
4 and 8); facebookresearch/fairscale#181 (`found_inf` has to be reduced where the optimizer is sharded).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, by_value_text, number_text, parameters_text
from syncheck.diagnose.counters import (
    counted_text,
    counters_of,
    farthest,
    minority_of,
    names_of_values,
    scales_of,
    trackers,
)
from syncheck.evidence.suspects import suspects
from syncheck.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, TensorDiff

CODE = "SYN216"
SLUG = "grad-scaler-diverged"
SEVERITY: Severity = "error"
CAUSE = "The ranks' loss scalers are not in one state: a rank found an overflow, or was given a scale, of its own."
FIX = (
    "Before scaler.step(optimizer), after scaler.unscale_(optimizer), let all ranks see an overflow: "
    "for found_inf in scaler._found_inf_per_device(optimizer).values(): "
    "dist.all_reduce(found_inf, op=dist.ReduceOp.MAX). "
    "Or take torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, which does this; or train in bfloat16 "
    "without a scaler."
)


def apply(case: Case) -> Match | None:
    """Fit a scaler whose state differs, and cover what is trained with it where the scale does."""
    # A module may be called scaler too; the state of a loss scaler is single numbers.
    values, own = trackers(case), tuple(diff for diff in case.of_kind("scaler") if diff.numel == 1)
    if not values and not own:
        return None
    scales = scales_of(case.group)
    moved = _moved(case) if scales else ()
    by_name = {value.name: value.by_rank for value in case.group.values if value.name in values}
    texts = [f"{name} is {by_value_text(by_rank)}" for name, by_rank in sorted(by_name.items(), key=_scale_first)]
    texts += [f"{diff.name} differs" + (f": {by_value_text(v)}" if (v := _read(diff)) else "") for diff in own]
    texts = texts[:3] + ([f"and {len(texts) - 3} more"] if len(texts) > 3 else [])
    if not scales:
        texts.append("the scale is not known to differ")
    elif min(scales.values()) > 0:
        texts.append(f"the scales are apart by a factor of {number_text(max(scales.values()) / min(scales.values()))}")
    counters = counters_of(case) if moved else ()
    if most := farthest(counters):
        texts.append(f"the optimizer counted {counted_text(most)}: an overflow leaves its step out")
    texts.append(parameters_text(case, [diff for diff in moved if diff.kind == "parameter"]))
    return Match(
        (*own, *moved),
        _suspects(case, scales, by_name, own),
        "; ".join(filter(None, texts)),
        (*values, *names_of_values(counters)),
    )


def _moved(case: Case) -> tuple[TensorDiff, ...]:
    """Return what unlike scales pull apart: everything that is trained. A few parameters are another matter."""
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
    """Return the ranks outside the majority; of two equal halves the one that backed off, if that shows."""
    for by_rank in (scales, *by_name.values()):
        if odd := minority_of(by_rank):
            return odd
    lowest = {rank for rank, scale in scales.items() if scale < max(scales.values())}
    behind = {rank for counter in counters_of(case) for rank in counter.behind}
    goods = [v for name, v in by_name.items() if name.endswith("_growth_tracker") and None not in v.values()]
    recent = {rank for v in goods for rank, good in v.items() if _number(good) < max(map(_number, v.values()))}
    if lowest and lowest in (behind, recent):
        return tuple(sorted(lowest))
    return suspects(own, case.group)


def _scale_first(item: tuple[str, object]) -> tuple[bool, str]:
    return not item[0].endswith("scale"), item[0]


def _read(diff: TensorDiff) -> Mapping[int, object]:
    return {} if diff.evidence is None else diff.evidence.values


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.inf
