"""`python -m syncheck compare 'rank_{rank}.pth'` as programs: by torchrun, started one by one, and killed."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from checkpoints import changed, network, save, save_header
from programs_of_ranks import SYNCHECK, TORCHRUN, finished
from started import alive, free_port, wait_for

if TYPE_CHECKING:
    from programs_of_ranks import Jobs

PATH = "run_rank{rank}.pth"


def write(folder: Path, by: float = 0.0, ranks: int = 2) -> None:
    """Write a file for each rank. by: what is added to a weight on the last one."""
    for rank in range(ranks):
        off = by if rank == ranks - 1 else 0.0
        save(folder / PATH.format(rank=rank), changed(network(), "fc.weight", by=off))


@pytest.mark.slow
def test_torchrun(jobs: Jobs, tmp_path: Path) -> None:
    """Under torchrun every process ends with 1 for a difference, stdout is one document, and torchrun returns 1."""
    write(tmp_path, by=1.0)
    done = jobs.torchrun("compare", PATH, "--format", "json")
    assert json.loads(done.out)["verdict"] == "out_of_sync"
    assert jobs.codes() == {0: 1, 1: 1}
    assert done.code == 1
    assert "syncheck: " not in done.err
    assert not alive(jobs.started[0])


@pytest.mark.slow
def test_one_by_one(jobs: Jobs, tmp_path: Path) -> None:
    """Any launcher that sets torchrun's variables will do; a missing file is told once, and all end with 2."""
    write(tmp_path, ranks=1)
    started = jobs.ranks("compare", PATH)
    done = [finished(process) for process in started]
    assert [one.code for one in done] == [2, 2]
    assert [one.out for one in done] == ["", ""]
    assert done[0].err == ("syncheck: error: rank 1: run_rank1.pth: no such file or directory. Check the path.\n")
    assert done[1].err == ""


@pytest.mark.slow
def test_a_reader_that_has_seen_enough(jobs: Jobs, tmp_path: Path) -> None:
    """Where stdout is closed, as by `| head`, all ranks end with 141, as one process alone does, without a word."""
    write(tmp_path, by=1.0)
    started = jobs.ranks("compare", PATH)
    assert started[0].stdout is not None
    started[0].stdout.close()
    started[0].stdout = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - closed with the process
    done = [finished(process) for process in started]
    assert [(one.code, one.err) for one in done] == [(141, "")] * 2


def reads(pid: int, file: Path) -> bool:
    """Tell whether a process has a file open."""
    with suppress(OSError):
        return any(link.samefile(file) for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.slow
def test_a_process_that_is_killed(jobs: Jobs, tmp_path: Path, killed: int) -> None:
    """Where a process is killed while the others wait for it, these end with 2 at once and say that it is gone."""
    path = "run_rank{rank}.safetensors"
    for rank in range(3):
        # Of the one to be killed so much that it does not come to the end: a hole, which takes no room on the disk.
        size = 1 << 42 if rank == killed else 4
        file = save_header(
            tmp_path / path.format(rank=rank), {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
        )
        os.truncate(file, file.stat().st_size + size)
    started = jobs.ranks("compare", path, ranks=3)
    wait_for(lambda: reads(started[killed].pid, tmp_path / path.format(rank=killed)))
    os.kill(started[killed].pid, signal.SIGKILL)
    done = [finished(process) for process in started]
    assert [one.code for one in done] == [-9 if rank == killed else 2 for rank in range(3)]
    for rank, one in enumerate(done):
        assert one.out == ""
        assert (f"syncheck: error: rank {rank} cannot communicate: " in one.err) == (rank != killed)
        assert one.err.count("\n") == (rank != killed)


@pytest.mark.slow
def test_a_process_that_is_killed_under_torchrun(jobs: Jobs, tmp_path: Path) -> None:
    """torchrun ends the others when one is killed, returns 1, and leaves no process behind."""
    write(tmp_path)
    file = save_header(
        tmp_path / "run_rank1.pth", {"w": {"dtype": "U8", "shape": [1 << 42], "data_offsets": [0, 1 << 42]}}
    )
    os.truncate(file, file.stat().st_size + (1 << 42))
    launcher = jobs.start(
        *TORCHRUN, "--nproc-per-node", 2, "--master-port", free_port(), "-m", "syncheck", "compare", PATH
    )

    def victim() -> list[int]:
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [pid for pid in pids if reads(pid, file)]

    wait_for(victim)
    os.kill(victim()[0], signal.SIGKILL)
    assert finished(launcher).code == 1
    assert not alive(launcher)


@pytest.mark.slow
def test_torchrun_of_files_in_sync(jobs: Jobs, tmp_path: Path) -> None:
    """Under torchrun equal files end all with 0, and torchrun says nothing at all."""
    write(tmp_path, ranks=3)
    done = jobs.torchrun("compare", PATH, ranks=3)
    assert done.code == 0
    assert done.lines[0] == "run, 3 replicas: IN SYNC"
    assert jobs.codes() == {0: 0, 1: 0, 2: 0}


@pytest.mark.slow
def test_torchrun_of_a_file_that_is_missing(jobs: Jobs, tmp_path: Path) -> None:
    """Under torchrun what could not be told ends all processes with 2, and torchrun with 1, as it always does."""
    write(tmp_path, ranks=1)
    done = jobs.torchrun("compare", PATH)
    assert (done.code, done.out, jobs.codes()) == (1, "", {0: 2, 1: 2})
    assert done.err.count("syncheck: error: rank 1: run_rank1.pth: no such file or directory.") == 1


@pytest.mark.slow
def test_a_port_that_is_taken(jobs: Jobs, tmp_path: Path) -> None:
    """A process that cannot join the other ranks prints one line with address and reason, and exits with 2."""
    write(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        where = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = finished(jobs.start(*SYNCHECK, "compare", PATH, **where))
    assert (done.code, done.out) == (2, "")
    line = done.err.splitlines()[-1]
    assert line.startswith(f"syncheck: error: rank 0 of 2 could not join the other ranks at 127.0.0.1:{port}: ")
    assert "address already in use" in line
