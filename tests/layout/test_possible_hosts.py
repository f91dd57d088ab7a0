"""Folders with equal local ranks: hosts of one run, or runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import save_pth

import syncheck
from syncheck.messages import Grouping
from syncheck.report.words import omission_lines

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("name", "is_stated"), [("local_rank_{}.pt", True), ("m-localrank{}.pth", True), ("rank_{}.pt", False)]
)
def test_folders_with_equal_local_ranks(name: str, is_stated: bool, tmp_path: Path) -> None:
    """Each folder is compared alone, and one line states that they may be hosts; global ranks may not repeat."""
    for value, host in enumerate(("dgx-a", "dgx-b")):
        for rank in range(2):
            save_pth(tmp_path / host / name.format(rank), {"w": np.full(3, value, np.float32)})
    report = syncheck.compare(tmp_path)
    assert [group.verdict for group in report.groups] == ["in_sync", "in_sync"]
    for group in report.groups:
        assert (Grouping.PERHAPS_HOSTS() in group.grouping) == is_stated
    assert len(omission_lines(report)) == is_stated
    # As advised.
    assert syncheck.compare(tmp_path, options=syncheck.Options(group_by="")).verdict == "out_of_sync"


def test_one_host_has_each_local_rank_once(tmp_path: Path) -> None:
    """The steps of one host are no hosts."""
    for step in (1, 2):
        for rank in range(2):
            save_pth(tmp_path / f"step_{step}" / f"local_rank_{rank}.pt", {"w": np.ones(3, np.float32)})
    assert omission_lines(syncheck.compare(tmp_path)) == []
