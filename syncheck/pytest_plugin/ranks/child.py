"""Entry point of a rank's process, which receives tests and runs them in its pytest session.

The process never exits itself, because destructors of a process group may abort at interpreter exit. It is killed by
the outer pytest or by the guard.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import queue
import socket
import sys
import threading
from typing import Any

from syncheck.pytest_plugin.ranks.process import LOST_CONNECTION, STACK_SIGNAL

# Bound at import, because a test may patch these modules.
_encode, _fstat = json.JSONEncoder(default=repr, skipkeys=True).encode, os.fstat
# From linux/prctl.h.
_PR_SET_CHILD_SUBREAPER = 36


def main(descriptor: int) -> None:
    """Run tests until the connection is closed."""
    _become_subreaper()
    os.set_inheritable(descriptor, False)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    connection = socket.socket(fileno=descriptor)
    # Mode, inode and device.
    pid, identity = os.getpid(), _fstat(descriptor)[:3]
    # A process forked by a test must not send messages or keep the connection open.
    os.register_at_fork(after_in_child=connection.close)
    messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(
        target=_listen,
        args=(connection, messages),
        name="syncheck",
        daemon=True,
    ).start()

    def send(message: dict[str, Any]) -> None:
        if os.getpid() != pid:
            os._exit(1)
        try:
            # The test may have closed this file descriptor and opened another file with its number.
            if _fstat(descriptor)[:3] != identity:
                raise OSError
            connection.sendall(_encode(message).encode() + b"\n")
        except OSError:
            os._exit(LOST_CONNECTION)

    from syncheck.pytest_plugin.ranks import session

    first = messages.get()
    session.serve(first["run"], messages.get, send)
    # Wait until the outer pytest has read the last message and kills this process.
    threading.Event().wait()


def _become_subreaper() -> None:
    """Adopt orphaned descendants, which can then be found and killed with this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _listen(connection: socket.socket, messages: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Receive messages in a thread, to detect the end of pytest during a test."""
    try:
        with connection.makefile("rb") as lines:
            for line in lines:
                messages.put(json.loads(line))
    finally:
        os._exit(LOST_CONNECTION)
