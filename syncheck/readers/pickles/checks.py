"""Checks of the untrusted values in a pickle."""

from __future__ import annotations

import pickle
from typing import Any

from syncheck.snapshots import MOST_ELEMENTS
from syncheck.text import brief


def require(condition: bool, problem: str, *values: Any) -> None:
    """Raise UnpicklingError unless a condition holds.

    problem: the text of the error, with `{}` for each value.
    values: are formatted only for the error, because a large file has many checks.
    """
    if condition:
        return

    if values:
        problem = problem.format(*[brief(value) for value in values])
    raise pickle.UnpicklingError(problem)


def is_count(value: Any) -> bool:
    """Whether a value is valid as an offset or a number of elements."""
    return type(value) is int and 0 <= value <= MOST_ELEMENTS
