"""The history of a finding: first step, first tensors, and the trend of the differences."""

from __future__ import annotations

from typing import Any

import pytest
from support.groups import make_group
from support.listings import list_fields, list_names

from syncheck.diagnose.history import difference_ratios, history_of, trend_of
from syncheck.records import Counts, Group, HistoryPoint, Replica, TensorDiff


def make_diff(name: str, size: float | None, **changes: Any) -> TensorDiff:
    """Return a tensor in which rank 2 of three ranks differs by `size`."""
    fields: dict[str, Any] = {"clusters": ((0, 1), (2,)), "minority": (2,), "mismatched": 4, "numel": 4}
    return TensorDiff(
        name, changes.pop("kind", "parameter"), "float32", (4,), "different", max_abs=size, **fields | changes
    )


def make_step(step: int | None, *diffs: TensorDiff) -> Group:
    """Return a group of three ranks at one step of a run."""
    replicas = tuple(Replica(f"r{i}.pth", i, "torch-zip", 4, 100) for i in range(3))
    return make_group("ddp", step, "undecided", replicas, Counts(), diffs)


def test_first_step_with_a_difference() -> None:
    """The history has the last step of agreement, the first step with a difference, its tensors and its suspects."""
    groups = [
        make_step(100),
        make_step(200, make_diff("other", 1.0)),
        make_step(300, make_diff("b", 0.5)),
        make_step(400, make_diff("a", 2.0), make_diff("b", 1.0)),
    ]
    history = history_of({"a", "b"}, groups)
    assert (history.agreed, history.since) == (200, 300)
    assert (history.tensors, history.ranks) == (("b",), (2,))
    assert history.points == (
        HistoryPoint(100, 0, 0.0),
        HistoryPoint(200, 0, 0.0, others_differ=True),
        HistoryPoint(300, 1, 0.5),
        HistoryPoint(400, 2, 2.0),
    )
    assert history.trend == "growing"


def test_difference_at_the_first_step() -> None:
    """If the tensors differ at the first compared step, the history has no step of agreement."""
    history = history_of({"a"}, [make_step(1, make_diff("a", 0.5)), make_step(2, make_diff("a", 0.5))])
    assert (history.agreed, history.since, history.trend) == (None, 1, "constant")


def test_no_history_without_steps() -> None:
    """A single step, a step without a number, and tensors without differences have no history."""
    assert history_of({"a"}, [make_step(1, make_diff("a", 0.5))]) is None
    assert history_of({"a"}, [make_step(None, make_diff("a", 0.5)), make_step(2, make_diff("a", 0.5))]) is None
    assert history_of({"a"}, [make_step(1, make_diff("b", 0.5)), make_step(2)]) is None


def test_difference_of_unknown_size() -> None:
    """A step with a missing tensor or a comparison by digest counts as differing, but has no largest difference."""
    missing = make_diff("a", None, mismatched=0)
    history = history_of({"a", "b"}, [make_step(1), make_step(2, missing, make_diff("b", 0.5))])
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
    """Trends are constant, shrinking by one factor, growing at least 1.5 times, or varying."""
    before = [make_diff(name, 0.25) for name in "abc"]
    after = [make_diff(name, 0.25 * factor) for name, factor in zip("abc", factors, strict=True)]
    assert trend_of([before, after]) == trend
    assert trend_of([after]) is None
    assert trend_of([[make_diff("x", 1.0)], after]) is None
    assert difference_ratios(before, after) == pytest.approx(factors)


def test_counters_beside_weights() -> None:
    """A step counter alone sets the largest difference; beside a weight, the weight does."""
    counter = make_diff("steps", 7.0, kind="optimizer_step")
    both = history_of({"a", "steps"}, [make_step(1), make_step(2, make_diff("a", 0.5), counter)])
    alone = history_of({"steps"}, [make_step(1), make_step(2, counter)])
    assert (both.points[-1].max_abs, alone.points[-1].max_abs) == (0.5, 7.0)


def test_statistics_and_momentum_beside_weights() -> None:
    """Constant differences of weights set the trend, size and first tensor, whatever the statistics do."""

    def step(number: int, factor: float) -> Group:
        statistics = [make_diff(f"bn{i}.running_mean", factor + i, kind="bn_mean") for i in range(3)]
        momentum = [make_diff(f"w{i}.momentum", factor * 3, kind="optimizer") for i in range(3)]
        return make_step(number, *statistics, make_diff("w", 0.5), *momentum)

    groups = [step(1, 1.0), step(2, 2.0)]
    history = history_of(set(list_names(groups[0].tensors)), groups)
    assert (history.trend, history.tensors[0], len(history.tensors)) == ("constant", "w", 4)
    assert list_fields(history.points, "max_abs") == [0.5, 0.5]
    assert list_fields(history.points, "differing") == [4, 4]


def test_sizes_of_all_steps_have_one_kind() -> None:
    """If moments differ before weights, the points of all steps have the size of the moments."""
    momentum = make_diff("w.momentum", 3.0, kind="optimizer")
    groups = [make_step(1), make_step(2, momentum), make_step(3, momentum, make_diff("w", 0.5))]
    history = history_of({"w", "w.momentum"}, groups)
    assert list_fields(history.points, "max_abs") == [0.0, 3.0, 3.0]
    assert history.trend == "constant"


def test_first_step_of_statistics_beside_weights() -> None:
    """The first step of weights ignores running statistics; statistics alone have their own first step."""
    drift = make_diff("bn.running_mean", 0.1, kind="bn_mean")
    groups = [make_step(100, drift), make_step(200, drift, make_diff("a", 0.5))]
    history = history_of({"a", "bn.running_mean"}, groups)
    assert (history.agreed, history.since, history.tensors) == (100, 200, ("a",))
    alone = history_of({"bn.running_mean"}, groups)
    assert alone.since == 100


def test_first_step_beside_an_averaged_copy() -> None:
    """The statistics of an averaged copy differ from the start, and the weights since a later step."""
    copy = make_diff("ema.bn.running_mean", 0.1, kind="ema")
    drift = make_diff("bn.running_mean", 0.1, kind="bn_mean")
    groups = [make_step(20, copy, drift), make_step(60, copy, drift, make_diff("a", 0.5))]
    history = history_of({"a", "bn.running_mean", "ema.bn.running_mean"}, groups)
    assert (history.agreed, history.since, history.tensors) == (20, 60, ("a",))
    statistics = history_of({"bn.running_mean", "ema.bn.running_mean"}, groups)
    assert (statistics.since, statistics.tensors) == (20, ("bn.running_mean",))
