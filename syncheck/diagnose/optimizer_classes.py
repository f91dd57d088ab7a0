"""Optimizers of different classes on the ranks, with different options and states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.tensors.group_options import have_other_classes

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case


def has_other_classes(case: Case) -> bool:
    """Whether the optimizers of the ranks are of different classes, by the options of their parameter groups."""
    return have_other_classes(case.group.values)


def has_one_class(case: Case) -> bool:
    """Whether the optimizers may have equal states: no optimizer is of another class."""
    return not has_other_classes(case)
