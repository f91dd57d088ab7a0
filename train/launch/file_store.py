"""The store in a file that all ranks reach: made, looked into before use, and removed afterwards.

torch's FileStore keeps all keys in one file and never asks whose they are; on a file that is something else it
waits for ever. So the file is read here first.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]  # torch.distributed has no __all__

from train.errors import RankError

PREFIX = "train"  # of all keys that this program writes
COUNT, CLEANUP = b"refcount/", b"cleanup/"  # keys of FileStore itself; it writes the first at once
START = struct.pack("=I", len(COUNT)) + COUNT
LONGEST_KEY = 10_000  # bytes; ours have under 100


def path_of(init_method: str) -> Path:
    """Read the path out of file:///path."""
    return Path(unquote(urlsplit(init_method).path))


def open_file_store(path: Path, timeout: float) -> Store:
    """Make the file or join those who have. Raises RankError for a place that cannot be used."""
    mend = f"remove it or name another (--init-method file://{path.with_name(path.name + '2')})"
    try:
        keys = read_keys(path)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            raise RankError(f"cannot meet in the file {path}: {error.strerror or error}; name another") from error
        raise RankError(f"cannot meet in the file {path}: {error}; name another, which need not be there") from error
    if any(not key.startswith((COUNT, CLEANUP, f"/{PREFIX}/".encode())) for key in keys):
        raise RankError(f"the file {path} was left by an earlier run of another program: {mend}")
    # No number of ranks: with one, the last FileStore to go removes the file, which nobody can time here.
    try:
        store = FileStore(str(path))
    except RuntimeError as error:  # no space left, say
        raise RankError(f"cannot meet in the file {path}: {str(error).partition(chr(10))[0]}") from error
    store.set_timeout(timedelta(seconds=timeout))
    return PrefixStore(PREFIX, store)


def read_keys(path: Path) -> set[bytes]:
    """List the keys in a store's file, which is made if it is not there.

    Records are 4 bytes of length and a key, 4 bytes of length and a value, in the byte order of this machine:
    https://github.com/pytorch/pytorch/blob/v2.6.0/torch/csrc/distributed/c10d/FileStore.cpp
    Raises OSError where there can be no such file, ValueError where there is another.
    """
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is a device or a pipe")  # one may end never, and we would remove the other
        with suppress(OSError):  # not every file system has locks
            # FileStore locks it too. Or we would see half of what a peer is writing at this moment.
            fcntl.flock(file, fcntl.LOCK_SH)
        content = file.read(len(START))
        if not START.startswith(content):
            raise ValueError("it is no file of a rendezvous")  # and may be larger than the memory
        content += file.read()
    keys: set[bytes] = set()
    at = 0
    while at < len(content):
        key, at = _record(content, at)
        if len(key) > LONGEST_KEY:
            raise ValueError("it is no file of a rendezvous")
        keys.add(key)
        _, at = _record(content, at)
    return keys


def _record(content: bytes, at: int) -> tuple[bytes, int]:
    """Read one length and as many bytes; returns also where the next begins."""
    start = at + 4
    if start <= len(content):
        end = start + struct.unpack_from("=I", content, at)[0]
        if end <= len(content):
            return content[start:end], end
    raise ValueError("it is no file of a rendezvous, or a damaged one")


def remove_when_done(path: Path, store: Store, rank: int, world_size: int, timeout: float) -> None:
    """Remove the file once every rank has said that it needs it no more; a rank that died leaves it there."""
    with suppress(OSError, RuntimeError):  # the training has ended well: a file that stays is not worth an error
        left = store.add("left", 1)
        deadline = time.monotonic() + timeout
        while rank == 0 and left < world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            left = store.add("left", 0)
        if rank == 0 and left == world_size:
            path.resolve().unlink(missing_ok=True)  # of a link, the file
