"""A lock on --out: two live runs of one name must not remove or replace each other's files.

`<out>/.<run>.lock` holds one JSON object: which run writes, on which machine, since when, and the newest complete state
of --checkpoint-every. On one machine flock decides, and the kernel drops it when a run is killed. Some file systems
keep flock to one machine, so the lock of another machine counts as long as its run moves the time of the file.
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
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine
MACHINE = BOOT.read_text().strip() if BOOT.exists() else socket.gethostname()


class RunLock:
    """Holds the lock of a run from `take` to the end of the block; before `take`, every method permits everything."""

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        self.out, self.run, self.ctx = settings.out, settings.run, ctx
        self.wanted = settings.save_per_rank or settings.checkpoint_every is not None
        self.path = settings.out / f".{settings.run}.lock"
        self.token = ""  # the same on all ranks; not the run's id, which --resume takes over
        self.content: dict[str, Any] = {"machine": MACHINE, "host": socket.gethostname(), "pid": os.getpid()}
        self._descriptor: int | None = None
        self._seen = 0  # time of the file when another machine's lock was found in it
        self._released = threading.Event()
        self._beat = threading.Thread(target=self._show_life, daemon=True)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Release the lock, for all ranks before any goes on if there is no error; the file stays if it has a state."""
        if self._descriptor is not None:
            self._released.set()
            self._beat.join()
            with suppress(OSError):
                if self.owner().get("token") == self.token:
                    self._write(token="")
                    if self.content["state"] is None:
                        self.path.unlink()
            os.close(self._descriptor)
            self._descriptor = None
        if error is None and self.token:
            self.ctx.gather(None)

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
            start = time.monotonic()
            while True:
                with ctx.together():  # in short turns, for no rank waits longer than --timeout
                    held = not leads or self.owner().get("token") == self.token or self._try(time.monotonic() - start)
                if all(ctx.gather(held)):
                    break
                time.sleep(POLL)

    def check(self) -> None:
        """Raise UserError if another run has taken over, as after this one was suspended. No collective."""
        if self.token and self.owner().get("token", self.token) != self.token:
            raise UserError(self._refusal())

    def owner(self) -> dict[str, Any]:
        """Read what the file says; empty where there is none."""
        with suppress(OSError, ValueError):
            content = json.loads(self.path.read_text())
            return content if isinstance(content, dict) else {}
        return {}

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
                if self._is_free(descriptor, waited):
                    self.content |= {"since": time.strftime("%F %T %z"), "state": self.owner().get("state")}
                    self._descriptor = descriptor
                    self._write(token=self.token)
                    self._beat.start()
            finally:
                if not self._beat.is_alive():
                    os.close(descriptor)
                    self._descriptor = None
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error
        return self._descriptor is not None

    def _is_free(self, descriptor: int, waited: float) -> bool:
        """Find out whether no live run holds the lock, and take flock. Raises UserError where one does."""
        locks = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waited < PATIENCE:
                return False
            raise UserError(self._refusal()) from None
        except OSError:
            locks = False  # this file system has none
        file, owner = os.fstat(descriptor), self.owner()
        if file.st_nlink == 0:
            return False  # removed at the end of a run, after it was opened here
        if not owner.get("token") or (locks and owner.get("machine") == MACHINE):
            return True
        if not self._seen:
            self._seen = file.st_mtime_ns
            tell(self.ctx, f"{self.path} is of {self._holder()}: waiting {WATCH:g} s for a sign of that run")
        if file.st_mtime_ns != self._seen:
            raise UserError(self._refusal())
        return waited > WATCH

    def _write(self, token: str) -> None:
        assert self._descriptor is not None
        content = json.dumps({"token": token, **self.content}).encode()
        os.ftruncate(self._descriptor, os.pwrite(self._descriptor, content, 0))

    def _show_life(self) -> None:
        while not self._released.wait(BEAT):
            with suppress(OSError):
                os.utime(self._descriptor or self.path)

    def _holder(self) -> str:
        owner = self.owner()
        return f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}"

    def _refusal(self) -> str:
        who = f"another run named {self.run} is writing there ({self._holder()})"
        return f"--out {self.out}: {who}; wait until it has ended, or give another --out"
