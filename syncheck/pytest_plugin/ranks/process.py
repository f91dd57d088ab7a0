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
from pathlib import Path
from typing import IO, Any

from syncheck.pytest_plugin.ranks import guard

# What the tests themselves are unlikely to use; macOS has no real-time signals.
STACK_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
# Not `-m`: a spawned grandchild would import that module anew as its own main module.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from syncheck.pytest_plugin.ranks.child import main; main(int(sys.argv[2]), sys.argv[3])"
)
_CHUNK = 1 << 20


def import_path() -> list[str]:
    """Return sys.path as it can be sent: a conftest may have put other objects into it, which Python passes over."""
    return [entry for entry in sys.path if isinstance(entry, str)]


class Guard:
    """A process that ends the ranks when this one is gone without having done so."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        """Take a rank into its care."""
        self._tell(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """Leave alone what has been ended: its number is about to be free."""
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        """Let it go."""
        with suppress(OSError):
            self._pipe.close()
        self._popen.wait()

    def _tell(self, line: str) -> None:
        with suppress(OSError):  # whoever killed it has to answer for that
            self._pipe.write(line.encode())
            self._pipe.flush()

    @property
    def _pipe(self) -> IO[bytes]:
        assert self._popen.stdin is not None
        return self._popen.stdin


class RankProcess:
    """A child that runs one test after another, until its connection is closed.

    Messages are lines of JSON. They are read without waiting: a child may stop, or be killed, in the middle of one.
    """

    def __init__(self, folder: Path, out: Path, err: Path, watched_by: Guard) -> None:
        """Start it. folder: where to work. out, err: files for what it writes before its first task."""
        self._guard = watched_by
        self.socket, there = socket.socketpair()
        self._lost = err.with_name("connection_lost")
        with there, out.open("ab") as stdout, err.open("ab") as stderr:
            # A session of its own: Ctrl-C reaches pytest alone, and its own children can be ended with it.
            # -P: a json.py in the current folder is not the one that is meant.
            self.popen = subprocess.Popen(
                [sys.executable, "-uPc", _START, json.dumps(import_path()), str(there.fileno()), str(self._lost)],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        watched_by.watch(self.popen.pid)
        self.idle = True
        self._received = bytearray()
        self._closed = False

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. A dead child is noticed by who waits for its answer."""
        self.idle = False
        self.socket.settimeout(10)
        with suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the whole messages that are there, without waiting; None when the child is gone and all are read."""
        self.socket.setblocking(False)
        while not self._closed:
            try:
                data = self.socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._closed = not data
            self._received += data
        *lines, rest = bytes(self._received).split(b"\n") if b"\n" in self._received else [bytes(self._received)]
        self._received = bytearray(rest)
        messages = [_decoded(line) for line in lines]
        return None if self._closed and not messages else messages

    def ended(self) -> bool:
        """Whether the process has ended. It is not reaped: its number must stay taken until `kill`."""
        if self.popen.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # reaped by someone else
            return True

    def lost_connection(self, seconds: float = 1.0) -> bool:
        """Return whether it is cut off: it ended itself for that reason, or does not end although no more can come."""
        deadline = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(0.005)
        return self._lost.exists() or not self.ended()

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait until it has let go of its last test; return whether it has, and lives."""
        deadline = time.monotonic() + seconds
        while not self.idle and time.monotonic() < deadline:
            messages = self.receive()
            if messages is None or self.ended():
                return False
            self.idle = any("released" in message for message in messages)
            if not self.idle:
                time.sleep(0.005)
        return self.idle and not self.ended()

    def ask_for_stack(self) -> None:
        """Make it write the stacks of all its threads, also where it waits in C code."""
        if not self.ended():
            os.kill(self.popen.pid, STACK_SIGNAL)

    def kill(self) -> int:
        """End the process, its group and all that it started; return its exit code, or minus a signal."""
        if self.popen.returncode is None:
            guard.end(self.popen.pid)
            self._guard.forget(self.popen.pid)
            self.popen.wait()
        self.socket.close()
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


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        return {"problem": f"what it sent is no message of ours: {line[:80]!r}"}
    return message
