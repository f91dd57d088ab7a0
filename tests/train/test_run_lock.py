"""The lock of --out: two live runs with one name, stale locks, and missing states."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.listings import list_files
from support.programs import TRAIN
from support.resumed import TINY, Notes, resume
from support.started import wait_for

from train.checkpoints import lock as locks
from train.checkpoints.lock import RunLock, read_start_time
from train.engine import train
from train.errors import UserError
from train.launch import RankContext
from train.recorders.base import Recorder
from train.resume import states_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.programs import Programs

    from syncheck.testing import Rank

ALONE = RankContext()
SINGLE = replace(TINY, method="single", max_steps=3, epochs=1)


def leave_lock(out: Path, **changes: object) -> Path:
    """Write the lock file of another process, by default of another host."""
    path = out / ".single.lock"
    content = {"host": "node3", "pid": 4711, "process_start": None, "since": "now", "token": "another"}
    path.write_text(json.dumps(content | changes))
    return path


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """Start another process on this host."""
    with subprocess.Popen((sys.executable, "-c", "import time; time.sleep(600)")) as process:
        yield process
        process.kill()


def test_a_second_live_run_is_refused(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    """A second run is refused before it writes anything; if the first run is killed, its lock is free at once."""
    (tmp_path / "single_rank0.pth").write_bytes(b"of the live run")
    leave_lock(tmp_path, host=socket.gethostname(), pid=holder.pid, process_start=read_start_time(holder.pid))
    settings = replace(SINGLE, out=tmp_path)
    with pytest.raises(UserError, match=rf"process {holder.pid} on .*--out"):
        train(settings, ALONE, Recorder())
    assert list_files(tmp_path) == [".single.lock", "single_rank0.pth"]
    assert (tmp_path / "single_rank0.pth").read_bytes() == b"of the live run"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert train(settings, ALONE, Recorder()).replaced == 1


def test_a_process_with_the_same_number_is_another_process(tmp_path: Path) -> None:
    """A lock is stale if its process has ended and another process has its id now."""
    leave_lock(tmp_path, host=socket.gethostname(), pid=os.getpid(), process_start=1)
    assert train(replace(SINGLE, out=tmp_path), ALONE, Recorder()).steps == 3


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"token": ""}', b"\xff\x00"])
def test_a_lock_without_an_owner_is_free(tmp_path: Path, content: bytes) -> None:
    """A lock file that a crash or a full disk left empty or damaged is free, but not while a run may write it."""
    path = tmp_path / ".single.lock"
    path.write_bytes(content)
    settings = replace(SINGLE, checkpoint_every=None, out=tmp_path)
    with pytest.raises(UserError, match="another run named single"):
        train(settings, ALONE, Recorder())
    os.utime(path, (0, 0))
    assert train(settings, ALONE, Recorder()).steps == 3
    assert list_files(tmp_path) == ["single_rank0.pth"]


def test_the_lock_of_another_host_is_refused(tmp_path: Path) -> None:
    """A run does not know whether a process of another host runs: it exits at once, and names the file to remove."""
    path = leave_lock(tmp_path)
    before = path.read_bytes()
    with RunLock(replace(SINGLE, out=tmp_path), ALONE) as lock, pytest.raises(UserError, match="node3") as refusal:
        lock.acquire()
    assert str(path) in str(refusal.value)
    assert path.read_bytes() == before


def test_runs_that_replace_one_stale_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another run replaces a stale lock first, its lock survives, and this run is refused."""
    path = leave_lock(tmp_path, host=socket.gethostname(), pid=2**22 + 1)

    def replace_first(_: object) -> bool:
        leave_lock(tmp_path, host=socket.gethostname(), token="first")
        return False

    monkeypatch.setattr(locks, "is_process_alive", replace_first)
    with RunLock(replace(SINGLE, out=tmp_path), ALONE) as lock, pytest.raises(UserError, match="another run"):
        lock.acquire()
    assert json.loads(path.read_text())["token"] == "first"
    assert list(tmp_path.iterdir()) == [path]


