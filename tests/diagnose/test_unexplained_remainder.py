"""What a finding leaves unexplained: the differences within sets of ranks that its cause does not set apart."""

from __future__ import annotations

import pytest
from support.cases import diff

from syncheck.diagnose.remainder import find_unexplained_tensors

WEIGHT = diff("fc.weight", "parameter", ((0, 1), (2,)), max_abs=1.0, minority=(2,))


def test_a_set_of_all_ranks_leaves_the_whole_difference() -> None:
    """The remainder is the difference itself, with its size: it was measured over these ranks."""
    assert find_unexplained_tensors((WEIGHT,), (WEIGHT,), ((0, 1, 2),)) == (WEIGHT,)


def test_a_set_of_some_ranks_leaves_a_difference_of_unknown_size() -> None:
    """The remainder has the ranks of the set that differ, and no size."""
    (remainder,) = find_unexplained_tensors((WEIGHT,), (WEIGHT,), ((1, 2),))
    assert (remainder.clusters, remainder.replica_groups) == (((1,), (2,)), ((1, 2),))
    assert (remainder.max_abs, remainder.minority) == (None, ())


@pytest.mark.parametrize("agree", [(), ((0, 1),), ((0, 1), (2,))])
def test_sets_of_equal_ranks_leave_nothing(agree: tuple[tuple[int, ...], ...]) -> None:
    """A set whose ranks agree has no remainder; neither has a finding without sets."""
    assert find_unexplained_tensors((WEIGHT,), (WEIGHT,), agree) == ()
