"""The ranks of a run find each other, or say which of them is missing, before torch connects them: the rendezvous.

torch alone waits in silence, and then names no rank. Here every rank announces itself in the store (a table of
keys and values that all of them reach), rank 0 waits for all and answers with the list of those it counted. A
rank that is not on the list has come to the meeting of another run.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from train.errors import RankError, UserError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch.distributed has no __all__

LIST, REFUSED = "list", "refused"  # keys: the tokens of those who take part, in rank order; why there is no run
POLL = 0.05  # seconds
GRACE = 0.5  # seconds for which a rank that gives up stays, so that the others can read why


@dataclass(frozen=True)
class Rank:
    """What a process announces about itself.

    token: as good as unique. machine: equal for two processes only if each sees the other's process id; empty
    where that cannot be known. started: in clock ticks after the machine's start.
    """

    rank: int
    world_size: int
    token: str
    host: str
    machine: str
    pid: int
    started: str
    backend: str | None = None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def announce(rank: int, world_size: int, backend: str | None = None) -> Rank:
    """Describe this process."""
    pid = os.getpid()
    return Rank(rank, world_size, uuid.uuid4().hex, socket.gethostname(), _machine(), pid, _started(pid), backend)


def has_ended(other: Rank) -> bool:
    """Tell whether a process is known to be gone; False where it runs on, or where nobody here can tell."""
    return _can_be_seen(other) and _started(other.pid) != other.started


def is_stopped(other: Rank) -> bool:
    """Tell whether a process is known to be stopped, by SIGSTOP or a debugger; False where nobody here can tell."""
    runs = _can_be_seen(other) and _started(other.pid) == other.started
    return runs and _fields(other.pid)[:1] in (["T"], ["t"])


def _can_be_seen(other: Rank) -> bool:
    return bool(other.machine) and other.machine == _machine()


def _machine() -> str:
    try:
        # A container may have the host's boot id and name, but process ids of its own.
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _started(pid: int) -> str:
    fields = _fields(pid)
    # A zombie has ended, only its parent has not asked yet.
    return "" if not fields or fields[0] == "Z" else fields[19]


def _fields(pid: int) -> list[str]:
    """Read fields 3 (the state) to the last of proc_pid_stat(5), of which 22 is the start; none of no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []


