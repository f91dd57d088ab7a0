"""Groups of a small network of which some tensors differ, for the tests of single rules."""

from __future__ import annotations

from typing import Any

from groups import make_group

from syncheck import diagnose
from syncheck.records import Counts, Evidence, Finding, Group, Replica, TensorDiff, ValueDiff

PARAMETERS = ("fc.weight", "fc.bias")


def sorted_out(by_rank: dict[int, Any]) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return clusters, largest first, and the minority, of what each rank holds."""
    sets: dict[Any, list[int]] = {}
    for rank, value in by_rank.items():
        sets.setdefault(value, []).append(rank)
    clusters = tuple(sorted((tuple(ranks) for ranks in sets.values()), key=len, reverse=True))
    if len(clusters) > 1 and len(clusters[0]) == len(clusters[1]):
        return clusters, ()
    return clusters, tuple(sorted(rank for ranks in clusters[1:] for rank in ranks))


def diff(name: str, kind: str, by_rank: dict[int, Any], **changes: Any) -> TensorDiff:
    """Return a tensor that differs as these values do."""
    clusters, minority = sorted_out(by_rank)
    fields: dict[str, Any] = {"mismatched": 4, "numel": 4, "max_abs": 0.5, "index": (1,), "extent": "all"}
    fields |= {"clusters": clusters, "minority": minority, "replica_groups": (tuple(by_rank),)}
    return TensorDiff(name, kind, "float32", (4,), "different", **fields | changes)


def counter(name: str, kind: str, counts: dict[int, float]) -> TensorDiff:
    """Return a tensor of one element that differs."""
    gap = max(counts.values()) - min(counts.values())
    return diff(name, kind, counts, mismatched=1, numel=1, max_abs=gap, evidence=Evidence(values=counts))


def group(
    *tensors: TensorDiff,
    ranks: int = 2,
    step: int | None = 100,
    bn: bool = True,
    extra: dict[str, str] | None = None,
    **fields: Any,
) -> Group:
    """Return a group of a small network with AdamW in which these tensors are not identical.

    extra: kinds of further tensors, identical, by name.
    """
    names = dict.fromkeys(PARAMETERS, "parameter")
    names |= {f"optimizer.{p}.{state}": "optimizer" for p in PARAMETERS for state in ("exp_avg", "exp_avg_sq")}
    names |= {f"optimizer.{p}.step": "optimizer_step" for p in PARAMETERS}
    if bn:
        names |= {"bn.running_mean": "bn_mean", "bn.running_var": "bn_var", "bn.num_batches_tracked": "bn_count"}
    names |= {found.name: found.kind for found in tensors} | (extra or {})
    kinds = {}
    for kind in set(names.values()):
        total = sum(of == kind for of in names.values())
        odd = [found for found in tensors if found.kind == kind]
        missing = sum(found.status == "not_compared" for found in odd)
        kinds[kind] = Counts(total, total - len(odd), different=len(odd) - missing, not_compared=missing)
    replicas = tuple(Replica(f"rank{i}.pth", i, "torch-zip", 52, 1000) for i in range(ranks))
    fields = {"stores_progress": True, "names": names} | fields
    total = sum(kinds.values(), Counts())
    return make_group("ddp", step, "undecided", replicas, total, tensors, kinds=kinds, **fields)


def trained(by_rank: dict[int, Any], *, counts: bool = True) -> tuple[TensorDiff, ...]:
    """Return all that an optimizer moves, apart; with counters these hold the values given."""
    found = [diff(name, "parameter", by_rank) for name in PARAMETERS]
    found += [
        diff(f"optimizer.{name}.{s}", "optimizer", by_rank) for name in PARAMETERS for s in ("exp_avg", "exp_avg_sq")
    ]
    if counts:
        found += [counter(f"optimizer.{name}.step", "optimizer_step", by_rank) for name in PARAMETERS]
    return tuple(found)


def scaler(scales: dict[int, float], good: dict[int, int] | None = None) -> tuple[ValueDiff, ...]:
    """Return what differs of a GradScaler."""
    values = [ValueDiff("scaler.scale", scales, counts=True, kind="scaler")] if len(set(scales.values())) > 1 else []
    return (*values, *([ValueDiff("scaler._growth_tracker", good, counts=True, kind="scaler")] if good else []))


def statistics(by_rank: dict[int, Any]) -> tuple[TensorDiff, ...]:
    """Return BatchNorm's running statistics, apart."""
    return diff("bn.running_mean", "bn_mean", by_rank), diff("bn.running_var", "bn_var", by_rank)


def found(case: Group, *earlier: Group) -> dict[str, Finding]:
    """Diagnose, and return the findings by code."""
    return {finding.code: finding for finding in diagnose.diagnose(case, (*earlier, case) if earlier else ())}


def only(case: Group, *earlier: Group) -> Finding:
    """Diagnose, and return the one finding, which covers everything that differs.

    Ranks that are no suspects may have running statistics of their own, which then have a finding of their own.
    """
    finding, *others = diagnose.diagnose(case, (*earlier, case) if earlier else ())
    assert {other.code for other in others} <= {"SYN201", "SYN202"}
    assert not any(set(other.ranks) & set(finding.ranks) for other in others)
    assert sorted(finding.tensors) == sorted(d.name for d in case.tensors)
    assert sorted(finding.values) == sorted(v.name for v in case.values if v.counts)
    return finding


def missing(ranks: tuple[int, ...], *names: str) -> tuple[TensorDiff, ...]:
    """Return optimizer state that only these ranks have."""
    fields: dict[str, Any] = {"reason": "missing", "clusters": (ranks,), "mismatched": None}
    return tuple(
        TensorDiff(
            n, "optimizer_step" if n.endswith("step") else "optimizer", "float32", (4,), "not_compared", **fields
        )
        for n in names
    )


STATE = tuple(f"optimizer.{p}.{s}" for p in PARAMETERS for s in ("exp_avg", "exp_avg_sq", "step"))
