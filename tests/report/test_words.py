"""Sentences shared by several formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import save_pth
from dtensors import save_ranks

import syncheck
from syncheck.api import Options
from syncheck.messages import Undecided
from syncheck.records import TensorDiff
from syncheck.report import words

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.comparison.replica_groups import Sets


@pytest.mark.parametrize(
    "groups, clusters, text",
    [
        ((), ((0, 2, 3), (1,)), "0,2-3 | 1"),
        (((0, 1, 2, 3),), ((0, 2, 3), (1,)), "0,2-3 | 1"),
        (((0, 2), (1, 3)), ((0,), (2,), (1,), (3,)), "0 | 2; 1 | 3"),
        (((0, 2), (1, 3)), ((1,), (3,)), "1 | 3"),
        (((0, 2, 4), (1, 3, 5)), ((0, 4), (2,), (1, 3), (5,)), "0,4 | 2; 1,3 | 5"),
        ((tuple(range(6)),), tuple((rank,) for rank in range(6)), "0 | 1 | 2 | 3 | 2 more"),
        (
            tuple((rank, rank + 6) for rank in range(6)),
            tuple((at,) for rank in range(6) for at in (rank, rank + 6)),
            "0 | 6; 1 | 7; 2 | 8; 3 | 9; 2 more",
        ),
    ],
)
def test_clusters_of_ranks(groups: Sets, clusters: Sets, text: str) -> None:
    """Bars separate sets of ranks with equal bytes; semicolons separate replica groups."""
    diff = TensorDiff("w", "parameter", "float32", (2,), "different", replica_groups=groups, clusters=clusters)
    assert words.clusters_text(diff) == text


def test_reason_if_all_tensors_are_shards(tmp_path: Path) -> None:
    """If every rank holds its own shards, the reason of the verdict is shards and not options."""
    parts = {rank: np.full((4, 3), rank, np.float32) for rank in range(2)}
    save_ranks(tmp_path, parts, ["S(0)"], (2,))
    report = syncheck.compare(tmp_path)
    assert words.undecided_reason(report).code is Undecided.ONLY_SHARDS
    for rank in range(2):
        save_pth(tmp_path / "other" / f"rank{rank}.pth", {"w": parts[rank]})
    left_out = syncheck.compare(tmp_path / "other", options=Options(exclude=("*",)))
    assert words.undecided_reason(left_out) == Undecided.ALL_EXCLUDED(count=1)