class Suspended(Recorder):
    """Lets another host take over the lock after the second step, as if this run had been suspended."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def step(self, step: int, *_: object) -> None:
        """Take over the lock, and save a checkpoint of the other run."""
        if step == 2:
            leave_lock(self.out)
            shutil.rmtree(self.out / ".resume" / "single" / "step_1")
            (self.out / "single_rank0.pth").write_bytes(b"of the other run")


def test_a_run_without_its_lock_changes_no_files(tmp_path: Path) -> None:
    """A run that has lost its lock saves and removes nothing, and leaves the lock to the other run."""
    with pytest.raises(UserError, match="node3"):
        train(replace(SINGLE, out=tmp_path), ALONE, Suspended(tmp_path))
    assert (tmp_path / "single_rank0.pth").read_bytes() == b"of the other run"
    assert list_files(tmp_path / ".resume" / "single") == ["step_2"]
    assert json.loads((tmp_path / ".single.lock").read_text())["token"] == "another"


@pytest.mark.parametrize("missing", [".resume", ".resume/single/step_*", ".resume/*"])
def test_resume_without_the_recorded_states_is_refused(tmp_path: Path, missing: str) -> None:
    """If the recorded states are missing, --resume is refused; a run without --resume starts at step 0."""
    settings = replace(SINGLE, out=tmp_path)
    train(settings, ALONE, Recorder())
    for path in tmp_path.glob(missing):
        shutil.rmtree(path)
    before = (tmp_path / "single_rank0.pth").stat().st_mtime_ns
    for checkpoint_every in (1, None):
        with pytest.raises(UserError, match="step 3"):
            resume(ALONE, replace(settings, checkpoint_every=checkpoint_every))
    assert (tmp_path / "single_rank0.pth").stat().st_mtime_ns == before
    notes = Notes()
    train(settings, ALONE, notes)
    assert notes.steps == [1, 2, 3]
    assert resume(ALONE, settings)[1].steps == []  # the new run saved states


@pytest.mark.syncheck(ranks=2)
def test_ranks_share_the_lock(syncheck_rank: Rank, ctx: RankContext) -> None:
    """Ranks on two nodes with a shared folder hold one lock, and a second run is refused on both nodes."""
    ctx = replace(ctx, local_rank=0, node=ctx.rank)
    settings = replace(TINY, out=syncheck_rank.shared)
    with RunLock(settings, ctx) as lock:
        lock.acquire()
        lock.check()
        with RunLock(settings, ctx) as second, pytest.raises(UserError, match="another run named ddp"):
            second.acquire()
        assert lock.created is ctx.is_main
    syncheck_rank.barrier()
    assert not lock.path.exists()


@pytest.mark.slow
def test_two_runs_at_once(programs: Programs, tmp_path: Path) -> None:
    """The second of two live runs exits with 2; after the first run is killed, --resume finds its states."""
    states, line = states_folder(tmp_path / "ckpts", "single"), (*TRAIN, "--width", 4, "--progress", "none")
    first = programs.start(*line, "--epochs", 400, "--checkpoint-every", 1, "--resume")
    # A fast run deletes old states sooner than this test looks again.
    wait_for(lambda: any(p.name[5:].isdigit() and int(p.name[5:]) >= 3 for p in states.glob("step_*")), timeout=100)
    second = programs.run(*line, "--epochs", 400, "--checkpoint-every", 1, timeout=100)
    assert second.returncode == 2
    assert "another run named single" in second.stderr
    first.kill()
    programs.finish(first)
    again = programs.run(*line, "--max-steps", 1, "--checkpoint-every", 1, "--resume", timeout=100)
    assert again.returncode == 2  # a later state exists
    assert "the run ends after 1" in again.stderr
