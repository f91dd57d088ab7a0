"""`reference=` in a comparison of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import syncheck
from syncheck.testing import compare

if TYPE_CHECKING:
    from syncheck.testing import Rank


@pytest.mark.syncheck(ranks=3)
def test_ranks_of_a_process_group(syncheck_rank: Rank) -> None:
    """All ranks have the same report against the chosen rank; an unknown rank is an error on all."""
    held = {"w": np.full(2, (0, 3, 4)[syncheck_rank.rank], np.float32)}
    (group,) = compare(held, reference=1).groups
    assert (group.tensors[0].max_abs, group.tensors[0].minority) == (3.0, (0, 2))
    with pytest.raises(syncheck.UsageError, match="reference=7: no replica has this rank or path"):
        compare(held, reference=7)


@pytest.mark.syncheck(ranks=3)
def test_a_reference_among_equal_ranks() -> None:
    """The last of three equal ranks is a valid reference; an unknown rank is an error even without differences."""
    report = compare({"w": np.ones(2, np.float32)}, reference=2)
    assert report.verdict == "in_sync"
    assert [replica.rank for replica in report.groups[0].replicas] == [0, 1, 2]
    with pytest.raises(syncheck.UsageError, match="reference=7: no replica has this rank or path"):
        compare({"w": np.ones(2, np.float32)}, reference=7)
