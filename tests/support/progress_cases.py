"""Groups of a small network with AdamW whose ranks counted different numbers of steps."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from support import cases
from support.listings import list_fields
from syncheck.records import Evidence, TensorDiff, ValueDiff

if TYPE_CHECKING:
    from syncheck.records import Group

PARAMETERS = ("fc.weight", "fc.bias")
MOMENTS = tuple(f"optimizer.{name}.{state}" for name in PARAMETERS for state in ("exp_avg", "exp_avg_sq"))
STEPS = tuple(f"optimizer.{name}.step" for name in PARAMETERS)
STATE = tuple(f"optimizer.{name}.{state}" for name in PARAMETERS for state in ("exp_avg", "exp_avg_sq", "step"))
STATISTICS = {"bn.running_mean": "bn_mean", "bn.running_var": "bn_var", "bn.num_batches_tracked": "bn_count"}


def diff(name: str, kind: str, by_rank: dict[int, Any], **changes: Any) -> TensorDiff:
    """Return a TensorDiff between the ranks with different values. by_rank: one value per rank."""
    sets: dict[Any, list[int]] = {}
    for rank, value in by_rank.items():
        sets.setdefault(value, []).append(rank)
    clusters = tuple(sorted(map(tuple, sets.values()), key=len, reverse=True))
    return cases.diff(name, kind, clusters, **{"replica_groups": (tuple(by_rank),)} | changes)


def counter(name: str, kind: str, counts: dict[int, float]) -> TensorDiff:
    """Return a TensorDiff of one element with a value per rank."""
    size = max(counts.values()) - min(counts.values())
    return diff(name, kind, counts, mismatched=1, numel=1, max_abs=size, evidence=Evidence(values=counts))


def trained(by_rank: dict[int, Any], *, counts: bool = True) -> tuple[TensorDiff, ...]:
    """Return differing parameters and moments. counts: also return step counters with the values of by_rank."""
    tensors = [diff(name, "parameter", by_rank) for name in PARAMETERS]
    tensors += [diff(name, "optimizer", by_rank) for name in MOMENTS]
    return (*tensors, *(counter(name, "optimizer_step", by_rank) for name in STEPS if counts))


def statistics(by_rank: dict[int, Any]) -> tuple[TensorDiff, ...]:
    """Return differing running statistics of BatchNorm."""
    return diff("bn.running_mean", "bn_mean", by_rank), diff("bn.running_var", "bn_var", by_rank)


def batches(counts: dict[int, float]) -> TensorDiff:
    """Return differing batch counts of BatchNorm."""
    return counter("bn.num_batches_tracked", "bn_count", counts)


def missing(ranks: tuple[int, ...], *names: str) -> tuple[TensorDiff, ...]:
    """Return optimizer state that exists only on the given ranks."""
    fields: dict[str, Any] = {"reason": "missing", "clusters": (ranks,), "mismatched": None}
    kinds = {name: "optimizer_step" if name.endswith("step") else "optimizer" for name in names}
    return tuple(TensorDiff(name, kinds[name], "float32", (4,), "not_compared", **fields) for name in names)


def scaler(scales: dict[int, float], good: dict[int, int] | None = None) -> tuple[ValueDiff, ...]:
    """Return the differing values of a GradScaler. good: steps since the last overflow, by rank."""
    values = {"scaler.scale": scales if len(set(scales.values())) > 1 else None, "scaler._growth_tracker": good}
    return tuple(ValueDiff(name, by_rank, counts=True, kind="scaler") for name, by_rank in values.items() if by_rank)


def group(*tensors: TensorDiff, ranks: int = 2, bn: bool = True, extra: Any = None, **fields: Any) -> Group:
    """Return a group of the network at step 100. tensors: differing or uncompared tensors.

    extra: kinds of additional identical tensors by name.
    """
    names = dict.fromkeys(PARAMETERS, "parameter") | dict.fromkeys(MOMENTS, "optimizer")
    names |= dict.fromkeys(STEPS, "optimizer_step") | (STATISTICS if bn else {})
    names |= dict(list_fields(tensors, "name", "kind")) | (extra or {})
    fields = {"stores_progress": True, "names": names, "step": 100} | fields
    return cases.make_case(tensors, Counter(names.values()), ranks, **fields)
