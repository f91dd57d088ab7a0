"""Ranks started by hand: --rank, --world-size, and a file or an address for the rendezvous."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import find_texts, list_fields
from support.marks import slow
from support.programs import LONG, SHORT, TRAIN, assert_trained, errors, imports_torch, wait_until_trains
from support.started import LAUNCHER, alive, free_port, is_gone, wait_for

from train.run import main

if TYPE_CHECKING:
    import subprocess

    from support.programs import Programs, Run

    from syncheck.testing import Rank

    Outcome = tuple[int, list[str], str]

# Rank processes shared by several tests, because starting a process takes seconds; the tests call `main` of run.py.
RANKS = pytest.mark.syncheck(ranks=2, group=False)


def run_all(programs: Programs, *arguments: Any, ranks: int = 2) -> list[Run]:
    """Start all ranks, the last rank first, and wait until all ranks exit."""
    size = ("--world-size", ranks)
    started = [programs.start(*TRAIN, "--rank", rank, *size, *arguments) for rank in reversed(range(ranks))]
    return programs.finish_all(reversed(started))


def start_long(programs: Programs, *rendezvous: Any) -> list[subprocess.Popen[str]]:
    """Start two ranks, and wait until training starts."""
    ranks = [programs.start(*TRAIN, "--rank", rank, "--world-size", 2, *rendezvous, *LONG) for rank in range(2)]
    wait_until_trains(ranks[0])
    return ranks


class Shell:
    """The shell of one rank, in a folder shared by both ranks."""

    def __init__(self, rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
        self.rank, self.folder, self.capsys, self.waits = rank.rank, rank.shared, capsys, 0
        self.rendezvous_file = rank.shared / "meeting"

    def wait(self) -> None:
        """Wait until both ranks have called this method."""
        self.waits += 1
        (self.folder / f"wait{self.waits}.{self.rank}").touch()
        wait_for(lambda: all((self.folder / f"wait{self.waits}.{rank}").exists() for rank in range(2)))

    def call(self, *arguments: Any) -> Outcome:
        """Call `main` and wait for the other rank; return the exit code, the errors and the output."""
        code = main([str(word) for word in arguments]).code
        captured = self.capsys.readouterr()
        lines = captured.err.splitlines()
        assert all(line.startswith("run.py: ") for line in lines), lines
        self.wait()
        return code, [line.removeprefix("run.py: ") for line in lines], captured.out

    def run(self, *arguments: Any, rank: int | None = None, size: int = 2) -> Outcome:
        """Call `main` with the options of a rank, by default with the rendezvous file."""
        address = () if {"--ip", "--init-method"} & set(arguments) else ("--init-method", self.rendezvous_file.as_uri())
        number = self.rank if rank is None else rank
        return self.call("--rank", number, "--world-size", size, *address, *arguments)


@pytest.fixture
def shell(syncheck_rank: Rank, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Return this rank's shell, without launchers' variables, in the shared folder."""
    for name in find_texts(os.environ, start=LAUNCHER):
        monkeypatch.delenv(name)
    monkeypatch.chdir(syncheck_rank.shared)
    return Shell(syncheck_rank, capsys)


@RANKS
def test_trains_with_a_rendezvous_file(shell: Shell) -> None:
    """Two ranks train with DDP and remove the rendezvous file, so the same command lines work again."""
    for replaced in ("", " (replaced 2 of an earlier run of this name)"):
        code, errors, out = shell.run(*SHORT)
        assert (code, errors) == (0, [])
        saved = f"saved 2 files: ckpts/ddp_rank0.pth to ckpts/ddp_rank1.pth{replaced}"
        assert out.splitlines()[1:] == ([saved] if shell.rank == 0 else [])
        assert_trained(shell.folder / "ckpts", 2)
        wait_for(is_gone, shell.rendezvous_file)
        shell.wait()


