"""Where a rank's process begins: it waits for tests, runs each in its pytest session, and never ends by itself.

It is ended by the pytest that started it, or when that is gone. Leaving by the interpreter's own way is avoided:
destructors of a process group may abort there.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import queue
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

from syncheck.pytest_plugin.ranks.process import STACK_SIGNAL

# Bound now: a test may patch the modules.
_encode, _fstat = json.JSONEncoder(default=repr).encode, os.fstat
# From linux/prctl.h.
_PR_SET_CHILD_SUBREAPER = 36


def main(descriptor: int, lost: str) -> None:
    """Serve tests until the other end of the connection is closed. lost: created when this end is."""
    _adopt()
    os.set_inheritable(descriptor, False)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    connection = socket.socket(fileno=descriptor)
    own, given = os.getpid(), _fstat(descriptor)[:3]
    # A process that a test forks must neither answer for the rank nor keep its connection open.
    os.register_at_fork(after_in_child=connection.close)
    messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, messages, lost), name="syncheck", daemon=True).start()

    def send(message: dict[str, Any]) -> None:
        if os.getpid() != own:
            os._exit(1)
        try:
            # The test may have closed it by its number, and opened a file that has the number now.
            if _fstat(descriptor)[:3] != given:  # mode, inode, device
                raise OSError
            connection.sendall(_encoded(message) + b"\n")
        except OSError:
            _end(lost)

    from syncheck.pytest_plugin.ranks import session

    first = messages.get()
    session.serve(first["run"], messages.get, send)
    threading.Event().wait()  # the session is over, and so is this process when pytest has read that


def _adopt() -> None:
    """Become the parent of what children of this process leave behind: so they are found when it is ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _listen(connection: socket.socket, messages: queue.SimpleQueue[dict[str, Any]], lost: str) -> None:
    """Take messages in a thread: that pytest is gone must be noticed in the middle of a test too."""
    try:
        with connection.makefile("rb") as lines:
            for line in lines:
                messages.put(json.loads(line))
    finally:
        _end(lost)


def _end(lost: str) -> None:
    """End this process, which cannot reach pytest; create the file that gives pytest the reason."""
    with suppress(OSError):
        open(lost, "ab").close()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _encoded(message: dict[str, Any]) -> bytes:
    try:
        return _encode(message).encode()
    except (TypeError, ValueError, RecursionError):  # keys that are no texts, containers that hold themselves
        return _encode(_plain(message, 0)).encode()


def _plain(value: Any, depth: int) -> Any:
    """Copy a value so that it can be sent: texts for what JSON has not."""
    if isinstance(value, dict) and depth < 20:
        return {str(key): _plain(of, depth + 1) for key, of in value.items()}
    if isinstance(value, (list, tuple)) and depth < 20:
        return [_plain(of, depth + 1) for of in value]
    return value if isinstance(value, (str, int, float, type(None))) else repr(value)[:1000]
