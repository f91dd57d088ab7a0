"""How much of a run the last line says was watched: steps of optimizers, and reductions without a seen step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from syncheck.live.watching.extent import Extent, measure_extent


def make_layout(key: str, *parameters: int, sees_steps: bool = True) -> Any:
    """Return a layout of a clock with 20 reductions. key: begins with the name of the clock."""
    clock = SimpleNamespace(name=key.partition("/")[0], ticks=20)
    return SimpleNamespace(key=key, clock=clock, identities=parameters, sees_steps=sees_steps)


@pytest.mark.parametrize(
    ("counts", "layouts", "expected", "text"),
    [
        ({"a/0": 20}, [make_layout("a/0", 1, 2)], Extent(20, 1), "20 steps watched"),
        (
            {"a/0": 20, "b/0": 20},
            [make_layout("a/0", 1), make_layout("b/0", 2)],
            Extent(40, 2),
            "40 steps of 2 optimizers watched",
        ),
        # The script wraps the model again, with other frozen parameters, or replaces a layer.
        (
            {"a/0": 10, "b/0": 14},
            [make_layout("a/0", 1, 2), make_layout("b/0", 2, 3)],
            Extent(24, 1),
            "24 steps watched",
        ),
        # Two optimizers, and then one for all of their parameters.
        (
            {"a/0": 5, "a/1": 5, "a/2": 5},
            [make_layout("a/0", 1), make_layout("a/1", 2), make_layout("a/2", 1, 2)],
            Extent(15, 1),
            "15 steps watched",
        ),
        # Reductions before the first step of an optimizer.
        (
            {"a/reductions": 1, "a/0": 20},
            [make_layout("a/reductions", 1, sees_steps=False), make_layout("a/0", 1)],
            Extent(20, 1),
            "20 steps watched",
        ),
        # An optimizer that is not torch's.
        (
            {"a/reductions": 18},
            [make_layout("a/reductions", 1, sees_steps=False)],
            Extent(0, 0, 18, 20),
            "18 of 20 reductions watched",
        ),
        # An optimizer trains copies of the parameters.
        (
            {"a/reductions": 18, "steps/0": 20},
            [make_layout("a/reductions", 1, sees_steps=False), make_layout("steps/0", 2)],
            Extent(20, 1, 18, 20),
            "20 steps and 18 of 20 reductions watched",
        ),
    ],
    ids=["one", "two", "wrapped again", "joined", "warm-up", "own optimizer", "copies"],
)
def test_extent(counts: dict[str, int], layouts: list[Any], expected: Extent, text: str) -> None:
    """A step counts once, for one optimizer, whatever replaces its wrapper, its parameters or the optimizer."""
    extent = measure_extent(layouts, counts)
    assert extent == expected
    assert str(extent.describe(2)) == f"{text}, 2 checks of all replicas"
