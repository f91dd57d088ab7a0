"""Runs on a real disk that becomes full or read-only."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from support.disks import make_read_only, small_disk
from support.listings import list_files
from support.programs import TRAIN
from support.scenarios import load
from support.started import alive, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.programs import Programs

pytestmark = pytest.mark.slow

KIB = 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a separate file system of 2 MiB."""
    with small_disk(tmp_path / "disk", "2m") as disk:
        yield disk


def list_complete_steps(folder: Path) -> list[str]:
    """Load every file of a history, and return the steps. Each step must have the files of both ranks."""
    for path in folder.glob("step_*/*"):
        assert load(path)["step"] == int(path.parent.name.removeprefix("step_"))
    assert not list(folder.rglob(".*.tmp"))
    for step in folder.iterdir():
        assert list_files(step) == ["rank_0.pth", "rank_1.pth"]
    return sorted(list_files(folder), key=lambda name: int(name.removeprefix("step_")))


def test_a_full_disk(programs: Programs, disk: Path) -> None:
    """On a full disk, no saved step is incomplete, a warning reports each missing step, and the exit code is 2."""
    arguments = ("--width", 8, "--max-steps", 40, "--save-every", 1, "--progress", "none", "--timeout", 30)
    process = programs.start(*TRAIN, "--spawn", 2, *arguments, "--out", disk / "ckpts")
    run = programs.finish(process)
    assert not alive(process)
    assert run.returncode == 2
    *warnings, last = run.stderr.splitlines()
    assert "cannot write" in last
    assert last.endswith("No space left on device")
    assert warnings
    for line in warnings:
        assert line.startswith("run.py: warning: step ")
        assert "No space left on device; " in line
    steps = list_complete_steps(disk / "ckpts" / "history" / "ddp")
    assert steps == [f"step_{step}" for step in range(1, len(steps) + 1)]
    assert len(steps) + len(warnings) == 40
    assert shutil.disk_usage(disk).used < 2048 * KIB


def test_a_read_only_disk(programs: Programs, disk: Path) -> None:
    """If the disk becomes read-only, earlier steps stay complete, and the run reports the error with exit code 2."""
    arguments = ("--width", 4, "--max-steps", 400, "--save-every", 50, "--progress", "none", "--timeout", 30)
    process = programs.start(*TRAIN, "--spawn", 2, *arguments, "--out", disk / "ckpts")
    history = disk / "ckpts" / "history" / "ddp"
    wait_for((history / "step_100" / "rank_1.pth").exists, timeout=60)
    # Retry, because the remount fails during a write.
    wait_for(make_read_only, disk)
    run = programs.finish(process)
    assert not alive(process)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].endswith("Read-only file system")
    assert list_complete_steps(history)[:2] == ["step_50", "step_100"]
    assert not list((disk / "ckpts").glob("ddp_rank*"))
