"""Start programs without a launcher's variables, each in its own session, and kill them at the end of a test."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from support.fork_server import ForkServer, start_program
from support.states import omit_prefixes

ROOT = Path(__file__).resolve().parents[2]
# For programs that import syncheck of this clone: PYTHONPATH with it, and with a faster start (tests/quick_start).
HAS_TORCH = find_spec("torch") is not None
QUICK_START = str(ROOT / "tests" / "quick_start")
CLONE = os.pathsep.join([str(ROOT), QUICK_START])
# Variables set by launchers; a launcher may have started pytest itself.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_")


class Processes:
    """The processes of a test. folder: their working folder.

    temporary: their folder for temporary files, removed by `kill`. Its path is short, because multiprocessing creates
    sockets in it, and the path of a socket has at most 107 characters.
    """

    variables: dict[str, str] = {}  # set for all processes  # noqa: RUF012 - a constant of each class
    without: tuple[str, ...] = ()  # prefixes of variables to remove
    # Whether programs begin with torch imported. Not for tests of the moments in which Python starts and imports.
    forks: bool = HAS_TORCH and sys.platform == "linux" and "SYNCHECK_NO_FORKS" not in os.environ

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = Path(tempfile.mkdtemp(prefix="started-"))
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *command: Any, cwd: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        """Start a process; keyword arguments are environment variables."""
        retained = omit_prefixes(os.environ, LAUNCHER + self.without)
        options: dict[str, Any] = {
            "cwd": cwd or self.folder,
            "env": {**retained, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), **self.variables, **environment},
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "start_new_session": True,
        }
        words = [str(word) for word in command]
        process = start_program(fork_server(), words, **options) if self.forks else subprocess.Popen(words, **options)
        self.started.append(process)
        return process

    def kill(self) -> None:
        """Kill all started processes with their children."""
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        shutil.rmtree(self.temporary, ignore_errors=True)


@functools.cache
def fork_server() -> ForkServer:
    """Return the server of this process of the tests, which ends with it."""
    # The trainer sets the level of torch's log before it imports torch.
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": QUICK_START, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    variables = {**omit_prefixes(os.environ, LAUNCHER), **settings}
    own, other = socket.socketpair()
    script = f"from support.fork_server import main; main({other.fileno()})"
    with other:
        subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=Path(__file__).parents[1],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            start_new_session=True,
        )
    return ForkServer(own, variables)


def alive(process: subprocess.Popen[str]) -> bool:
    """Return whether a program's session still has processes after ten seconds."""
    for _ in range(200):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def is_gone(path: Path) -> bool:
    """Return whether a file no longer exists."""
    return not path.exists()


def wait_for(condition: Any, *arguments: Any, timeout: float = 60, pause: float = 0.02) -> None:
    """Wait until a condition is true; call the function with the arguments again after each pause."""
    deadline = time.monotonic() + timeout
    while not condition(*arguments):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(pause)


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
