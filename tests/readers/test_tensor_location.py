"""Locations of tensors, and views that repeat their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import syncheck
from syncheck.messages import Detail, Refusal
from syncheck.records import Reason

if TYPE_CHECKING:
    from pathlib import Path

torch = pytest.importorskip("torch")


def test_a_huge_view_is_refused(tmp_path: Path) -> None:
    """A number expanded to 400 GB, minutes of reading, is counted and not compared; a small view is read."""
    for rank in range(2):
        torch.save(
            {"huge": torch.zeros(1).expand(10**11), "small": torch.ones(1).expand(100), "w": torch.ones(1)},
            tmp_path / f"rank{rank}.pth",
        )
    (group,) = syncheck.compare(tmp_path).groups
    (diff,) = group.tensors
    assert (group.counts.identical, diff.name, diff.reason, diff.shape) == (2, "huge", Reason.REFUSED, (10**11,))
    assert diff.detail == Detail.REFUSED(refusal=Refusal.HUGE_VIEW(stored=4, shown=4 * 10**11))
