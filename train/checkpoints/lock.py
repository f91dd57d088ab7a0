"""The lock on --out, with which a live run keeps a second run of its name out.

`<out>/.<run>.lock` holds one JSON object: run, machine, start time, and the newest complete state of
--checkpoint-every. On one machine flock decides, and the kernel drops it when a run is killed. Some file systems keep
flock to one machine, so the lock of another machine counts as long as its run touches the file.
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
from train.launch.exits import print_once

if TYPE_CHECKING:
    from train.launch import RankContext
    from train.settings import Settings

BEAT = 5.0  # seconds between two touches of the file
WATCH = 3 * BEAT  # seconds without a touch after which the run of another machine counts as dead
PATIENCE = 5.0  # seconds to wait for a run of this machine, which may just have been killed
POLL = 0.25
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine
MACHINE = BOOT.read_text().strip() if BOOT.exists() else socket.gethostname()


class RunLock:
    """Hold the lock of a run from `take` to the end of the block; without `take`, every check passes."""

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        self.out, self.run, self.ctx = settings.out, settings.run, ctx
        self.wanted = settings.save_per_rank or settings.checkpoint_every is not None
        self.path = settings.out / f".{settings.run}.lock"
        self.token = ""  # the same on all ranks, unlike any other run's; --resume keeps the run id
        self.content: dict[str, Any] = {"machine": MACHINE, "host": socket.gethostname(), "pid": os.getpid()}
        self._descriptor: int | None = None
        self._seen = 0  # time of the file at the first look, if another machine's run has written it
        self._released = threading.Event()
        self._beat = threading.Thread(target=self._show_life, daemon=True)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Release the lock, without an error for all ranks at once; keep the file if it names a state."""
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
        """Take the lock on the first rank of each node; a collective. Raises UserError if another run holds it."""
        ctx = self.ctx
        if not self.wanted:
            return
        self.token = ctx.gather(secrets.token_hex(8))[0]
        with ctx.together():
            check_writable(self.out)
        # Rank 0 first: its lock serves all nodes of a shared folder.
        for leads in (ctx.is_main, ctx.local_rank == 0):
            start = time.monotonic()
            while True:
                with ctx.together():  # in short turns, because --timeout limits each wait for another rank
                    held = not leads or self.owner().get("token") == self.token or self._try(time.monotonic() - start)
                if all(ctx.gather(held)):
                    break
                time.sleep(POLL)

    def check(self) -> None:
        """Raise UserError if another run has taken over, as after a long suspension. No collective."""
        if self.token and self.owner().get("token", self.token) != self.token:
            raise UserError(self._refusal())

    def owner(self) -> dict[str, Any]:
        """Read the file; return an empty dict if it is missing or damaged."""
        with suppress(OSError, ValueError), self.path.open("rb") as file:
            content = json.loads(file.read(4096))
            return content if isinstance(content, dict) else {}
        return {}

    def completed(self, step: int | None) -> None:
        """Record the newest complete state, or None before the states of an earlier run are removed."""
        if self._descriptor is not None:
            self.content["state"] = step
            with suppress(OSError):  # a full disk: the state itself is complete
                self._write(token=self.token)

    def _try(self, waited: float) -> bool:
        """Take the lock if it is free and return whether this run holds it. Raises UserError if a live run does."""
        try:
            # Not open for writing while the run lasts: a disk with such files cannot be made read-only.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CREAT, 0o666)
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
        """Take flock and return whether no live run holds the lock. Raises UserError if a live run does."""
        locks = True
        try:
            self._flock(descriptor)
        except BlockingIOError:
            if waited < PATIENCE:
                return False
            raise UserError(self._refusal()) from None
        except OSError:
            locks = False  # this file system has no flock
        file, owner = os.fstat(descriptor), self.owner()
        if file.st_nlink == 0:
            return False  # the other run has removed the file since `open`
        if not owner.get("token") or (locks and owner.get("machine") == MACHINE):
            return True
        if not self._seen:
            self._seen = file.st_mtime_ns
            print_once(
                self.ctx, f"{self.path} was left by {self._holder()}: waiting {WATCH:g} s to see if that run is alive"
            )
        if file.st_mtime_ns != self._seen:
            raise UserError(self._refusal())
        return waited > WATCH

    def _flock(self, descriptor: int) -> None:
        """Take flock. Raises BlockingIOError if it is taken, and another OSError if the file system has none."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # NFS locks only files that are open for writing
            writable = os.open(self.path, os.O_RDWR)
            os.dup2(writable, descriptor)
            os.close(writable)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _write(self, token: str) -> None:
        content = json.dumps({"token": token, **self.content}).encode()
        with self.path.open("r+b") as file:
            file.truncate(file.write(content))

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
