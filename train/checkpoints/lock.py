"""The lock file in --out: it prevents two live runs with the same name.

`<out>/.<run>.lock` is created with O_EXCL, so that one run alone can create it, on network file systems too. It is one
JSON object: host, process, start time, and a token of the run. A lock of a process of this host that has ended is
replaced. Whether a process of another host still runs is unknown here, so its lock always refuses.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.checkpoints.checkpoint_files import check_writable
from train.errors import UserError

if TYPE_CHECKING:
    from train.launch import RankContext
    from train.settings import Settings

# Seconds after which a lock without content is damaged: its run may have been about to write it.
UNFINISHED = 5.0


class RunLock:
    """The lock of a run, from `acquire` to the end of the block. Checks pass if `acquire` was not called."""

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        self.out, self.run, self.ctx = settings.out, settings.run, ctx
        self.needed = settings.save_per_rank or settings.checkpoint_every is not None
        self.path = settings.out / f".{settings.run}.lock"
        # Identifies this run on all ranks; the run id does not, because --resume keeps it.
        self.token = ""
        # Whether this rank created the file.
        self.created = False

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Delete the lock file. Without an error, a collective."""
        if self.created:
            self.created = False
            with suppress(OSError):
                if self.read_owner().get("token") == self.token:
                    self.path.unlink()
        if error is None and self.token:
            self.ctx.gather(None)

    def acquire(self) -> None:
        """Acquire the lock on the first rank of each node; a collective. Raises UserError if another run holds it."""
        ctx = self.ctx
        if not self.needed:
            return
        self.token = ctx.gather(secrets.token_hex(8))[0]
        with ctx.share_errors():
            check_writable(self.out)
        # Rank 0 first: on a shared file system its lock serves all nodes.
        for leads in (ctx.is_main, ctx.local_rank == 0):
            with ctx.share_errors():
                if leads and self.read_owner().get("token") != self.token:
                    self._create()

    def check(self) -> None:
        """Raise UserError if another run has taken the lock, for example on another host. Not a collective."""
        if self.token and self.read_owner().get("token", self.token) != self.token:
            raise UserError(self._describe_refusal())

    def read_owner(self) -> dict[str, Any]:
        """Read the lock file; return an empty dict if it is missing or damaged."""
        with suppress(OSError, ValueError):
            content = json.loads(self.path.read_bytes())
            return content if isinstance(content, dict) else {}
        return {}

    def _create(self) -> None:
        """Create the lock file, after removing one of an ended process. Raises UserError if a live run holds it."""
        try:
            if self.path.exists():
                self._remove_stale()
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            content = {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "process_start": read_start_time(os.getpid()),
                "since": time.strftime("%F %T %z"),
                "token": self.token,
            }
            self.created = True
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file)
        except FileExistsError:
            raise UserError(self._describe_refusal()) from None
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error

    def _remove_stale(self) -> None:
        """Remove the lock if its process has ended. Raises UserError if that process may be alive, or OSError."""
        content, owner = self.path.read_bytes(), self.read_owner()
        if owner.get("token"):
            is_alive = owner.get("host") != socket.gethostname() or is_process_alive(owner)
        else:
            is_alive = time.time() - self.path.stat().st_mtime < UNFINISHED
        if is_alive:
            raise UserError(self._describe_refusal())
        # Another run may replace the stale lock at this moment. Its new lock must survive: move the file away first,
        # and put it back if it is not the stale one.
        moved = self.path.with_name(f"{self.path.name}.{self.token}")
        self.path.rename(moved)
        try:
            if moved.read_bytes() != content:
                os.link(moved, self.path)
        finally:
            moved.unlink()

    def _describe_refusal(self) -> str:
        owner = self.read_owner()
        holder = f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}"
        advice = "wait for it to finish, or choose another --out"
        if owner.get("host") != socket.gethostname():
            advice += f"; if that process has ended, remove {self.path}"
        return f"--out {self.out}: another run named {self.run} is writing there ({holder}); {advice}"


def is_process_alive(owner: dict[str, Any]) -> bool:
    """Return whether the process of a lock of this host still runs. Another process may have its id now."""
    try:
        os.kill(owner["pid"], 0)
    except (ProcessLookupError, KeyError, TypeError, OverflowError):
        return False
    except PermissionError:  # a process of another user
        pass
    return bool(read_start_time(owner["pid"]) == owner.get("process_start"))


def read_start_time(pid: int) -> int | None:
    """Return the start of a process in clock ticks since the start of the system; None on systems without /proc."""
    with suppress(OSError, ValueError, IndexError):
        # The name of the program, in parentheses, may contain spaces.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None
