"""How a process ends: one message on stderr, an exit code, and on errors rank 0 first."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    from train.launch.context import RankContext

LINGER = 10.0  # seconds for rank 0 to print the error first; torchrun ends them sooner
LINGER_SLURM = 3.0  # srun ends the other ranks only with --kill-on-bad-exit


@dataclass(frozen=True)
class ExitStatus:
    """How the run of one rank ended.

    message: one line for stderr, or empty. shared: whether all ranks end with this message, and only rank 0 prints it.
    """

    code: int = 0
    message: str = ""
    shared: bool = False


INTERRUPTED = ExitStatus(128 + signal.SIGINT, "interrupted", shared=True)


def print_status(status: ExitStatus) -> None:
    """Print the message of a status to stderr, if it has one."""
    if status.message:
        print_line(f"error: {status.message}" if status.code in (1, 2) else status.message)


def print_once(ctx: RankContext, text: str) -> None:
    """Print one line to stderr on rank 0 only."""
    if ctx.is_main:
        print_line(text)


def print_line(text: str) -> None:
    """Print one line to stderr in a single write, to keep the lines of several ranks apart."""
    with suppress(OSError):  # the reader may be gone
        sys.stderr.write(f"run.py: {text}\n")
        sys.stderr.flush()


def open_closed_streams() -> None:
    """Replace stdout and stderr by /dev/null if the shell has closed them (>&-): Python sets them to None."""
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115


def exit_with_parent(clean_up: Callable[[], object] = lambda: None) -> None:
    """Start a thread to call `clean_up` and end this process when its multiprocessing parent is killed."""
    parent = parent_process()
    if parent is None:
        return

    def wait() -> None:
        connection.wait([parent.sentinel])
        clean_up()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def exit_process(code: int, *, shared: bool = False, signaled: bool = False) -> NoReturn:
    """End this process; after an error rank 0 goes first.

    shared: rank 0 prints the message of all ranks. signaled: the launcher has already signaled all ranks.

    torchrun ends all ranks when any rank has failed, and might kill rank 0 before it has printed the error. Therefore
    every other rank waits for SIGTERM, and exits with the same code.

    The interpreter is not torn down, because gloo's threads may still release the tensors of the last collective, and
    abort the process if the interpreter is gone (https://github.com/pytorch/pytorch/pull/179291; with torch 2.15 a DDP
    script of 20 lines aborted in every fifth run).
    """
    linger = 0.0
    if os.environ.get("RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" in os.environ:
        linger = LINGER
    elif "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_PROCID", "0") != "0":
        linger = LINGER_SLURM
    if linger and not signaled and (code == 2 or (code == 1 and shared)):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(linger)
    # torch 2.6 creates a temporary folder on import, which only the end of the interpreter would remove.
    folder = getattr(sys.modules.get("torch.distributed.nn.jit.instantiator"), "_TEMP_DIR", None)
    if isinstance(folder, TemporaryDirectory):
        with suppress(OSError):
            folder.cleanup()
    with suppress(OSError):  # the reader may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
