"""A shell per process: --rank, --world-size, and a file or an address to meet at."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from programs import SHORT, TRAIN, assert_trained, errors, imports_torch
from started import alive, wait_for
from torch.distributed import TCPStore

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from programs import Programs, Run

LONG = ("--width", 4, "--epochs", 10_000, "--progress", "plain", "--timeout", 30)


def run_all(programs: Programs, *arguments: Any, ranks: int = 2) -> list[Run]:
    """Start all ranks, the last one first, and wait for them."""
    size = ("--world-size", ranks)
    started = [programs.start(*TRAIN, "--rank", rank, *size, *arguments) for rank in reversed(range(ranks))]
    return [programs.finish(process) for process in reversed(started)]


def start_long(programs: Programs, *where: Any) -> list[subprocess.Popen[str]]:
    """Start two ranks, and wait until they train."""
    ranks = [programs.start(*TRAIN, "--rank", rank, "--world-size", 2, *where, *LONG) for rank in range(2)]
    assert ranks[0].stdout is not None
    assert ranks[0].stdout.readline().startswith("ddp: epoch")
    return ranks


@pytest.mark.slow
def test_trains_through_a_file(programs: Programs, tmp_path: Path) -> None:
    """Two shells train ddp; the file is gone afterwards, so that the same lines work again."""
    where = ("--init-method", f"file://{tmp_path}/meeting")
    for replaced in ("", " (replaced 2 of an earlier run of this name)"):
        zero, one = run_all(programs, *where, *SHORT)
        assert (zero.returncode, one.returncode, errors([zero, one]), one.stdout) == (0, 0, [], "")
        assert zero.stdout.splitlines()[1] == f"saved 2 files: ckpts/ddp_rank0.pth to ckpts/ddp_rank1.pth{replaced}"
        assert_trained(tmp_path / "ckpts", 2)
        assert not (tmp_path / "meeting").exists()


@pytest.mark.parametrize("how", ["--ip", "--init-method"])
@pytest.mark.slow
def test_trains_over_tcp(programs: Programs, tmp_path: Path, free_port: int, how: str) -> None:
    """An address and a port of rank 0 do as well, in either spelling."""
    where = ("--ip", "127.0.0.1", "--port", free_port) if how == "--ip" else (how, f"tcp://localhost:{free_port}")
    runs = run_all(programs, *where, *SHORT)
    assert ([run.returncode for run in runs], errors(runs)) == ([0, 0], [])
    assert_trained(tmp_path / "ckpts", 2)


@pytest.mark.slow
def test_mistakes_are_said_in_each_shell(programs: Programs, tmp_path: Path) -> None:
    """Where each rank has a terminal of its own, none of them ends without a word; the file does not stay."""
    where = ("--init-method", f"file://{tmp_path}/meeting", "--save-per-rank", "--out", "/dev/null/x")
    runs = run_all(programs, *where)
    assert [run.returncode for run in runs] == [2, 2]
    assert errors(runs) == ["error: cannot write to --out /dev/null/x: Not a directory"] * 2
    assert not (tmp_path / "meeting").exists()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_file_of_a_killed_run(programs: Programs, tmp_path: Path, world_size: int) -> None:
    """The file of ranks that were all killed serves the next run, with as many ranks or more."""
    where = ("--init-method", f"file://{tmp_path}/meeting")
    for process in start_long(programs, *where):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
    runs = run_all(programs, *where, *SHORT, ranks=world_size)
    assert ([run.returncode for run in runs], errors(runs)) == ([0] * world_size, [])
    assert_trained(tmp_path / "ckpts", world_size)


@pytest.mark.slow
def test_a_rank_that_does_not_come(programs: Programs, tmp_path: Path) -> None:
    """Ranks that wait in vain say which one is missing, and leave no file in the way of the next try."""
    where = ("--init-method", f"file://{tmp_path}/meeting", "--timeout", 2)
    started = [programs.start(*TRAIN, "--rank", rank, "--world-size", 3, *where) for rank in (0, 2)]
    runs = [programs.finish(process) for process in started]
    assert [run.returncode for run in runs] == [2, 2]
    for line in errors(runs):
        assert f"waited 2 s at file://{tmp_path}/meeting: rank 1 did not join" in line
    assert not (tmp_path / "meeting").exists()


@pytest.mark.slow
def test_no_rank_zero_over_tcp(programs: Programs, free_port: int) -> None:
    """Where nobody listens, the rank that waits says so after its timeout, without torch's pages of warnings."""
    address = ("--ip", "127.0.0.1", "--port", free_port)
    run = programs.run(*TRAIN, "--rank", 1, "--world-size", 2, *address, "--timeout", 1)
    assert run.returncode == 2
    (line,) = errors([run])
    assert f"rank 0 at tcp://127.0.0.1:{free_port} (Connection refused)" in line


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "ip"), [(1, "no-such-host.invalid"), (0, "192.0.2.1"), (1, "192.0.2.1")])
def test_wrong_address(programs: Programs, free_port: int, rank: int, ip: str) -> None:
    """A name that does not resolve is reported at once, an address at which rank 0 does not listen after --timeout."""
    where = ("--ip", ip, "--port", free_port, "--timeout", 2 if ip == "192.0.2.1" else 600)
    run = programs.run(*TRAIN, "--rank", rank, "--world-size", 2, *where)
    assert run.returncode == 2
    (line,) = errors([run])
    assert f"tcp://{ip}:{free_port}" in line


