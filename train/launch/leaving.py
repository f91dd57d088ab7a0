"""How a process ends: with one message, and not before the others can be heard."""

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

from train.launch import by_hand, slurm
from train.launch.options import LaunchOptions

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping
    from types import FrameType

    from train.launch.context import RankContext

LINGER = 10.0  # seconds that the other ranks give rank 0 to print the error; torchrun ends them sooner
LINGER_SLURM = 3.0  # srun ends them sooner with --kill-on-bad-exit only


@dataclass(frozen=True)
class Ending:
    """How the run of one rank ended.

    code: the exit code. message: one line for stderr, or empty. alike: whether all ranks end with this message,
    so that one of them says it.
    """

    code: int = 0
    message: str = ""
    alike: bool = False


INTERRUPTED = Ending(128 + signal.SIGINT, "interrupted", alike=True)


def speaks(environment: Mapping[str, str], args: argparse.Namespace | None = None) -> bool:
    """Tell whether this process says what all ranks have to say: rank 0, or each where each has its own shell."""
    options = LaunchOptions.of(args)
    if "RANK" in environment:
        return environment["RANK"] == "0"
    if slurm.recognizes(environment, options) and not by_hand.recognizes(environment, options):
        return environment["SLURM_PROCID"] == "0"
    return True


def say(ending: Ending) -> None:
    """Write the message of an ending to stderr, if it has one."""
    if ending.message:
        write_line(f"error: {ending.message}" if ending.code in (1, 2) else ending.message)


def tell(ctx: RankContext, text: str) -> None:
    """Write one line to stderr while the run goes on, once for all ranks."""
    if ctx.is_main:
        write_line(text)


def write_line(text: str) -> None:
    """Write one line to stderr in one go, so that ranks on one terminal do not mix theirs."""
    with suppress(OSError):  # whoever reads may have gone
        sys.stderr.write(f"run.py: {text}\n")
        sys.stderr.flush()


def end_with_parent(clean_up: Callable[[], object] = lambda: None) -> None:
    """Let this process end as soon as the one that started it has been killed, after `clean_up`."""
    parent = parent_process()
    if parent is None:  # not started by multiprocessing
        return

    def wait() -> None:
        connection.wait([parent.sentinel])
        clean_up()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def leave(code: int, *, alike: bool = False, told: bool = False) -> NoReturn:
    """End this process, rank 0 first where something went wrong.

    alike: rank 0 speaks for all ranks. told: the launcher has asked all ranks to end already.

    torchrun ends all ranks as soon as one has failed: were rank 1 faster, rank 0 would be killed before it
    has printed what is wrong. So the others wait to be told, and then leave with the same code.

    The interpreter is not torn down: gloo's threads may still be letting go of the last collective's tensors,
    need the interpreter for it, and abort the process when it is gone
    (https://github.com/pytorch/pytorch/pull/179291; a DDP script of 20 lines on torch 2.15 died of it in
    every fifth run).
    """
    patience = 0.0
    if os.environ.get("RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" in os.environ:
        patience = LINGER
    elif "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_PROCID", "0") != "0":
        patience = LINGER_SLURM
    if patience and not told and (code == 2 or (code == 1 and alike)):

        def go(_signal: int, _frame: FrameType | None) -> None:
            os._exit(code)

        signal.signal(signal.SIGTERM, go)
        time.sleep(patience)
    # Some torch, 2.6 for one, makes a temporary folder when it is imported, and relies on the interpreter to remove it.
    folder = getattr(sys.modules.get("torch.distributed.nn.jit.instantiator"), "_TEMP_DIR", None)
    if isinstance(folder, TemporaryDirectory):
        with suppress(OSError):
            folder.cleanup()
    with suppress(OSError):  # whoever reads may have gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
