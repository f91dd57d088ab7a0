"""A process with limited memory, whose crash, hang or exit ends only this process.

Its function is `judge.compare_guarded`, which runs syncheck, or `oracle.load`, which runs the libraries.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
from typing import TYPE_CHECKING, Any

from fuzz.guard import preload
from fuzz.judge import compare_guarded

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

_ADDRESS_SPACE = 3 << 30
_CONTEXT = multiprocessing.get_context("spawn")


class Worker:
    """The process. It is started for the first call, and again after it died. function: of all calls."""

    def __init__(self, function: Callable[..., dict[str, Any]]) -> None:
        self.function = function
        self.process: Any = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill the process if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None

    def send(self, *arguments: str) -> None:
        """Start a call."""
        if self.process is None:
            self.pipe, theirs = _CONTEXT.Pipe()
            self.process = _CONTEXT.Process(target=_serve, args=(theirs, self.function), daemon=True)
            self.process.start()
            theirs.close()
            self.pipe.recv()  # imports are complete
        self.pipe.send(arguments)

    def receive(self, seconds: float) -> dict[str, Any]:
        """Return the result of the call, or how the process ended under `died`: hang, or exit code."""
        if not self.pipe.poll(seconds):
            self.stop()
            return {"died": "hang"}
        try:
            result: dict[str, Any] = self.pipe.recv()
        except EOFError:
            self.process.join()
            result = {"died": f"exit {self.process.exitcode}"}
            self.stop()
        return result


def _serve(connection: Connection[Any, Any], function: Callable[..., dict[str, Any]]) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)  # output of the libraries
    os.dup2(null, 2)
    if function is compare_guarded:
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
        preload()
    connection.send(None)
    while True:
        connection.send(function(*connection.recv()))
