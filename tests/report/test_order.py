"""Order of the tensors in reports."""

from __future__ import annotations

from syncheck.records import TensorDiff
from syncheck.report.words import sort_worst_first


def diff(name: str, kind: str = "parameter", **changes: object) -> TensorDiff:
    """Return a tensor that differs."""
    fields = {"status": "different", "max_abs": 0.1, "nonfinite": {0: 0, 1: 0}} | changes
    return TensorDiff(name, kind, "float32", (4,), **fields)


def test_order_of_tensors() -> None:
    """NaN on one rank, then parameters by difference, running statistics, counters, and tensors not compared."""
    nan = diff("nan", max_abs=None, nonfinite={0: 0, 1: 1})
    infinite = diff("both", max_abs=0.2, nonfinite={0: 3, 1: 3})
    flipped = diff("flipped", "optimizer", max_abs=1e-9)
    mean = diff("mean", "bn_mean", max_abs=0.5)
    counter = diff("counter", "bn_count", max_abs=1.0)
    shard = diff("shard", status="not_compared", reason="sharded", max_abs=None)
    shown = [d.name for d in sort_worst_first([counter, mean, shard, flipped, infinite, nan])]
    assert shown == ["nan", "both", "flipped", "mean", "counter", "shard"]