class Meeting:
    """One rank's part in it. where: the place, for messages. mend: what to do about a place in use."""

    def __init__(self, store: Store, me: Rank, where: str, mend: str) -> None:
        self.store, self.me, self.where, self.mend = store, me, where, mend
        self.zero: Rank | None = None  # known also when the store, which it may serve, is gone
        self.in_vain = False  # whether ranks were missing to the end: nobody can have met here then

    def meet(self, timeout: float) -> None:
        """Wait for all ranks. Raises UserError where all of them are told, else RankError."""
        start = time.monotonic()
        self._enter()
        # Rank 0 is heard out first: what it says it says once for all.
        patience = timeout if self.me.rank == 0 else timeout + 2 * GRACE
        while time.monotonic() - start <= patience:
            if self.store.check([REFUSED]):
                reason = self.store.get(REFUSED).decode()
                if self.me.rank == 0:
                    time.sleep(GRACE)  # it may be the one that serves the store to the others
                raise UserError(reason)
            if self._count() if self.me.rank == 0 else self._listed():
                self.zero = self.read(0)
                return
            time.sleep(POLL * (1 + self.me.world_size // 64))  # a thousand ranks ask one store
        missing = [r for r in range(self.me.world_size) if not self.store.check([_key(r)])]
        if missing:
            ranks = f"rank{'s' if len(missing) > 1 else ''} {in_words(missing)}"
            reason = f"{self._who()} waited {timeout:g} s at {self.where}: {ranks} did not come"
            mend = "start them, or see their own messages" if len(missing) > 1 else "start it, or see its own message"
            self.in_vain = True
            self._give_up(f"{reason}; {mend}")
        self._give_up(f"{self._who()} waited {timeout:g} s at {self.where}: rank 0 came but did not answer")

    def _enter(self) -> None:
        """Announce this rank, unless others have met here before."""
        if self.store.check([LIST]):
            raise RankError(self._foreign(self.read(0)))
        if self.store.check([REFUSED]):
            reason = self.store.get(REFUSED).decode()
            raise RankError(f"{self._who()} comes too late at {self.where}: {reason}; to start again, {self.mend}")
        if self.store.add(f"came/{self.me.rank}", 1) > 1:
            with suppress(RuntimeError):  # the other may have been stopped between the two keys
                self.store.wait([_key(self.me.rank)], timedelta(seconds=GRACE))
            self._reject(self.read(self.me.rank))
        self.store.set(_key(self.me.rank), json.dumps(asdict(self.me)))

    def _count(self) -> bool:
        """Rank 0: look whether all have come, and if so answer with the list."""
        keys = [_key(rank) for rank in range(self.me.world_size)]
        if not self.store.check(keys):
            return False
        ranks = [self.read(rank) for rank in range(self.me.world_size)]
        for other in ranks:
            self._examine(other)
        self.store.set(LIST, " ".join(other.token for other in ranks if other))
        return True

    def _listed(self) -> bool:
        """Any other rank: look whether rank 0 has answered."""
        if self.store.check([LIST]):
            if self.me.token not in self.store.get(LIST).decode().split():
                raise RankError(self._foreign(self.read(0)))
            return True
        if self.store.check([_key(0)]):
            self._examine(self.read(0))
        return False

    def _examine(self, other: Rank | None) -> None:
        """Refuse one who is gone, who counts other ranks than this one does, or who will not hear it."""
        if other is None or has_ended(other):
            self._give_up(self._foreign(other))
        if other.world_size != self.me.world_size:
            self._give_up(
                f"rank {other.rank} ({other}) was started as one of {other.world_size} ranks, "
                f"{self._who()}: give all the same number"
            )
        if other.backend != self.me.backend:  # torch would let them wait for each other
            self._give_up(
                f"rank {other.rank} ({other}) sends with {other.backend}, rank {self.me.rank} with {self.me.backend}: "
                "one sees GPUs and the other none; give all --gpus none, or mend the GPUs of one"
            )

    def _reject(self, other: Rank | None) -> NoReturn:
        """End because somebody else has this rank."""
        if other is None or has_ended(other):
            self._give_up(self._foreign(other))
        self._give_up(
            f"two processes are rank {self.me.rank} at {self.where}: this one and {other}; "
            f"give each a rank of its own, or if the other belongs to an earlier run, {self.mend}"
        )

    def _foreign(self, other: Rank | None) -> str:
        """Say that this place is not for this run. other: one of those who met here."""
        if other is None or has_ended(other):
            return f"{self.where} was left by an earlier run: {self.mend}"
        return f"{self.where} is in use by another run, or was left by it ({other} is rank {other.rank}): {self.mend}"

    def _give_up(self, reason: str) -> NoReturn:
        """Tell the ranks that wait, and end."""
        with suppress(RuntimeError):  # the store may have gone with rank 0
            # The first reason counts: of two ranks that give up at the same moment both say that one.
            reason = self.store.compare_set(REFUSED, "", reason).decode()
        time.sleep(GRACE)
        # The ranks that wait get the same text, and of those with one terminal only rank 0 prints it.
        raise UserError(reason) if self.me.rank == 0 else RankError(reason)

    def read(self, rank: int) -> Rank | None:
        """Read what a rank has announced, if it has."""
        if not self.store.check([_key(rank)]):
            return None
        try:
            return Rank(**json.loads(self.store.get(_key(rank))))
        except (ValueError, TypeError):  # of another version of this program
            return None

    def _who(self) -> str:
        return f"rank {self.me.rank} of {self.me.world_size}"


def _key(rank: int) -> str:
    return f"rank/{rank}"


def in_words(ranks: list[int]) -> str:
    """Write a list of ranks as one says it, the first ten of them."""
    names = [str(rank) for rank in ranks]
    if len(names) > 10:
        return ", ".join(names[:10]) + f" and {len(names) - 10} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
