"""A shell per process: --rank, --world-size, and a file or an address to meet at."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from programs import LONG, SHORT, TRAIN, assert_trained, errors, imports_torch, wait_until_trains
from started import LAUNCHER, alive, free_port, wait_for
from torch.distributed import TCPStore

from train.run import main

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from programs import Programs, Run

    from syncheck.testing import Rank

    Ended = tuple[int, list[str], str]

# Real processes that several tests share, because starting one takes seconds; each calls run.py's `main`.
RANKS = pytest.mark.syncheck(ranks=2, group=False)


def run_all(programs: Programs, *arguments: Any, ranks: int = 2) -> list[Run]:
    """Start all ranks, the last one first, and wait for them."""
    size = ("--world-size", ranks)
    started = [programs.start(*TRAIN, "--rank", rank, *size, *arguments) for rank in reversed(range(ranks))]
    return [programs.finish(process) for process in reversed(started)]


def start_long(programs: Programs, *where: Any) -> list[subprocess.Popen[str]]:
    """Start two ranks, and wait until they train."""
    ranks = [programs.start(*TRAIN, "--rank", rank, "--world-size", 2, *where, *LONG) for rank in range(2)]
    wait_until_trains(ranks[0])
    return ranks


class Shell:
    """This rank as a shell of its own, in the common folder of the test."""

    def __init__(self, me: Rank, capsys: pytest.CaptureFixture[str]) -> None:
        self.rank, self.folder, self.capsys, self.waits = me.rank, me.shared, capsys, 0
        self.meeting = me.shared / "meeting"

    def wait(self) -> None:
        """Wait until both ranks have come here."""
        self.waits += 1
        (self.folder / f"wait{self.waits}.{self.rank}").touch()
        wait_for(lambda: all((self.folder / f"wait{self.waits}.{rank}").exists() for rank in range(2)))

    def call(self, *arguments: Any) -> Ended:
        """Call `main`, and wait for the other rank; return the exit code, the errors and the output."""
        code = main([str(word) for word in arguments])
        said = self.capsys.readouterr()
        lines = said.err.splitlines()
        assert all(line.startswith("run.py: ") for line in lines), lines
        self.wait()
        return code, [line.removeprefix("run.py: ") for line in lines], said.out

    def run(self, *arguments: Any, rank: int | None = None, size: int = 2) -> Ended:
        """Call `main` as a rank, by default with the file for the rendezvous."""
        where = () if {"--ip", "--init-method"} & set(arguments) else ("--init-method", self.meeting.as_uri())
        number = self.rank if rank is None else rank
        return self.call("--rank", number, "--world-size", size, *where, *arguments)


@pytest.fixture
def shell(syncheck_rank: Rank, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Let this rank type its own command line."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(syncheck_rank.shared)
    return Shell(syncheck_rank, capsys)


@RANKS
def test_trains_through_a_file(shell: Shell) -> None:
    """Two ranks train ddp; the file is gone afterwards, so that the same lines work again."""
    for replaced in ("", " (replaced 2 of an earlier run of this name)"):
        code, errors, out = shell.run(*SHORT)
        assert (code, errors) == (0, [])
        saved = f"saved 2 files: ckpts/ddp_rank0.pth to ckpts/ddp_rank1.pth{replaced}"
        assert out.splitlines()[1:] == ([saved] if shell.rank == 0 else [])
        assert_trained(shell.folder / "ckpts", 2)
        wait_for(lambda: not shell.meeting.exists())
        shell.wait()


@RANKS
@pytest.mark.parametrize("how", ["options", "url", "variables"])
def test_trains_over_tcp(shell: Shell, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """An address and a port of rank 0 do as well, in either spelling; so do the variables of torchrun, set by hand."""
    path = shell.folder / "port"
    if shell.rank == 0:
        path.write_text(str(free_port()))
    shell.wait()
    port = path.read_text()
    if how == "variables":
        variables = {"RANK": str(shell.rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        ended = shell.call(*SHORT)
    elif how == "url":
        ended = shell.run("--init-method", f"tcp://localhost:{port}", *SHORT)
    else:
        ended = shell.run("--ip", "127.0.0.1", "--port", port, *SHORT)
    assert ended[:2] == (0, [])
    assert_trained(shell.folder / "ckpts", 2)


@RANKS
def test_mistakes_are_said_in_each_shell(shell: Shell) -> None:
    """Where each rank has a terminal of its own, none of them ends without a word; the file does not stay."""
    code, errors, _ = shell.run("--save-per-rank", "--out", "/dev/null/x")
    assert (code, errors) == (2, ["error: cannot write to --out /dev/null/x: Not a directory"])
    wait_for(lambda: not shell.meeting.exists())


@RANKS
def test_a_rank_that_does_not_come(shell: Shell) -> None:
    """Ranks that wait in vain say which one is missing, and leave no file in the way of the next try."""
    code, (line,), _ = shell.run("--timeout", 2, rank=(0, 2)[shell.rank], size=3)
    assert code == 2
    assert f"waited 2 s at file://{shell.meeting}: rank 1 did not join" in line
    wait_for(lambda: not shell.meeting.exists())


@RANKS
def test_a_second_try_in_the_same_file(shell: Shell) -> None:
    """A rank that waited for rank 0 in vain leaves no file behind, so that both meet there at the next try."""
    if shell.rank == 1:
        where = ("--rank", "1", "--world-size", "2", "--init-method", shell.meeting.as_uri(), "--timeout", "1")
        assert main([*where]) == 2
        (line,) = shell.capsys.readouterr().err.splitlines()
        assert f"waited 1 s at file://{shell.meeting}: rank 0 did not join" in line
        wait_for(lambda: not shell.meeting.exists())
    shell.wait()
    assert shell.run(*SHORT)[:2] == (0, [])
    assert_trained(shell.folder / "ckpts", 2)


@RANKS
@pytest.mark.parametrize(("option", "values"), [("lr", ("0.1", "0.2")), ("width", ("4", "8"))])
def test_different_options(shell: Shell, option: str, values: tuple[str, str]) -> None:
    """Ranks with different options end before they train, and both shells say who was given what."""
    code, (line,), _ = shell.run("--max-steps", 3, "--save-per-rank", f"--{option}", values[shell.rank])
    assert code == 2
    assert line.startswith(f"error: rank 1 was started with {option}={values[1]}, rank 0 with {values[0]}; ")
    assert not (shell.folder / "ckpts").exists()
    wait_for(lambda: not shell.meeting.exists())


@pytest.mark.parametrize(("ip", "timeout"), [("127.0.0.1", 1), ("no-such-host.invalid", 600), ("192.0.2.1", 1)])
def test_nobody_answers(
    capfd: pytest.CaptureFixture[str], no_launcher: None, free_port: int, ip: str, timeout: int
) -> None:
    """A name that does not resolve is reported at once, and after --timeout an address without an answer.

    The message is one line, without torch's pages of warnings.
    """
    where = ("--rank", 1, "--world-size", 2, "--ip", ip, "--port", free_port, "--timeout", timeout)
    assert main([str(word) for word in where]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"tcp://{ip}:{free_port}" in line
    assert ip != "127.0.0.1" or "(Connection refused)" in line


@pytest.mark.slow
def test_file_of_a_killed_run(programs: Programs, tmp_path: Path) -> None:
    """The file of ranks that were all killed serves the next run, with as many ranks or more."""
    for process in start_long(programs, "--init-method", f"file://{tmp_path}/meeting2"):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
    shutil.copy(tmp_path / "meeting2", tmp_path / "meeting3")
    for size in (2, 3):
        runs = run_all(programs, "--init-method", f"file://{tmp_path}/meeting{size}", *SHORT, ranks=size)
        assert ([run.returncode for run in runs], errors(runs)) == ([0] * size, [])
        assert_trained(tmp_path / "ckpts", size)


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
