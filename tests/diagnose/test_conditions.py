"""Conditions of rules: preconditions, optional facts, and the codes of other causes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from syncheck.diagnose.case import Match
from syncheck.diagnose.conditions import doubt, requires, select_codes, state_if
from syncheck.diagnose.statements import Common

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.diagnose.case import Case

MATCH = Match((), (0,), ())


@pytest.mark.parametrize(
    ("answers", "checked", "match"),
    [([True, True], 2, MATCH), ([True, False], 2, None), ([False, True], 1, None), ([], 0, MATCH)],
)
def test_rule_applies_only_if_all_conditions_hold(answers: list[bool], checked: int, match: Match | None) -> None:
    """The conditions are checked in their order, and none after the first that fails."""
    cases: list[Case] = []

    def make_condition(answer: bool) -> Callable[[Case], object]:
        def is_met(case: Case) -> bool:
            cases.append(case)
            return answer

        return is_met

    @requires(*map(make_condition, answers))
    def apply(case: Case) -> Match | None:
        """Match every case."""
        return MATCH

    case: Any = object()
    assert apply(case) is match
    assert cases == [case] * checked
    assert apply.__doc__ == "Match every case."


def test_facts_are_stated_only_if_the_condition_holds() -> None:
    """Any true value is a condition, such as a list of tensors or their number."""
    facts = (Common.NO_MAJORITY(), Common.NOT_FINITE())
    assert state_if(1, *facts) == facts
    assert state_if([0], *facts) == facts
    assert state_if((), *facts) == state_if(None, *facts) == ()


def test_codes_of_causes_that_fit_keep_their_order() -> None:
    """The first code is the most likely cause."""
    fits = {"SYN215": True, "SYN225": [], "SYN106": "text", "SYN101": None}
    assert select_codes(fits) == ("SYN215", "SYN106")


def test_other_causes_make_a_match_consistent() -> None:
    """Without other causes, the rule decides the certainty."""
    doubtful = doubt(MATCH, ("SYN205", "SYN219"))
    assert (doubtful.certainty, doubtful.alternatives) == ("consistent", ("SYN205", "SYN219"))
    assert doubt(MATCH, ()) is MATCH