@pytest.mark.slow
def test_port_in_use(programs: Programs) -> None:
    """Rank 0 reports a port in use, and the other ranks a server that never answers, after the timeout."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        zero, one = run_all(programs, "--ip", "127.0.0.1", "--port", port, "--timeout", 1)
    for rank, line in enumerate(errors([zero, one])):
        assert line.startswith(f"error: rank {rank} cannot use tcp://127.0.0.1:{port}: ")
    assert (zero.returncode, one.returncode) == (2, 2)


@pytest.mark.slow
def test_different_world_sizes(programs: Programs, free_port: int) -> None:
    """The rank that joins second reports both world sizes at once; the first one waits for it in vain."""
    where = ("--ip", "127.0.0.1", "--port", free_port, "--timeout", 5)
    sizes = enumerate((2, 3))
    started = [programs.start(*TRAIN, "--rank", rank, "--world-size", size, *where) for rank, size in sizes]
    runs = [programs.finish(process, timeout=30) for process in started]
    assert [run.returncode for run in runs] == [2, 2]
    assert any("2 ranks" in line and "3 ranks" in line for line in errors(runs))


@pytest.mark.slow
def test_one_rank_twice(programs: Programs, free_port: int) -> None:
    """The second process with a rank ends at once; the others report the rank that is missing."""
    where = ("--ip", "127.0.0.1", "--port", free_port, "--timeout", 15)
    started = [programs.start(*TRAIN, "--rank", rank, "--world-size", 3, *where) for rank in (0, 1, 1)]
    runs = [programs.finish(process, timeout=40) for process in started]
    assert [run.returncode for run in runs] == [2, 2, 2]
    zero, *ones = errors(runs)
    assert "rank 2 did not join" in zero
    assert sum("rank 1 of 3 has already joined" in line for line in ones) == 1


@pytest.mark.slow
def test_ctrl_c(programs: Programs, tmp_path: Path) -> None:
    """Ctrl-C in one shell stops all ranks after the same step, each with the same line, and the meeting's file goes."""
    zero, one = start_long(programs, "--init-method", f"file://{tmp_path}/meeting")
    os.kill(one.pid, signal.SIGINT)
    runs = [programs.finish(process) for process in (zero, one)]
    assert [run.returncode for run in runs] == [130, 130]
    lines = errors(runs)
    assert lines[0] == lines[1]
    assert lines[0].startswith("stopped by SIGINT after step ")
    assert not (tmp_path / "meeting").exists()
    assert not alive(zero)
    assert not alive(one)


