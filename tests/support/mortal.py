"""Ranks that stop responding in the middle of `syncheck.live.check` or `resync`: how do their peers end?

    python mortal.py POINT...

Each point forks three ranks. Rank 1, or the leader rank 0 at the leader's points, exits, stops or stays away there.
Prints one JSON object: by point and remaining rank, the class and text of its error.
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
from syncheck.live import check, resync
from syncheck.live.exchange import across_ranks
from syncheck.live.repair import state as repair_state

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = 3
# Seconds. Peers notice an exited rank at once or at the timeout of their messages; a stopped or absent rank only at the
# timeout.
TIMEOUT = 10
SHORT = 2


def die() -> None:
    """Exit at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stop this process: its connections stay open, but it does not respond."""
    os.kill(os.getpid(), signal.SIGSTOP)


def away() -> None:
    """Stay alive, but never make the call."""
    time.sleep(60)


def at_gather(number: int, end: Callable[[], None]) -> None:
    """Fail at the n-th gather of the check."""
    real, calls = dist.all_gather_object, []

    def gather(*args: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == number:
            end()
        real(*args, **options)

    dist.all_gather_object = gather


def at_bytes(end: Callable[[], None]) -> None:
    """Fail when the check requests bytes."""
    real, calls = across_ranks.read_pieces, []

    def answer(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # after the first response
            end()
        return real(*args)

    across_ranks.read_pieces = answer


def at_judging(end: Callable[[], None]) -> None:
    """Fail on the comparing rank, after it received all bytes."""
    real = across_ranks.judge

    def judge(*args: Any, **options: Any) -> Any:
        real(*args, **options)
        end()

    across_ranks.judge = judge


def at_rows() -> None:
    """Exit when bytes of a repair are due."""
    repair_state._make_row = lambda *_: os._exit(1)


# By point: the rank, its fault, and the timeout of the group.
PLACES: dict[str, tuple[int, Callable[[], None], int]] = {
    "before the call": (1, die, TIMEOUT),
    "before the first message": (1, lambda: at_gather(1, die), TIMEOUT),
    "between messages": (1, lambda: at_gather(2, die), TIMEOUT),
    "before questions": (1, lambda: at_gather(4, die), TIMEOUT),
    "before the last message": (1, lambda: at_gather(5, die), TIMEOUT),
    "the leader between messages": (0, lambda: at_gather(2, die), TIMEOUT),
    "the leader before questions": (0, lambda: at_gather(4, die), TIMEOUT),
    "the leader before the last message": (0, lambda: at_gather(5, die), TIMEOUT),
    "during a repair": (1, at_rows, TIMEOUT),
    "asked for bytes": (1, lambda: at_bytes(die), TIMEOUT),
    "judging": (0, lambda: at_judging(die), TIMEOUT),
    "stopped between messages": (1, lambda: at_gather(2, stop), SHORT),
    "stopped when asked for bytes": (1, lambda: at_bytes(stop), SHORT),
    "stopped judging": (0, lambda: at_judging(stop), SHORT),
    "never calls": (1, away, SHORT),
}


def run_rank(rank: int, place: str, folder: Path) -> None:
    """Run the check on one rank and write the outcome."""
    silent, fall_silent, timeout = PLACES[place]
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=timeout)
    )
    state = {"same": torch.ones(3), "a": torch.full((1 << 22,), float(rank)), "b": torch.full((1 << 22,), float(rank))}
    repairs = place == "during a repair"
    if rank == 2 and not repairs:
        state["more"] = torch.ones(2)
    dist.barrier()
    if rank == silent:
        fall_silent()
    try:
        report = resync(state, source=0).after if repairs else check(state)
        reports = f"returned {report.verdict}"
    except SyncheckError as error:
        reports = f"{type(error).__name__}: {error}"
    (folder / "part").with_suffix(f".{rank}").write_text(reports)
    os.rename(folder / f"part.{rank}", folder / f"told.{rank}")
    os._exit(0)


def run(place: str) -> dict[int, str]:
    """Fork the ranks and wait for the survivors; kill and report hanging ranks."""
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
        remaining = [rank for rank in ranks if rank != PLACES[place][0]]
        deadline = time.monotonic() + 45
        while time.monotonic() < deadline and not all((folder / f"told.{rank}").exists() for rank in remaining):
            time.sleep(0.02)
        for pid in ranks.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        reports = {rank: folder / f"told.{rank}" for rank in remaining}
        return {rank: path.read_text() if path.exists() else "hangs" for rank, path in reports.items()}


if __name__ == "__main__":
    print(json.dumps({place: run(place) for place in sys.argv[1:]}))
