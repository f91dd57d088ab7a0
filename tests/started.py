"""Programs that tests start outside any launcher, each in a session of its own; none outlives the test."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Variables that launchers set; pytest itself may have been started by one.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_")


class Processes:
    """The processes of a test. folder: their working folder.

    temporary: their folder for temporary files, which some leave there. Its path is short, because the sockets of
    multiprocessing are in it, and the path of a socket has at most 107 characters.
    """

    variables: dict[str, str] = {}  # that all of them get  # noqa: RUF012 - a constant of each class
    without: tuple[str, ...] = ()  # beginnings of those that none gets

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = Path(tempfile.mkdtemp(prefix="started-"))
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *command: Any, cwd: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        """Start one; keyword arguments are environment variables."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER + self.without)}
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=cwd or self.folder,
            env={**kept, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), **self.variables, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def kill(self) -> None:
        """End all that were started, with all that these have started."""
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        shutil.rmtree(self.temporary, ignore_errors=True)


def alive(process: subprocess.Popen[str]) -> bool:
    """Tell whether anything is left of a program's session, some time after it."""
    for _ in range(200):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def wait_for(condition: Any, timeout: float = 60, pause: float = 0.02) -> None:
    """Wait until a function returns something true, asking it again after each pause."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(pause)


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
