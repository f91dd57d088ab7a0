"""A real disk that is full, or cannot be written, in the middle of a run."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from disks import make_read_only, small_disk
from programs import TRAIN
from scenarios import load
from started import alive, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from programs import Programs

pytestmark = pytest.mark.slow

KIB = 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own of 2 MiB."""
    with small_disk(tmp_path / "disk", "2m") as disk:
        yield disk


def whole(folder: Path) -> list[str]:
    """Load every file of a history, and list the steps, each of which both ranks must have."""
    for path in folder.glob("step_*/*"):
        assert load(path)["step"] == int(path.parent.name.removeprefix("step_"))
    assert not list(folder.rglob(".*.tmp"))
    for step in folder.iterdir():
        assert sorted(path.name for path in step.iterdir()) == ["rank_0.pth", "rank_1.pth"]
    return sorted((step.name for step in folder.iterdir()), key=lambda name: int(name.removeprefix("step_")))


def test_full(programs: Programs, disk: Path) -> None:
    """When the disk is full no step is half there, every older file is whole, and the run says so with exit code 2."""
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
    steps = whole(disk / "ckpts" / "history" / "ddp")
    assert steps == [f"step_{step}" for step in range(1, len(steps) + 1)]
    assert len(steps) + len(warnings) == 40
    assert shutil.disk_usage(disk).used < 2048 * KIB


def test_read_only(programs: Programs, disk: Path) -> None:
    """A disk that becomes read-only costs the steps that were due then, which are counted, and nothing else."""
    arguments = ("--width", 4, "--max-steps", 400, "--save-every", 50, "--progress", "none", "--timeout", 30)
    process = programs.start(*TRAIN, "--spawn", 2, *arguments, "--out", disk / "ckpts")
    history = disk / "ckpts" / "history" / "ddp"
    wait_for(lambda: (history / "step_100" / "rank_1.pth").exists(), timeout=60)
    # Refused while a file is being written.
    wait_for(lambda: make_read_only(disk))
    run = programs.finish(process)
    assert not alive(process)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].endswith("Read-only file system")
    assert whole(history)[:2] == ["step_50", "step_100"]
    assert not list((disk / "ckpts").glob("ddp_rank*"))