@pytest.mark.slow
def test_ctrl_c_inside_a_collective(programs: Programs, tmp_path: Path) -> None:
    """A second Ctrl-C ends a rank at once, even while it waits inside torch for one that stands still."""
    zero, one = start_long(programs, "--init-method", f"file://{tmp_path}/meeting")
    os.kill(one.pid, signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(zero.pid, signal.SIGINT)
    time.sleep(1.5)
    assert zero.poll() is None
    os.kill(zero.pid, signal.SIGINT)
    run = programs.finish(zero, timeout=10)
    assert (run.returncode, run.stderr) == (130, "run.py: interrupted\n")


@pytest.mark.parametrize("when", ["imports", pytest.param("waits", marks=pytest.mark.slow)])
def test_ctrl_c_early(programs: Programs, tmp_path: Path, when: str) -> None:
    """Ctrl-C while the modules are imported, or while a rank waits for others, shows no traceback."""
    meeting = tmp_path / "meeting"
    process = programs.start(*TRAIN, "--rank", 0, "--world-size", 2, "--init-method", f"file://{meeting}")
    if when == "imports":
        wait_for(lambda: imports_torch(process.pid))
    else:
        wait_for(lambda: meeting.exists() and b"joined/0" in meeting.read_bytes())
    os.kill(process.pid, signal.SIGINT)
    run = programs.finish(process, timeout=10)
    assert run.returncode == 130
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_rank_zero_goes_away(programs: Programs, free_port: int) -> None:
    """A rank that waits for others when rank 0, and with it the store, goes away says so in one line."""
    where = ("--ip", "127.0.0.1", "--port", free_port, "--timeout", 30)
    zero, one = (programs.start(*TRAIN, "--rank", rank, "--world-size", 3, *where) for rank in range(2))
    # An onlooker in rank 0's store sees when rank 1 has come.
    store: Any = TCPStore("127.0.0.1", free_port, None, False, timedelta(seconds=120), wait_for_workers=False)
    wait_for(lambda: store.check(["train/joined/1"]))
    os.kill(zero.pid, signal.SIGKILL)
    run = programs.finish(one, timeout=10)
    assert run.returncode == 2
    (line,) = errors([run])
    assert f"tcp://127.0.0.1:{free_port}" in line


@pytest.mark.slow
def test_a_second_try_in_the_same_file(programs: Programs, tmp_path: Path) -> None:
    """A rank that waited for rank 0 in vain leaves no file behind, so that both meet there at the next try."""
    where = ("--init-method", f"file://{tmp_path}/meeting")
    run = programs.run(*TRAIN, "--rank", 1, "--world-size", 2, *where, "--timeout", 1)
    assert run.returncode == 2
    (line,) = errors([run])
    assert f"waited 1 s at file://{tmp_path}/meeting: rank 0 did not join" in line
    assert not (tmp_path / "meeting").exists()
    runs = run_all(programs, *where, *SHORT)
    assert ([run.returncode for run in runs], errors(runs)) == ([0, 0], [])
    assert_trained(tmp_path / "ckpts", 2)


@pytest.mark.slow
@pytest.mark.parametrize(("option", "values"), [("lr", ("0.1", "0.2")), ("width", ("4", "8"))])
def test_different_options(programs: Programs, tmp_path: Path, option: str, values: tuple[str, str]) -> None:
    """Ranks with different options end before they train, and both shells say who was given what."""
    common = ("--world-size", 2, "--init-method", f"file://{tmp_path}/meeting", "--max-steps", 3, "--timeout", 30)
    started = [
        programs.start(*TRAIN, "--rank", rank, *common, f"--{option}", value) for rank, value in enumerate(values)
    ]
    runs = [programs.finish(process) for process in started]
    assert [run.returncode for run in runs] == [2, 2]
    zero, one = errors(runs)
    assert zero == one
    assert re.search(rf"rank 1 .*\b{option}={re.escape(values[1])}, rank 0 .*\b{re.escape(values[0])}; ", zero)
    assert not (tmp_path / "ckpts").exists()
    assert not (tmp_path / "meeting").exists()
