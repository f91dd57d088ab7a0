"""Periodic saves that fail: rank 0 reports each failure, the run continues, and earlier files stay."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import list_files
from support.resumed import TINY, resume
from support.scenarios import load

from train.engine import train
from train.recorders.base import Recorder
from train.resume import state_path, states_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.testing import Rank
    from train.launch import RankContext


class Disk:
    """Replaces os.fsync, and fails while the disk is full."""

    def __init__(self, fsync: Callable[[int], None]) -> None:
        self.fsync = fsync
        self.full = False

    def __call__(self, descriptor: int) -> None:
        """Write to the disk, or raise OSError if the disk is full."""
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.fsync(descriptor)


class DiskFiller(Recorder):
    """Fills the disk after one step, and frees space after another."""

    def __init__(self, disk: Disk, full: int, free: int) -> None:
        self.disk, self.changes = disk, {full: True, free: False}

    def step(self, step: int, *_: object) -> None:
        """Fill or free the disk."""
        self.disk.full = self.changes.get(step, self.disk.full)


@pytest.mark.syncheck(ranks=2)
def test_a_temporarily_full_disk(
    ctx: RankContext, syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If rank 1 cannot save steps 3 and 4, no rank leaves a file of these steps, and later saves are complete."""
    disk = Disk(os.fsync)
    monkeypatch.setattr("train.checkpoints.checkpoint_files.os.fsync", disk)
    settings = replace(TINY, save_every=1, out=syncheck_rank.shared / "out")
    result = train(settings, ctx, DiskFiller(disk, 2, 4) if ctx.rank == 1 else Recorder())
    path = state_path(states_folder(settings.out, settings.run), 4, 1)
    assert result.failed.startswith("4 of 16 ")
    assert result.failed.endswith(f"step 4 is not saved: rank 1: cannot write {path}: No space left on device")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (4 if ctx.rank == 0 else 0)
    syncheck_rank.barrier()
    steps = list_files(settings.out / "history" / "ddp")
    assert steps == [f"step_{step}" for step in (1, 2, 5, 6, 7, 8)]
    for path in settings.out.glob("history/ddp/*/*"):
        assert load(path)["step"] == int(path.parent.name.removeprefix("step_"))
    assert not list(settings.out.rglob("*.tmp"))
    assert len(list(settings.out.glob("ddp_rank?.pth"))) == 2


@pytest.mark.syncheck(ranks=2)
def test_a_full_disk_keeps_states(ctx: RankContext, syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk stays full, the last complete states remain, and the run can be resumed from them."""
    disk = Disk(os.fsync)
    monkeypatch.setattr("train.checkpoints.checkpoint_files.os.fsync", disk)
    settings = replace(TINY, save_per_rank=False, out=syncheck_rank.shared / "out")
    result = train(settings, ctx, DiskFiller(disk, 3, 8) if ctx.rank == 0 else Recorder())
    assert result.failed.startswith("5 of 8 ")
    folder = states_folder(settings.out, settings.run)
    syncheck_rank.barrier()
    assert list_files(folder) == ["step_2", "step_3"]
    assert load(state_path(folder, 3, ctx.rank))["step"] == 3
    _, notes = resume(ctx, settings)
    assert notes.steps == [4, 5, 6, 7, 8]


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
def test_a_slow_rank_reports_the_full_disk(
    ctx: RankContext, syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank reports the full disk even if it opens its file after the other rank has removed its own file."""
    disk, mkdir = Disk(os.fsync), Path.mkdir

    def slow(path: Path, *args: Any, **kwargs: Any) -> None:
        mkdir(path, *args, **kwargs)
        if disk.full and ctx.rank == 0:
            time.sleep(0.5)

    monkeypatch.setattr("train.checkpoints.checkpoint_files.os.fsync", disk)
    monkeypatch.setattr(Path, "mkdir", slow)
    settings = replace(TINY, save_every=1, max_steps=3, out=syncheck_rank.shared / "out")
    result = train(settings, ctx, DiskFiller(disk, 1, 2))
    assert result.failed.startswith("2 of 6 ")
    if ctx.rank == 0:
        lines = capsys.readouterr().err.splitlines()
        assert [line.count("No space left on device") for line in lines] == [1, 1]
    syncheck_rank.barrier()
    assert list_files(settings.out / ".resume" / "ddp") == ["step_1", "step_3"]


@pytest.mark.syncheck(ranks=2)
def test_a_folder_blocks_a_file_name(ctx: RankContext, syncheck_rank: Rank) -> None:
    """If a folder has the name of rank 1's file, rank 0 leaves no file of this step either."""
    settings = replace(TINY, checkpoint_every=None, save_every=3, out=syncheck_rank.shared)
    step = syncheck_rank.shared / "history" / "ddp" / "step_3"
    (step / "rank_1.pth").mkdir(parents=True, exist_ok=True)
    assert "rank_1.pth: Is a directory" in train(settings, ctx, Recorder()).failed
    assert list_files(step) == ["rank_1.pth"]
