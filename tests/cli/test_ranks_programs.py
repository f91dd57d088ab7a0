"""`python -m syncheck compare 'rank_{rank}.pth'` as programs: under torchrun, started individually, and killed."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.checkpoints import changed, network, save, save_header
from support.listings import list_codes, list_fields
from support.programs_of_ranks import SYNCHECK, TORCHRUN, finish, finish_all
from support.started import alive, free_port, wait_for

if TYPE_CHECKING:
    from support.programs_of_ranks import Jobs

PATH = "run_rank{rank}.pth"


def write_ranks(folder: Path, by: float = 0.0, ranks: int = 2) -> None:
    """Write a file for each rank, with `by` added to a weight on the last rank."""
    for rank in range(ranks):
        off = by if rank == ranks - 1 else 0.0
        save(folder / PATH.format(rank=rank), changed(network(), "fc.weight", by=off))


@pytest.mark.slow
def test_torchrun(jobs: Jobs, tmp_path: Path) -> None:
    """Under torchrun, a difference ends all processes and torchrun with 1, and stdout is one document."""
    write_ranks(tmp_path, by=1.0)
    done = jobs.torchrun("compare", PATH, "--format", "json")
    assert json.loads(done.out)["verdict"] == "out_of_sync"
    assert jobs.codes() == {0: 1, 1: 1}
    assert done.code == 1
    assert "syncheck: error: " not in done.err
    assert not alive(jobs.started[0])


@pytest.mark.slow
def test_ranks_without_torchrun(jobs: Jobs, tmp_path: Path) -> None:
    """Any launcher can set torchrun's variables; a missing file is reported once, and all processes exit with 2."""
    write_ranks(tmp_path, ranks=1)
    processes = jobs.ranks("compare", PATH)
    done = finish_all(processes)
    assert list_codes(done) == [2, 2]
    assert list_fields(done, "out") == ["", ""]
    assert done[0].err == ("syncheck: error: rank 1: run_rank1.pth: no such file or directory. Check the path.\n")
    assert done[1].err == ""


@pytest.mark.slow
def test_closed_stdout(jobs: Jobs, tmp_path: Path) -> None:
    """If stdout is closed, as by `| head`, all ranks exit with 141 like a single process, without an error message."""
    write_ranks(tmp_path, by=1.0)
    processes = jobs.ranks("compare", PATH)
    assert processes[0].stdout is not None
    processes[0].stdout.close()
    processes[0].stdout = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - closed with the process
    done = finish_all(processes)
    assert list_fields(done, "code", "err") == [(141, "")] * 2


def has_open(pid: int, file: Path) -> bool:
    """Return whether a process has a file open."""
    with suppress(OSError):
        return any(link.samefile(file) for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.slow
def test_killed_process(jobs: Jobs, tmp_path: Path, killed: int) -> None:
    """If a process is killed during the comparison, the remaining ranks report lost communication and exit with 2."""
    path = "run_rank{rank}.safetensors"
    for rank in range(3):
        # The killed process must still be reading, so its file is huge, but sparse on the disk.
        size = 1 << 42 if rank == killed else 4
        file = save_header(
            tmp_path / path.format(rank=rank), {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
        )
        os.truncate(file, file.stat().st_size + size)
    processes = jobs.ranks("compare", path, ranks=3)
    wait_for(has_open, processes[killed].pid, tmp_path / path.format(rank=killed))
    os.kill(processes[killed].pid, signal.SIGKILL)
    done = finish_all(processes)
    assert list_codes(done) == [-9 if rank == killed else 2 for rank in range(3)]
    for rank, result in enumerate(done):
        assert result.out == ""
        assert (f"syncheck: error: rank {rank} cannot communicate: " in result.err) == (rank != killed)
        assert result.err.count("\n") == (rank != killed)


@pytest.mark.slow
def test_killed_process_under_torchrun(jobs: Jobs, tmp_path: Path) -> None:
    """If a process is killed, torchrun ends the other process, returns 1 and leaves no process behind."""
    write_ranks(tmp_path)
    file = save_header(
        tmp_path / "run_rank1.pth", {"w": {"dtype": "U8", "shape": [1 << 42], "data_offsets": [0, 1 << 42]}}
    )
    os.truncate(file, file.stat().st_size + (1 << 42))
    launcher = jobs.start(
        *TORCHRUN, "--nproc-per-node", 2, "--master-port", free_port(), "-m", "syncheck", "compare", PATH
    )

    def find_readers() -> list[int]:
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [pid for pid in pids if has_open(pid, file)]

    wait_for(find_readers)
    os.kill(find_readers()[0], signal.SIGKILL)
    assert finish(launcher).code == 1
    assert not alive(launcher)


@pytest.mark.slow
def test_torchrun_of_equal_files(jobs: Jobs, tmp_path: Path) -> None:
    """Under torchrun, equal files end all processes and torchrun with 0."""
    write_ranks(tmp_path, ranks=3)
    done = jobs.torchrun("compare", PATH, ranks=3)
    assert done.code == 0
    assert done.lines[0] == "run, 3 replicas"
    assert "IN SYNC" in done.lines
    assert jobs.codes() == {0: 0, 1: 0, 2: 0}


@pytest.mark.slow
def test_torchrun_of_a_missing_file(jobs: Jobs, tmp_path: Path) -> None:
    """Under torchrun, a missing file ends all processes with 2, and torchrun with 1 as after any failure."""
    write_ranks(tmp_path, ranks=1)
    done = jobs.torchrun("compare", PATH)
    assert (done.code, done.out, jobs.codes()) == (1, "", {0: 2, 1: 2})
    assert done.err.count("syncheck: error: rank 1: run_rank1.pth: no such file or directory.") == 1


@pytest.mark.slow
def test_unavailable_port(jobs: Jobs, tmp_path: Path) -> None:
    """A process that cannot join the other ranks prints one line with address and reason, and exits with 2."""
    write_ranks(tmp_path)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = finish(jobs.start(*SYNCHECK, "compare", PATH, **environment))
    assert (done.code, done.out) == (2, "")
    line = done.err.splitlines()[-1]
    assert line.startswith(f"syncheck: error: rank 0 of 2 could not join the other ranks at 127.0.0.1:{port}: ")
    assert "address already in use" in line
