"""Optimizers of ranks that divide the parameters of one model, and optimizers that lack parameters by mistake."""

from __future__ import annotations

from typing import Any

import pytest

from syncheck.live.watching.divided import find_divided

BODY, HEAD = ("body.weight", "body.bias"), ("head.weight",)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        # ZeRO, with a rank that has no part, with two replicas of each part, and beside an optimizer of all ranks.
        ([[BODY], [HEAD]], {*BODY, *HEAD}),
        ([[BODY], [HEAD], []], {*BODY, *HEAD}),
        ([[BODY], [HEAD], [BODY], [HEAD]], {*BODY, *HEAD}),
        ([[BODY, ("a",)], [BODY, ("b",)]], {"a", "b"}),
        # A rank without the optimizer of the head, or with a group that lacks it.
        ([[BODY, HEAD], [BODY], [BODY, HEAD]], set()),
        ([[BODY + HEAD], [BODY], [BODY + HEAD]], set()),
        ([[BODY], [BODY]], set()),
        ([[], []], set()),
    ],
)
def test_parts_have_no_common_parameter(names: list[Any], expected: set[str]) -> None:
    """Ranks divide parameters if their sets are equal or apart."""
    assert find_divided(dict(enumerate(names))) == expected
