"""One rank's process: started, spoken to, asked for its stack, ended. None outlives the pytest that started it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

# What the tests themselves are unlikely to use; macOS has no real-time signals.
STACK_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
# Not `-m`: a spawned grandchild would import that module anew as its own main module.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from syncheck.pytest_plugin.ranks.child import main; main(int(sys.argv[2]))"
)


class RankProcess:
    """A child that runs one nested pytest session after another, until its connection is closed."""

    def __init__(self, folder: Path, out: Path, err: Path) -> None:
        """Start it. folder: where to work. out, err: files for what it writes before its first task."""
        here, there = socket.socketpair()
        with there, out.open("ab") as stdout, err.open("ab") as stderr:
            # A session of its own: Ctrl-C reaches pytest alone, and its own children can be ended with it.
            self.popen = subprocess.Popen(
                [sys.executable, "-u", "-c", _START, json.dumps(sys.path), str(there.fileno())],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        self.connection = Connection(here.detach())

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. A dead child is noticed by who waits for its answer."""
        with suppress(OSError):
            self.connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, None when the child is gone."""
        try:
            message: dict[str, Any] = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return message

    def ended(self) -> bool:
        """Whether the process has ended. It is not reaped: its number must stay taken until `kill`."""
        if self.popen.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def ask_for_stack(self) -> None:
        """Make it write the stacks of all its threads, also where it waits in C code."""
        if not self.ended():
            os.kill(self.popen.pid, STACK_SIGNAL)

    def kill(self) -> int:
        """End the process and all of its group; return what it left with: an exit code, or minus a signal."""
        if self.popen.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies may not be signalled
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
        self.connection.close()
        return self.popen.returncode


def wait_for_stacks(files: list[Path], seconds: float = 2.0) -> None:
    """Wait until the stacks asked for are written: each file holds something and has stopped growing."""
    sizes: list[int] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = [file.stat().st_size if file.exists() else 0 for file in files]
        if now == sizes and all(now):
            return
        sizes = now
