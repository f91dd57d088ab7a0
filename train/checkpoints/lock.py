"""A lock on --out: two live runs of one name must not remove or replace each other's files.

`<out>/.<run>.lock` holds one JSON object: which run writes, on which machine, since when, and the newest state that
--checkpoint-every has completed. On one machine flock decides, and the kernel drops it when a run is killed. A file
system may keep flock to one machine (Lustre without -o flock, NFS with nolock), so the lock of another machine counts
as long as its run moves the time of the file.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.checkpoints.files import check_writable
from train.errors import UserError
from train.launch import tell

if TYPE_CHECKING:
    from train.launch import RankContext
    from train.settings import Settings

BEAT = 5.0  # seconds between two signs of life
WATCH = 3 * BEAT  # seconds without one after which the run of another machine counts as dead
PATIENCE = 5.0  # seconds that a run of this machine gets to end, as one that was just killed
POLL = 0.25


def machine() -> str:
    """Identify this boot of this machine, the same in all of its containers."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


class RunLock:
    """Holds the lock of a run from `take` to the end of the block; before `take`, every method permits everything."""

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        self.out, self.run, self.ctx = settings.out, settings.run, ctx
        self.wanted = settings.save_per_rank or settings.checkpoint_every is not None
        self.path = settings.out / f".{settings.run}.lock"
        self.token = ""  # the same on all ranks; not the run's id, which --resume takes over
        self.content: dict[str, Any] = {}
        self._descriptor: int | None = None
        self._seen = 0  # time of the file when another machine's lock was found in it
        self._released = threading.Event()
        self._beat = threading.Thread(target=self._show_life, daemon=True)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Release the lock, on all ranks after the same moment if there is no error."""
        self._release()
        if error is None and self.token:
            self.ctx.gather(None)

    def _release(self) -> None:
        """Release the lock; the file stays if it names a state."""
        if self._descriptor is None:
            return
        self._released.set()
        self._beat.join()
        with suppress(OSError):
            if self.owner().get("token") == self.token:
                self._write(token="")
                if self.content["state"] is None:
                    self.path.unlink()
        os.close(self._descriptor)
        self._descriptor = None

    def take(self) -> None:
        """Take the lock, on the first rank of each node; a collective. Raises UserError while another run holds it."""
        ctx = self.ctx
        if not self.wanted:
            return
        self.token = ctx.gather(secrets.token_hex(8))[0]
        with ctx.together():
            check_writable(self.out)
        # Rank 0 first: in a folder that nodes share, its lock is that of all.
        for leads in (ctx.is_main, ctx.local_rank == 0):
            start, held = time.monotonic(), False
            while not held:
                with ctx.together():  # in short turns, for no rank waits longer than --timeout
                    mine = not leads or self._is_ours() or self._try(time.monotonic() - start)
                held = all(ctx.gather(mine))
                if not held:
                    time.sleep(POLL)

    def _is_ours(self) -> bool:
        return self._descriptor is not None or self.owner().get("token") == self.token

    def check(self) -> None:
        """Raise UserError if another run has taken over, as after this one was suspended. No collective."""
        if self.token and (owner := self.owner()).get("token", self.token) != self.token:
            raise UserError(self._refusal(owner))

    def owner(self) -> dict[str, Any]:
        """Read what the file says; empty where there is none."""
        try:
            content = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def completed(self, step: int | None) -> None:
        """Note the newest complete state; None before those of an earlier run are removed."""
        if self._descriptor is not None:
            self.content["state"] = step
            with suppress(OSError):  # a full disk: the state itself is complete
                self._write(token=self.token)

    def _try(self, waited: float) -> bool:
        """Take the lock if no live run holds it; returns whether that is done. Raises UserError where one does."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if not self._is_free(descriptor, waited):
                    return False
                state, since = self.owner().get("state"), time.strftime("%F %T %z")
                me = {"machine": machine(), "host": socket.gethostname(), "pid": os.getpid()}
                self.content = {**me, "since": since, "state": state}
                self._descriptor = descriptor
                self._write(token=self.token)
                self._beat.start()
            finally:
                if not self._beat.ident:
                    self._descriptor = None
                    os.close(descriptor)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error
        return True

    def _is_free(self, descriptor: int, waited: float) -> bool:
        """Find out whether no live run holds the lock, and take flock. Raises UserError where one does."""
        locks = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waited < PATIENCE:
                return False
            raise UserError(self._refusal(self.owner())) from None
        except OSError:
            locks = False  # this file system has none
        file, owner = os.fstat(descriptor), self.owner()
        if file.st_nlink == 0:
            return False  # removed at the end of a run, after it was opened here
        if not owner.get("token") or (locks and owner.get("machine") == machine()):
            return True
        if not self._seen:
            tell(self.ctx, f"{self.path} is of {_who(owner)}: waiting {WATCH:g} s for a sign that this run is alive")
        self._seen = self._seen or file.st_mtime_ns
        if file.st_mtime_ns != self._seen:
            raise UserError(self._refusal(owner))
        return waited > WATCH

    def _write(self, token: str) -> None:
        assert self._descriptor is not None
        content = json.dumps({"token": token, **self.content}).encode()
        os.ftruncate(self._descriptor, os.pwrite(self._descriptor, content, 0))

    def _show_life(self) -> None:
        while not self._released.wait(BEAT):
            with suppress(OSError):
                os.utime(self._descriptor or self.path)

    def _refusal(self, owner: dict[str, Any]) -> str:
        who = f"another run named {self.run} is writing there ({_who(owner)})"
        return f"--out {self.out}: {who}; wait until it has ended, or give another --out"


def _who(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}"
