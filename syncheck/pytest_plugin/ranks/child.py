"""Where a rank's process begins: it waits for tests, runs each in a nested pytest session, and never ends by itself.

It is ended by the pytest that started it, or ends itself when that is gone. Leaving by the interpreter's own way is
avoided: destructors of a process group may abort there.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from syncheck.pytest_plugin.ranks.process import STACK_SIGNAL


def main(descriptor: int) -> None:
    """Serve tests until the other end of the connection is closed."""
    os.set_inheritable(descriptor, False)
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    connection = Connection(descriptor)
    messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, messages), name="syncheck", daemon=True).start()

    def send(message: dict[str, Any]) -> None:
        connection.send_bytes(json.dumps(message, default=repr).encode())

    from syncheck.pytest_plugin.ranks import session

    frozen = False
    while True:
        message = messages.get()
        if "run" in message:
            session.run(message["run"], send)
        else:
            session.release()
            if not frozen and "torch" in sys.modules:
                # Pytest collects garbage twice a session, and torch's own objects are most of what that walks over:
                # leaving them out halves the time of a test. Once only, or each test's garbage would be kept.
                gc.collect()
                gc.freeze()
                frozen = True


def _listen(connection: Connection, messages: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Take messages in a thread: that pytest is gone must be noticed in the middle of a test too."""
    while True:
        try:
            messages.put(json.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            os.killpg(os.getpgrp(), signal.SIGKILL)
