"""The process of one rank: start, messages, stacks, exit. No rank outlives the outer pytest process."""

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

# A signal unlikely to be used by tests. macOS has no real-time signals.
STACK_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
# Exit code of a rank that has lost its connection.
LOST_CONNECTION = 112
# Not `-m`, because processes spawned by a test import the main module of their parent.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from syncheck.pytest_plugin.ranks.child import main; main(int(sys.argv[2]))"
)
_CHUNK = 1 << 20


def import_path() -> list[str]:
    """Return sys.path without objects other than strings, which a conftest may add and Python ignores."""
    return [entry for entry in sys.path if isinstance(entry, str)]


class Guard:
    """A process that kills the ranks if this process ends without killing them."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """End the guard."""
        with suppress(OSError):
            self._pipe.close()
        self._popen.wait()

    def send(self, line: str) -> None:
        """Send `+PID` to watch a process, `-PID` after its end, because its id may be reused."""
        # The guard was killed.
        with suppress(OSError):
            self._pipe.write(f"{line}\n".encode())
            self._pipe.flush()

    @property
    def _pipe(self) -> IO[bytes]:
        assert self._popen.stdin is not None
        return self._popen.stdin


class RankProcess:
    """A child process, which runs tests until its connection is closed.

    Messages are lines of JSON. They are read without blocking, because a child may be stopped in the middle of a line.
    """

    def __init__(self, folder: Path, out: Path, err: Path, watched_by: Guard) -> None:
        """Start the process. folder: its working folder. out, err: files for its output before the first task."""
        self._guard = watched_by
        self.socket, peer = socket.socketpair()
        with peer, out.open("ab") as stdout, err.open("ab") as stderr:
            # A new session: Ctrl-C reaches pytest only, and the rank can be killed with its children.
            # -P, because the current folder may contain a json.py.
            self.popen = subprocess.Popen(
                [sys.executable, "-uPc", _START, json.dumps(import_path()), str(peer.fileno())],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[peer.fileno()],
                start_new_session=True,
            )
        watched_by.send(f"+{self.popen.pid}")
        self.idle = True
        self._received = bytearray()
        self._closed = False

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Errors are ignored, because the caller detects a dead child when it waits for the answer."""
        self.idle = False
        self.socket.settimeout(10)
        with suppress(OSError):
            self.socket.sendall(json.dumps(message, default=repr, skipkeys=True).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the complete messages received so far; None if the child has ended and all messages were returned."""
        self.socket.setblocking(False)
        while not self._closed:
            try:
                data = self.socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._closed = True
            self._received += data
        # The last line may be incomplete.
        *lines, incomplete = bytes(self._received).split(b"\n")
        self._received = bytearray(incomplete)
        messages = [_decode(line) for line in lines]
        return None if self._closed and not messages else messages

    def ended(self) -> bool:
        """Whether the process has ended. It is not reaped, to reserve its id until `kill`."""
        if self.popen.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # reaped by the test or another plugin
            return True

    def kill_disconnected(self, seconds: float = 1.0) -> int:
        """Return the exit code after the end of the connection. A child that does not end is killed."""
        deadline = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(0.005)
        running = not self.ended()
        code = self.kill()
        return LOST_CONNECTION if running else code

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait until the child has released its last test. Return whether it has, and is alive."""
        deadline = time.monotonic() + seconds
        while not self.idle:
            messages = self.receive()
            if messages is None or self.ended() or time.monotonic() > deadline:
                return False
            self.idle = any("released" in message for message in messages)
            if not self.idle:
                time.sleep(0.005)
        return not self.ended()

    def ask_for_stack(self) -> None:
        """Make the child write the stacks of all threads, even if it is blocked in C code."""
        if not self.ended():
            os.kill(self.popen.pid, STACK_SIGNAL)

    def kill(self) -> int:
        """Kill the process, its group and its descendants. Return the exit code, or the negative signal number."""
        if self.popen.returncode is None:
            guard.end(self.popen.pid)
            self._guard.send(f"-{self.popen.pid}")
            self.popen.wait()
        self.socket.close()
        return self.popen.returncode


def wait_for_stacks(files: list[Path], seconds: float = 2.0) -> None:
    """Wait until no file is empty or growing."""
    sizes: list[int] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.1)
        sizes_now = [_find_size(file) for file in files]
        if sizes_now == sizes and all(sizes_now):
            return
        sizes = sizes_now


def _find_size(file: Path) -> int:
    """Return the size of a file in bytes, 0 if it does not exist."""
    return file.stat().st_size if file.exists() else 0


def _decode(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        return {"problem": f"unexpected data from the rank's process: {line[:80]!r}"}
    return message
