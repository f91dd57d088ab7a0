"""After a collective has failed: which rank is it that went away, or stands still?

gloo and NCCL name an address at best. On one machine every rank can look at the others' processes, which it knows from
the meeting; from other machines an answer in the store says that a rank is there, and has lost another itself.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from train.launch.meeting import Meeting, Rank, has_ended, in_words, is_stopped

if TYPE_CHECKING:
    from collections.abc import Sequence

PATIENCE = 5.0  # seconds for the other ranks to notice too; torchrun ends all 30 s after the first
GRACE = 1.0  # seconds in which a process that has lost its connections ends
POLL = 0.05  # seconds


def who_is_missing(meeting: Meeting) -> str:
    """Say which ranks have ended, are stopped or do not answer, as the object of a sentence; empty if none is known.

    Takes up to PATIENCE seconds. In a thread of its own, for a store may not answer either.
    """
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(_call(meeting)), daemon=True)
    thread.start()
    thread.join(PATIENCE + 1.0)
    if found:
        return found[0]
    return "rank 0, which has the list of all ranks and does not answer"  # it is stopped, say


def _call(meeting: Meeting) -> str:
    """Announce that this rank is there, and look for the others until each is accounted for."""
    me, store = meeting.me, meeting.store
    deadline = time.monotonic() + PATIENCE
    waiting = [rank for rank in range(me.world_size) if rank != me.rank]
    ended: list[Rank] = []
    stopped: list[Rank] = []
    try:
        store.set(_key(me.rank), "")
        known = {rank: other for rank in waiting if (other := meeting.read(rank)) is not None}
        while waiting and time.monotonic() < deadline:
            # Who has answered may have left since, and is not the one that all have lost.
            waiting = [rank for rank in waiting if not store.check([_key(rank)])]
            there = [known[rank] for rank in waiting if rank in known]
            ended = [other for other in there if has_ended(other)]
            stopped = [other for other in there if is_stopped(other)]
            if len(ended) + len(stopped) == len(waiting):
                break
            time.sleep(POLL * (1 + me.world_size // 64))
        store.set(_key(me.rank, "knows"), "")
        others = {rank for rank in range(me.world_size) if rank != me.rank}
        # The store goes with rank 0, which therefore leaves after those that still ask.
        while me.rank == 0 and time.monotonic() < deadline:
            if all(store.check([_key(rank, "knows")]) for rank in others.difference(waiting)):
                break
            time.sleep(POLL)
    except RuntimeError:  # rank 0 served the store, and has gone; first, or because it has lost another
        if meeting.zero is None or not _ends(meeting.zero):
            return ""
        return f"{_named([meeting.zero])}, which has ended: see its own message, if it has left one"
    return _sentence(ended, stopped, waiting)


def _ends(other: Rank) -> bool:
    """Tell whether a process has ended. The kernel closes its connections first, which is how it was noticed."""
    deadline = time.monotonic() + GRACE
    while not (gone := has_ended(other)) and time.monotonic() < deadline:
        time.sleep(POLL)
    return gone


def _sentence(ended: Sequence[Rank], stopped: Sequence[Rank], waiting: Sequence[int]) -> str:
    """Name those of whom most is known; who has not answered may only be slow, unless there is nobody else."""
    if ended:
        return f"{_named(ended)}, which {'has' if len(ended) == 1 else 'have'} ended"
    if stopped:
        return f"{_named(stopped)}, which {'stands' if len(stopped) == 1 else 'stand'} still: stopped by a signal"
    if len(waiting) == 1:
        return f"{_ranks(waiting)}, which does not answer"
    return f"one of {_ranks(waiting)}, which do not answer" if waiting else ""


def _named(ranks: Sequence[Rank]) -> str:
    return _ranks([other.rank for other in ranks]) + (f" ({ranks[0]})" if len(ranks) == 1 else "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {in_words(list(ranks))}"


def _key(rank: int, what: str = "lost") -> str:
    return f"{what}/{rank}"