@RANKS
@pytest.mark.parametrize("source", ["url", *slow("options", "variables")])
def test_trains_over_tcp(shell: Shell, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Two ranks train with rank 0's address, given as options, as a URL, or in torchrun's variables."""
    path = shell.folder / "port"
    if shell.rank == 0:
        path.write_text(str(free_port()))
    shell.wait()
    port = path.read_text()
    if source == "variables":
        variables = {"RANK": str(shell.rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        outcome = shell.call(*SHORT)
    elif source == "url":
        outcome = shell.run("--init-method", f"tcp://localhost:{port}", *SHORT)
    else:
        outcome = shell.run("--ip", "127.0.0.1", "--port", port, *SHORT)
    assert outcome[:2] == (0, [])
    assert_trained(shell.folder / "ckpts", 2)


@RANKS
def test_each_shell_reports_the_error(shell: Shell) -> None:
    """Each rank reports the error in its own shell, and the rendezvous file is removed."""
    code, errors, _ = shell.run("--save-per-rank", "--out", "/dev/null/x")
    assert (code, errors) == (2, ["error: cannot write to --out /dev/null/x: Not a directory"])
    wait_for(is_gone, shell.rendezvous_file)


@pytest.mark.slow
@RANKS
def test_missing_rank(shell: Shell) -> None:
    """After the timeout, the waiting ranks report the address in one line."""
    code, (line,), _ = shell.run("--timeout", 2, rank=(0, 2)[shell.rank], size=3)
    assert code == 2
    assert f"could not join the other ranks at file://{shell.rendezvous_file}: " in line


@RANKS
@pytest.mark.parametrize(("option", "values"), [("lr", ("0.1", "0.2")), ("width", ("4", "8"))])
def test_different_options(shell: Shell, option: str, values: tuple[str, str]) -> None:
    """Ranks with different options exit before training, and both shells report the option and both values."""
    code, (line,), _ = shell.run("--max-steps", 3, "--save-per-rank", f"--{option}", values[shell.rank])
    assert code == 2
    assert line.startswith(f"error: rank 1 was started with {option}={values[1]}, rank 0 with {values[0]}; ")
    assert not (shell.folder / "ckpts").exists()
    wait_for(is_gone, shell.rendezvous_file)


@pytest.mark.parametrize(
    ("ip", "timeout"),
    [("127.0.0.1", 1), ("no-such-host.invalid", 600), pytest.param("192.0.2.1", 1, marks=pytest.mark.slow)],
)
def test_unreachable_rank_zero(
    capsys: pytest.CaptureFixture[str], no_launcher: None, free_port: int, ip: str, timeout: int
) -> None:
    """An unknown host name is reported at once, and an address without an answer after --timeout, in one line."""
    arguments = ("--rank", 1, "--world-size", 2, "--ip", ip, "--port", free_port, "--timeout", timeout)
    assert main([str(word) for word in arguments]).code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"tcp://{ip}:{free_port}" in line


@pytest.mark.slow
def test_port_in_use(programs: Programs) -> None:
    """If another program uses the port, each rank reports in one line that the address is unusable."""
    with socket.socket() as second:
        second.bind(("127.0.0.1", 0))
        second.listen()
        port = second.getsockname()[1]
        zero, first = run_all(programs, "--ip", "127.0.0.1", "--port", port, "--timeout", 1)
    for rank, line in enumerate(errors([zero, first])):
        assert line.startswith(f"error: rank {rank} of 2 could not join the other ranks at tcp://127.0.0.1:{port}: ")
    assert (zero.returncode, first.returncode) == (2, 2)


@pytest.mark.slow
def test_ctrl_c(programs: Programs, tmp_path: Path) -> None:
    """Ctrl-C in one shell stops all ranks after the same step with the same line, and removes the rendezvous file."""
    zero, first = start_long(programs, "--init-method", f"file://{tmp_path}/meeting")
    os.kill(first.pid, signal.SIGINT)
    runs = programs.finish_all((zero, first))
    assert list_fields(runs, "returncode") == [130, 130]
    lines = errors(runs)
    assert lines[0] == lines[1]
    assert lines[0].startswith("stopped by SIGINT after step ")
    assert not (tmp_path / "meeting").exists()
    assert not alive(zero)
    assert not alive(first)


@pytest.mark.slow
def test_ctrl_c_inside_a_collective(programs: Programs, tmp_path: Path) -> None:
    """A second Ctrl-C ends a rank at once, even inside a collective that waits for a stopped rank."""
    zero, first = start_long(programs, "--init-method", f"file://{tmp_path}/meeting")
    os.kill(first.pid, signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(zero.pid, signal.SIGINT)
    time.sleep(1.5)
    assert zero.poll() is None
    os.kill(zero.pid, signal.SIGINT)
    run = programs.finish(zero, timeout=10)
    assert (run.returncode, run.stderr) == (130, "run.py: interrupted\n")


@pytest.mark.parametrize("when", ["imports", pytest.param("waits", marks=pytest.mark.slow)])
def test_ctrl_c_early(programs: Programs, tmp_path: Path, when: str) -> None:
    """Ctrl-C during the imports or the rendezvous ends a rank without a traceback."""
    programs.forks = False  # a fork has imported torch
    rendezvous_file = tmp_path / "meeting"
    process = programs.start(*TRAIN, "--rank", 0, "--world-size", 2, "--init-method", f"file://{rendezvous_file}")
    if when == "imports":
        wait_for(imports_torch, process.pid)
    else:
        wait_for(lambda: rendezvous_file.exists() and len(rendezvous_file.read_bytes()) > 0)
    os.kill(process.pid, signal.SIGINT)
    run = programs.finish(process, timeout=10)
    assert run.returncode == 130
    assert "Traceback" not in run.stderr


def count_connections(port: int) -> int:
    """Return the number of open connections to a port of this machine."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:] + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    rows = map(str.split, lines)
    return sum(remote.endswith(f":{port:04X}") and state == "01" for _, _, remote, state, *_ in rows)


@pytest.mark.slow
def test_rank_zero_killed_during_the_rendezvous(programs: Programs, free_port: int) -> None:
    """If rank 0 is killed during the rendezvous, a rank reports the store's address in one line, in its timeout."""
    address = ("--ip", "127.0.0.1", "--port", free_port, "--timeout", 6)
    zero = programs.start(*TRAIN, "--rank", 0, "--world-size", 3, *address)
    first = programs.start(*TRAIN, "--rank", 1, "--world-size", 3, *address)
    wait_for(lambda: count_connections(free_port) >= 1)
    os.kill(zero.pid, signal.SIGKILL)
    run = programs.finish(first, timeout=40)
    assert run.returncode == 2
    (line,) = errors([run])
    assert f"tcp://127.0.0.1:{free_port}" in line
