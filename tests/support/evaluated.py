"""Checkpoints for the tests of the evaluation, and functions that change a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from support.scenarios import load
from support.started import ROOT
from train.evaluate.rank_scores import score_run
from train.evaluate.replicas import find_replicas

if TYPE_CHECKING:
    from collections.abc import Callable

    from train.evaluate.rank_scores import RunScores

FIXTURES = ROOT / "fixtures"
SYNCED = "ddp-syncbn_rank{}.pth"


def copy_synced(folder: Path) -> Path:
    """Copy the files of two ranks trained with SyncBatchNorm into the test's folder."""
    return Path(shutil.copytree(FIXTURES / "in_sync" / "sync_bn", folder / "ckpts"))


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Apply an edit to a checkpoint file, in place."""
    content = load(path)
    edit(content)
    torch.save(content, path)


def scores(*paths: Path) -> RunScores:
    """Evaluate the only run under the paths."""
    (replicas,), refused = find_replicas([str(path) for path in paths])
    assert refused == []
    return score_run(replicas, None)
