"""Parts of a rule that depend on a condition: its facts, the codes of other causes, and whether it applies at all."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from syncheck.diagnose.case import Case, Match
    from syncheck.messages import Message

    Apply = Callable[[Case], Match | None]


def requires(*conditions: Callable[[Case], object]) -> Callable[[Apply], Apply]:
    """Apply a rule only to cases that meet all conditions, in their order; without them, the rule does not match."""

    def decorate(apply: Apply) -> Apply:
        @wraps(apply)
        def apply_if_met(case: Case) -> Match | None:
            for is_met in conditions:
                if not is_met(case):
                    return None
            return apply(case)

        return apply_if_met

    return decorate


def state_if(condition: object, *facts: Message) -> tuple[Message, ...]:
    """Return the facts for the list of a match if the condition holds, else no fact."""
    if condition:
        return facts
    return ()


def select_codes(fits: Mapping[str, object]) -> tuple[str, ...]:
    """Return the codes of the causes that fit, in their order. fits: by code, whether the cause fits."""
    return tuple(code for code, does_fit in fits.items() if does_fit)


def doubt(match: Match, alternatives: Collection[str]) -> Match:
    """Return the match as consistent with other causes; unchanged if there are none.

    alternatives: the codes of the other causes.
    """
    if alternatives:
        return match.as_consistent(*alternatives)
    return match
