"""Every test of this folder also checks the preconditions of the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from syncheck.diagnose.rule import RuleModule

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.diagnose.rule import Rule


def select_and_check(module: RuleModule, case: Case) -> Rule | None:
    """Return the rule if its precondition holds; otherwise, assert that the rule does not match."""
    rule = module.load()
    if module.may_match(case):
        return rule
    assert rule.apply(case) is None, f"{module.name}: its precondition does not hold, but it matches"
    return None


@pytest.fixture(autouse=True)
def preconditions_are_necessary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that are not imported, because their precondition does not hold, would not match."""
    monkeypatch.setattr(RuleModule, "select", select_and_check)
