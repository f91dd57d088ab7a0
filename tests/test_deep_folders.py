"""Folders nested deeper than the system's path limit."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import numpy as np
from support.checkpoints import save_safetensors

import syncheck

if TYPE_CHECKING:
    from pathlib import Path


def test_an_unreachable_folder_is_reported(tmp_path: Path) -> None:
    """Paths above 4,096 characters cannot be opened: this is reported, and the verdict is not "in sync"."""
    for rank in range(2):
        save_safetensors(tmp_path / f"w_rank{rank}.safetensors", {"w": np.ones(2, np.float32)})
    assert syncheck.compare(tmp_path).verdict == "in_sync"
    first_folder = os.open(".", os.O_RDONLY)
    try:
        os.chdir(tmp_path)
        for _ in range(20):
            os.mkdir("d" * 250)
            os.chdir("d" * 250)
    finally:
        os.fchdir(first_folder)
        os.close(first_folder)
    report = syncheck.compare(tmp_path)
    assert report.verdict == "undecided"
    (unreadable,) = report.unreadable
    assert unreadable.reason.startswith("file name too long: could not list this folder")
    shutil.rmtree(tmp_path / ("d" * 250))
