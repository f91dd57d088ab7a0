"""Groups of a small network with AdamW whose ranks counted different numbers of steps."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import cases

from syncheck.records import Evidence, TensorDiff, ValueDiff

if TYPE_CHECKING:
    from syncheck.records import Group

PARAMETERS = ("fc.weight", "fc.bias")
MOMENTS = tuple(f"optimizer.{name}.{state}" for name in PARAMETERS for state in ("exp_avg", "exp_avg_sq"))
STEPS = tuple(f"optimizer.{name}.step" for name in PARAMETERS)
STATE = tuple(f"optimizer.{name}.{state}" for name in PARAMETERS for state in ("exp_avg", "exp_avg_sq", "step"))
STATISTICS = {"bn.running_mean": "bn_mean", "bn.running_var": "bn_var", "bn.num_batches_tracked": "bn_count"}


def diff(name: str, kind: str, by_rank: dict[int, Any], **changes: Any) -> TensorDiff:
    """Return a tensor that differs between the ranks with different values."""
    sets: dict[Any, list[int]] = {}
    for rank, value in by_rank.items():
        sets.setdefault(value, []).append(rank)
    clusters = tuple(sorted(map(tuple, sets.values()), key=len, reverse=True))
    return cases.diff(name, kind, clusters, **{"replica_groups": (tuple(by_rank),)} | changes)


def counter(name: str, kind: str, counts: dict[int, float]) -> TensorDiff:
    """Return a tensor of one element with these values by rank."""
    size = max(counts.values()) - min(counts.values())
    return diff(name, kind, counts, mismatched=1, numel=1, max_abs=size, evidence=Evidence(values=counts))


def trained(by_rank: dict[int, Any], *, counts: bool = True) -> tuple[TensorDiff, ...]:
    """Return parameters and optimizer state that differ. counts: also the step counters, with these values."""
    tensors = [diff(name, "parameter", by_rank) for name in PARAMETERS]
    tensors += [diff(name, "optimizer", by_rank) for name in MOMENTS]
    return (*tensors, *(counter(name, "optimizer_step", by_rank) for name in STEPS if counts))


def statistics(by_rank: dict[int, Any]) -> tuple[TensorDiff, ...]:
    """Return BatchNorm's running statistics, with differences."""
    return diff("bn.running_mean", "bn_mean", by_rank), diff("bn.running_var", "bn_var", by_rank)


def batches(counts: dict[int, float]) -> TensorDiff:
    """Return BatchNorm's counts of batches."""
    return counter("bn.num_batches_tracked", "bn_count", counts)


def missing(ranks: tuple[int, ...], *names: str) -> tuple[TensorDiff, ...]:
    """Return optimizer state that only these ranks have."""
    fields: dict[str, Any] = {"reason": "missing", "clusters": (ranks,), "mismatched": None}
    kinds = {name: "optimizer_step" if name.endswith("step") else "optimizer" for name in names}
    return tuple(TensorDiff(name, kinds[name], "float32", (4,), "not_compared", **fields) for name in names)


def scaler(scales: dict[int, float], good: dict[int, int] | None = None) -> tuple[ValueDiff, ...]:
    """Return the values of a GradScaler that differ. good: numbers of steps since the last overflow."""
    values = {"scaler.scale": scales if len(set(scales.values())) > 1 else None, "scaler._growth_tracker": good}
    return tuple(ValueDiff(name, by_rank, counts=True, kind="scaler") for name, by_rank in values.items() if by_rank)


def group(*tensors: TensorDiff, ranks: int = 2, bn: bool = True, extra: Any = None, **fields: Any) -> Group:
    """Return a group of the network at step 100 in which these tensors differ or were not compared.

    extra: kinds of further identical tensors by name.
    """
    names = dict.fromkeys(PARAMETERS, "parameter") | dict.fromkeys(MOMENTS, "optimizer")
    names |= dict.fromkeys(STEPS, "optimizer_step") | (STATISTICS if bn else {})
    names |= {found.name: found.kind for found in tensors} | (extra or {})
    fields = {"stores_progress": True, "names": names, "step": 100} | fields
    return cases.make_case(tensors, Counter(names.values()), ranks, **fields)
