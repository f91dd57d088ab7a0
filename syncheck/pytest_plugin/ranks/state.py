"""What a test finds in a rank's process, and what it may leave behind that would make the next one fail."""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from syncheck.pytest_plugin.ranks.guard import descendants
from syncheck.pytest_plugin.ranks.process import STACK_SIGNAL

_STREAMS = (sys.stdin, sys.stdout, sys.stderr)
_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
    signal.SIGPIPE,
)
_LIMITS = (
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_AS,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_STACK,
    resource.RLIMIT_CPU,
)
_stacks: list[Any] = []


def enter(task: dict[str, Any]) -> None:
    """Set files, folder, environment and import path as the outer pytest has them now."""
    folder = Path(task["folder"])
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        opened = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = _STREAMS
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["environment"])
    sys.path[:] = task["path"]
    stacks = (folder / "stacks").open("w")
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    while _stacks:
        _stacks.pop().close()
    _stacks.append(stacks)


def fingerprint() -> tuple[Any, ...]:
    """Return the same before and after a test that leaves nothing behind: threads, processes, signals, limits, ..."""
    umask = os.umask(0o22)
    os.umask(umask)
    torch = sys.modules.get("torch")
    return (
        {thread.ident for thread in threading.enumerate()},
        set(descendants(os.getpid())),
        [signal.getsignal(number) for number in _SIGNALS],
        signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        [resource.getrlimit(limit) for limit in _LIMITS],
        umask,
        gc.isenabled(),
        sys.getrecursionlimit(),
        [stream is None or stream.closed for stream in _STREAMS],
        # Before torch is there, it has the threads that OMP_NUM_THREADS says.
        torch.get_num_threads() if torch is not None else int(os.environ.get("OMP_NUM_THREADS", "1") or "1"),
    )
