"""Since when the tensors of a finding differ, which was first, and whether their gaps grow."""

from __future__ import annotations

from typing import Any

import pytest
from groups import make_group

from syncheck.evidence.history import difference_ratios, history_of, trend_of
from syncheck.records import Counts, Group, HistoryPoint, Replica, TensorDiff


def apart(name: str, gap: float | None, **changes: Any) -> TensorDiff:
    """Return a tensor on which rank 2 of three is apart by this gap."""
    fields: dict[str, Any] = {"clusters": ((0, 1), (2,)), "minority": (2,), "mismatched": 4, "numel": 4}
    return TensorDiff(
        name, changes.pop("kind", "parameter"), "float32", (4,), "different", max_abs=gap, **fields | changes
    )


def at(step: int | None, *diffs: TensorDiff) -> Group:
    """Return a run's group of three ranks at a step."""
    replicas = tuple(Replica(f"r{i}.pth", i, "torch-zip", 4, 100) for i in range(3))
    return make_group("ddp", step, "undecided", replicas, Counts(), diffs)


def test_the_first_step_and_what_was_apart_then() -> None:
    """Agreed until the step before; what was apart at the first step, in file order, with its suspects."""
    groups = [
        at(100),
        at(200, apart("other", 1.0)),
        at(300, apart("b", 0.5)),
        at(400, apart("a", 2.0), apart("b", 1.0)),
    ]
    history = history_of({"a", "b"}, groups)
    assert (history.agreed, history.since) == (200, 300)
    assert (history.tensors, history.ranks) == (("b",), (2,))
    assert history.points == (
        HistoryPoint(100, 0, 0.0),
        HistoryPoint(200, 0, 0.0),
        HistoryPoint(300, 1, 0.5),
        HistoryPoint(400, 2, 2.0),
    )
    assert history.trend == "growing"


def test_out_from_the_first_step_compared() -> None:
    """Where the tensors differ at the first step already, no step is named at which they agreed."""
    history = history_of({"a"}, [at(1, apart("a", 0.5)), at(2, apart("a", 0.5))])
    assert (history.agreed, history.since, history.trend) == (None, 1, "constant")


def test_no_history_without_steps() -> None:
    """One step, steps without a number, or tensors that never differed have no history."""
    assert history_of({"a"}, [at(1, apart("a", 0.5))]) is None
    assert history_of({"a"}, [at(None, apart("a", 0.5)), at(2, apart("a", 0.5))]) is None
    assert history_of({"a"}, [at(1, apart("b", 0.5)), at(2)]) is None


def test_a_gap_that_no_number_tells() -> None:
    """A step at which a tensor is missing, or compared by digest, has no largest gap; it counts as differing."""
    lacking = apart("a", None, mismatched=0)
    history = history_of({"a", "b"}, [at(1), at(2, lacking, apart("b", 0.5))])
    assert history.points[-1] == HistoryPoint(2, 2, None)
    assert history.trend is None


@pytest.mark.parametrize(
    ("factors", "trend"),
    [
        ((1.0, 1.0, 1.004), "constant"),
        ((0.9, 0.9, 0.901), "shrinking"),
        ((1.6, 2.0, 9.0), "growing"),
        ((0.5, 0.9, 1.2), "varying"),
        ((1.2, 1.2, 1.2), "varying"),
    ],
)
def test_trend(factors: tuple[float, ...], trend: str) -> None:
    """Equal gaps are constant, gaps that shrink by one factor shrink, and only what grows 1.5 times grows."""
    before = [apart(name, 0.25) for name in "abc"]
    after = [apart(name, 0.25 * factor) for name, factor in zip("abc", factors, strict=True)]
    assert trend_of([before, after]) == trend
    assert trend_of([after]) is None
    assert trend_of([[apart("x", 1.0)], after]) is None
    assert difference_ratios(before, after) == pytest.approx(factors)


def test_counters_are_no_gaps_of_weights() -> None:
    """Beside a weight that is 0.5 apart a counter that is 7 apart gives no gap; alone it does."""
    counter = apart("steps", 7.0, kind="optimizer_step")
    both = history_of({"a", "steps"}, [at(1), at(2, apart("a", 0.5), counter)])
    alone = history_of({"steps"}, [at(1), at(2, counter)])
    assert (both.points[-1].max_abs, alone.points[-1].max_abs) == (0.5, 7.0)


def test_statistics_tell_no_gap_of_weights() -> None:
    """Weights that keep their gap are constant, named first, and their gap is told, whatever the statistics do."""

    def step(number: int, factor: float) -> Group:
        statistics = [apart(f"bn{i}.running_mean", factor + i, kind="bn_mean") for i in range(3)]
        momentum = [apart(f"w{i}.momentum", factor * 3, kind="optimizer") for i in range(3)]
        return at(number, *statistics, apart("w", 0.5), *momentum)

    groups = [step(1, 1.0), step(2, 2.0)]
    history = history_of({diff.name for diff in groups[0].tensors}, groups)
    assert (history.trend, history.tensors[0], len(history.tensors)) == ("constant", "w", 4)
    assert [point.max_abs for point in history.points] == [0.5, 0.5]
    assert [point.differing for point in history.points] == [4, 4]


def test_gaps_of_all_steps_are_of_one_kind() -> None:
    """Where a moment alone is apart at first, and weights later, the curve is not of moments and then of weights."""
    momentum = apart("w.momentum", 3.0, kind="optimizer")
    groups = [at(1), at(2, momentum), at(3, momentum, apart("w", 0.5))]
    history = history_of({"w", "w.momentum"}, groups)
    assert [point.max_abs for point in history.points] == [0.0, 3.0, 3.0]
    assert history.trend == "constant"


def test_running_statistics_beside_weights_tell_nothing() -> None:
    """Statistics that were always apart do not say since when weights are; alone they say it of themselves."""
    drift = apart("bn.running_mean", 0.1, kind="bn_mean")
    groups = [at(100, drift), at(200, drift, apart("a", 0.5))]
    history = history_of({"a", "bn.running_mean"}, groups)
    assert (history.agreed, history.since, history.tensors) == (100, 200, ("a",))
    alone = history_of({"bn.running_mean"}, groups)
    assert alone.since == 100
