"""The lock file in --out: it prevents two live runs with the same name.

`<out>/.<run>.lock` is one JSON object: machine, host, process, start time, and the newest complete state of
--checkpoint-every. On one machine flock decides, and the kernel releases it when a run is killed. Some file systems
apply flock only within a machine. A lock from another machine is therefore valid while its run updates the file's time.
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

from train.checkpoints.checkpoint_files import check_writable
from train.errors import UserError
from train.launch.signals import print_once

if TYPE_CHECKING:
    from train.launch import RankContext
    from train.settings import Settings

BEAT = 5.0  # seconds between updates of the file's time
WATCH = 3 * BEAT  # seconds without an update after which a run on another machine is considered dead
PATIENCE = 5.0  # seconds to wait for a run on this machine, which may be exiting
POLL = 0.25
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine
MACHINE = BOOT.read_text().strip() if BOOT.exists() else socket.gethostname()


class RunLock:
    """The lock of a run, from `acquire` to the end of the block. Checks pass if `acquire` was not called."""

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        self.out, self.run, self.ctx = settings.out, settings.run, ctx
        self.wanted = settings.save_per_rank or settings.checkpoint_every is not None
        self.path = settings.out / f".{settings.run}.lock"
        self.token = ""  # identifies this run on all ranks; the run id does not, because --resume keeps it
        self.content: dict[str, Any] = {"machine": MACHINE, "host": socket.gethostname(), "pid": os.getpid()}
        self._descriptor: int | None = None
        self._seen = 0  # the file's time when first read, if a run on another machine wrote it
        self._released = threading.Event()
        self._beat = threading.Thread(target=self._refresh_lock, daemon=True)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Release the lock and delete the file, unless it records a state. Without an error, a collective."""
        if self._descriptor is not None:
            self._released.set()
            self._beat.join()
            with suppress(OSError):
                if self.read_owner().get("token") == self.token:
                    self._write(token="")
                    if self.content["state"] is None:
                        self.path.unlink()
            os.close(self._descriptor)
            self._descriptor = None
        if error is None and self.token:
            self.ctx.gather(None)

    def acquire(self) -> None:
        """Acquire the lock on the first rank of each node; a collective. Raises UserError if another run holds it."""
        ctx = self.ctx
        if not self.wanted:
            return
        self.token = ctx.gather(secrets.token_hex(8))[0]
        with ctx.together():
            check_writable(self.out)
        # Rank 0 first: on a shared file system its lock serves all nodes.
        for leads in (ctx.is_main, ctx.local_rank == 0):
            start = time.monotonic()
            while True:
                with ctx.together():  # poll, because --timeout limits each wait for another rank
                    held = (
                        not leads or self.read_owner().get("token") == self.token or self._try(time.monotonic() - start)
                    )
                if all(ctx.gather(held)):
                    break
                time.sleep(POLL)

    def check(self) -> None:
        """Raise UserError if another run has taken the lock, for example after a long suspension. Not a collective."""
        if self.token and self.read_owner().get("token", self.token) != self.token:
            raise UserError(self._describe_refusal())

    def read_owner(self) -> dict[str, Any]:
        """Read the lock file; return an empty dict if it is missing or damaged."""
        with suppress(OSError, ValueError), self.path.open("rb") as file:
            content = json.loads(file.read(4096))
            return content if isinstance(content, dict) else {}
        return {}

    def record_state(self, step: int | None) -> None:
        """Record the step of the newest complete state; None before an earlier run's states are removed."""
        if self._descriptor is not None:
            self.content["state"] = step
            with suppress(OSError):  # if the disk is full, the state itself is still complete
                self._write(token=self.token)

    def _try(self, waited: float) -> bool:
        """Acquire the lock if it is free, and return whether this run holds it. Raises UserError if a live run does."""
        try:
            # Open read-only: a file open for writing would prevent remounting the file system read-only.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CREAT, 0o666)
            try:
                if self._is_free(descriptor, waited):
                    self.content |= {"since": time.strftime("%F %T %z"), "state": self.read_owner().get("state")}
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
        """Take flock and return whether the lock is free. Raises UserError if a live run holds the lock."""
        locks = True
        try:
            self._flock(descriptor)
        except BlockingIOError:
            if waited < PATIENCE:
                return False
            raise UserError(self._describe_refusal()) from None
        except OSError:
            locks = False  # the file system lacks flock
        file, owner = os.fstat(descriptor), self.read_owner()
        if file.st_nlink == 0:
            return False  # the other run removed the file after `open`
        if not owner.get("token") or (locks and owner.get("machine") == MACHINE):
            return True
        if not self._seen:
            self._seen = file.st_mtime_ns
            print_once(
                self.ctx,
                f"{self.path} was left by {self._describe_holder()}: "
                f"waiting {WATCH:g} s to check whether that run is alive",
            )
        if file.st_mtime_ns != self._seen:
            raise UserError(self._describe_refusal())
        return waited > WATCH

    def _flock(self, descriptor: int) -> None:
        """Take flock. Raises BlockingIOError if another process holds it, or OSError if the file system lacks flock."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # NFS locks only files open for writing
            writable = os.open(self.path, os.O_RDWR)
            os.dup2(writable, descriptor)
            os.close(writable)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _write(self, token: str) -> None:
        content = json.dumps({"token": token, **self.content}).encode()
        with self.path.open("r+b") as file:
            file.truncate(file.write(content))

    def _refresh_lock(self) -> None:
        while not self._released.wait(BEAT):
            with suppress(OSError):
                os.utime(self._descriptor or self.path)

    def _describe_holder(self) -> str:
        owner = self.read_owner()
        return f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}"

    def _describe_refusal(self) -> str:
        who = f"another run named {self.run} is writing there ({self._describe_holder()})"
        return f"--out {self.out}: {who}; wait for it to finish, or choose another --out"
