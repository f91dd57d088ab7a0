"""Ranks that fall silent in the middle of `syncheck.live.check`: what do the others end with?

    python mortal.py PLACE...

For each place three ranks are forked. Rank 1, or at places of the leader rank 0, ends, stops or stays away there.
Printed is one JSON: by place, for each rank that was left, the error that it raised and its text.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from syncheck.errors import SyncheckError
from syncheck.live import check
from syncheck.live.exchange import comparison

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = 3
# Seconds. Where a rank has ended, the others learn it at once or when their messages time out; where one has stopped or
# stays away, only then.
TIMEOUT = 10
SHORT = 2


def die() -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stop this process: its connections stay open, and it does not answer."""
    os.kill(os.getpid(), signal.SIGSTOP)


def away() -> None:
    """Stay alive, and away from the call."""
    time.sleep(60)


def at_gather(number: int, end: Callable[[], None]) -> None:
    """Fall silent where the check sends its message of this number to all."""
    real, calls = dist.all_gather_object, []

    def gather(*args: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == number:
            end()
        real(*args, **options)

    dist.all_gather_object = gather


def at_bytes(end: Callable[[], None]) -> None:
    """Fall silent where the check asks for bytes."""
    real, calls = comparison.read_pieces, []

    def answer(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # after a first answer
            end()
        return real(*args)

    comparison.read_pieces = answer


def at_judging(end: Callable[[], None]) -> None:
    """Fall silent on the rank that compares, with all bytes there."""
    real = comparison.judge

    def judge(*args: Any, **options: Any) -> Any:
        real(*args, **options)
        end()

    comparison.judge = judge


# By place: the rank, what it does, and the timeout of the group.
PLACES: dict[str, tuple[int, Callable[[], None], int]] = {
    "before the call": (1, die, TIMEOUT),
    "before the first message": (1, lambda: at_gather(1, die), TIMEOUT),
    "between messages": (1, lambda: at_gather(2, die), TIMEOUT),
    "before questions": (1, lambda: at_gather(4, die), TIMEOUT),
    "before the last message": (1, lambda: at_gather(5, die), TIMEOUT),
    "the leader between messages": (0, lambda: at_gather(2, die), TIMEOUT),
    "the leader before questions": (0, lambda: at_gather(4, die), TIMEOUT),
    "the leader before the last message": (0, lambda: at_gather(5, die), TIMEOUT),
    "asked for bytes": (1, lambda: at_bytes(die), TIMEOUT),
    "judging": (0, lambda: at_judging(die), TIMEOUT),
    "stopped between messages": (1, lambda: at_gather(2, stop), SHORT),
    "stopped when asked for bytes": (1, lambda: at_bytes(stop), SHORT),
    "stopped judging": (0, lambda: at_judging(stop), SHORT),
    "never calls": (1, away, SHORT),
}


def run_rank(rank: int, place: str, folder: Path) -> None:
    """Make the check on one rank, and write what it ended with."""
    silent, fall_silent, timeout = PLACES[place]
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=timeout)
    )
    state = {"same": torch.ones(3), "a": torch.full((1 << 22,), float(rank)), "b": torch.full((1 << 22,), float(rank))}
    if rank == 2:
        state["more"] = torch.ones(2)
    dist.barrier()
    if rank == silent:
        fall_silent()
    try:
        told = f"returned {check(state).verdict}"
    except SyncheckError as error:
        told = f"{type(error).__name__}: {error}"
    (folder / "part").with_suffix(f".{rank}").write_text(told)
    os.rename(folder / f"part.{rank}", folder / f"told.{rank}")
    os._exit(0)


def run(place: str) -> dict[int, str]:
    """Fork the ranks and wait for those that are left; what does not end is ended and told of."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks: dict[int, int] = {}
        for rank in range(RANKS):
            pid = os.fork()
            if not pid:
                try:
                    run_rank(rank, place, folder)
                finally:
                    os._exit(1)
            ranks[rank] = pid
        left = [rank for rank in ranks if rank != PLACES[place][0]]
        deadline = time.monotonic() + 45
        while time.monotonic() < deadline and not all((folder / f"told.{rank}").exists() for rank in left):
            time.sleep(0.02)
        for pid in ranks.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        told = {rank: folder / f"told.{rank}" for rank in left}
        return {rank: path.read_text() if path.exists() else "hangs" for rank, path in told.items()}


if __name__ == "__main__":
    print(json.dumps({place: run(place) for place in sys.argv[1:]}))
