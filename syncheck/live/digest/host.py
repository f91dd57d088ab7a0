"""Digests of bytes in CPU memory: XXH3, or BLAKE2 without the package xxhash.

XXH3 runs at memory bandwidth. The digest of more than CHUNK bytes is the digest of its chunks' digests, so that several
threads can share one large tensor; hashing releases the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.live.digest import parts
from syncheck.tensors.blocks import count_processors, run_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from threading import Event

CHUNK = 4 << 20  # bytes; part of the algorithm: another value changes the digests
XXH3 = "xxh3-128/4MiB"
# Available in every Python, without chunks. Fingerprints store this digest.
COMMON = "blake2b-128"
WIDTH = 16  # bytes of a digest

# Smaller tensors are hashed at once: handing a tensor to another thread takes as long.
SMALL = 64 << 10
# With fewer bytes than this in all larger tensors, one thread hashes all: starting threads would take longer.
LARGE = 4 << 20
# More threads are not faster: memory bandwidth is the limit.
MAX_THREADS = 16

_READ_ONLY = 0x100  # PyBUF_READ of CPython's object.h
# A separate prototype: setting the argument types of `ctypes.pythonapi.PyMemoryView_FromMemory` would change them for
# the whole process.
_make_view: Callable[[int, int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object,
    ctypes.c_void_p,
    ctypes.c_ssize_t,
    ctypes.c_int,
)(("PyMemoryView_FromMemory", ctypes.pythonapi))


@functools.cache
def load_xxhash() -> Any:
    """Return the module xxhash, or None if it is not installed."""
    try:
        import xxhash
    except ImportError:
        return None
    return xxhash


def default_algorithm() -> str:
    """Return the name of the algorithm for CPU tensors."""
    return COMMON if load_xxhash() is None else XXH3


def default_threads() -> int:
    """Return the number of threads for one rank: its share of the CPUs available on this machine.

    torchrun sets OMP_NUM_THREADS to 1 by default, and LOCAL_WORLD_SIZE to the number of ranks on this machine.
    """
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = max(int(local_ranks), 1) if local_ranks.isdecimal() else 1
    share = max(count_processors() // ranks, 1)
    return min(share, MAX_THREADS)


class Stream:
    """An incremental digest over blocks of any size, equal to the digest of a CPU tensor with the same bytes.

    algorithm: XXH3 or COMMON.
    """

    def __init__(self, algorithm: str) -> None:
        self._new_hash = _get_hash(algorithm)
        self._chunk = self._new_hash()
        # COMMON has no chunks.
        self._size = CHUNK if algorithm == XXH3 else sys.maxsize
        self._room = self._size
        self._chunk_digests: list[bytes] = []

    def update(self, data: Any) -> None:
        """Add bytes, or any object with a contiguous buffer."""
        view = memoryview(data)
        if not view.nbytes:  # cannot be cast
            return

        view = view.cast("B")
        start = 0
        while start < len(view):
            if not self._room:
                self._chunk_digests.append(self._chunk.digest())
                self._chunk, self._room = self._new_hash(), self._size

            piece = view[start : start + self._room]
            self._chunk.update(piece)
            self._room -= len(piece)
            start += len(piece)

    def digest(self) -> bytes:
        """Return the 16-byte digest of all bytes added so far."""
        last: bytes = self._chunk.digest()
        return _combine([*self._chunk_digests, last], self._new_hash)


class _Task(NamedTuple):
    """A part of a source to hash.

    source: index of the source.
    chunk: index of the chunk in the source.
    data: the bytes in memory, or a tensor that is copied part by part.
    """

    source: int
    chunk: int
    data: Any


def hash_on_cpu(sources: Sequence[Any], algorithm: str, threads: int | None = None) -> list[bytes]:
    """Return the 16-byte digest of each source.

    sources: strided tensors on any device, or arrays. CPU memory in C order is read in place, everything else is copied
        part by part.
    threads: maximum number of threads; None for this rank's share of the CPUs.
    """
    new_hash = _get_hash(algorithm)
    digests = [b""] * len(sources)
    chunk_digests: dict[int, list[bytes]] = {}
    tasks: deque[_Task] = deque()
    total = 0
    with parts.as_plain_tensors():
        for i, source in enumerate(sources):
            view = _get_buffer(source, i)
            if view is not None and view.nbytes < SMALL:
                digests[i] = new_hash(view).digest()
                continue

            tasks_of_source = _split_source(i, source, view, algorithm)
            tasks += tasks_of_source
            chunk_digests[i] = [b""] * len(tasks_of_source)
            total += source.nbytes

    def work(_: int, failed: Event) -> None:
        with parts.as_plain_tensors():
            while tasks and not failed.is_set():
                try:
                    task = tasks.popleft()
                except IndexError:  # another thread took the last task
                    return

                chunk_digests[task.source][task.chunk] = _hash_task(task, algorithm, new_hash)

    # Small sources are hashed by now, so starting threads pays only for many bytes.
    most_threads = threads
    if total < LARGE:
        most_threads = 1
    elif most_threads is None:
        most_threads = default_threads()

    run_in_threads(work, max(min(most_threads, len(tasks)), 1))
    for i, values in chunk_digests.items():
        digests[i] = _combine(values, new_hash)

    return digests


def _split_source(number: int, source: Any, view: memoryview | None, algorithm: str) -> list[_Task]:
    """Return the tasks of a large source. view: its bytes, or None for a source that is copied in one task."""
    if view is None:
        return [_Task(number, 0, source)]

    size = CHUNK if algorithm == XXH3 else view.nbytes
    starts = range(0, view.nbytes, size)
    return [_Task(number, chunk, view[start : start + size]) for chunk, start in enumerate(starts)]


def _hash_task(task: _Task, algorithm: str, new_hash: Callable[..., Any]) -> bytes:
    if not isinstance(task.data, memoryview):
        return _hash_copies(task.data, algorithm)

    digest: bytes = new_hash(task.data).digest()
    return digest


def _get_hash(algorithm: str) -> Callable[..., Any]:
    """Return the function that creates a hash object of XXH3 or COMMON, optionally with its first bytes."""
    if algorithm == COMMON:
        return functools.partial(hashlib.blake2b, digest_size=WIDTH)
    factory: Callable[..., Any] = load_xxhash().xxh3_128
    return factory


def _combine(chunk_digests: Sequence[bytes], new_hash: Callable[..., Any]) -> bytes:
    if len(chunk_digests) == 1:
        return chunk_digests[0]

    digest: bytes = new_hash(b"".join(chunk_digests)).digest()
    return digest


def _get_buffer(source: Any, number: int) -> memoryview | None:
    """Return the source's bytes on the CPU as a buffer, valid as long as the source, or None if a copy is required.

    Reads the address directly: Tensor.numpy() takes five times as long, and models have thousands of small tensors.
    """
    if not parts.is_torch(source):
        return memoryview(parts.array_bytes(source))

    if source.is_cpu and parts.is_c_order(source):
        size = source.nbytes
        end = size + source.storage_offset() * source.element_size()
        if source.untyped_storage().nbytes() >= end:
            return _make_view(source.data_ptr(), size, _READ_ONLY) if size else memoryview(b"")

    parts.require_storage(source, number)
    return None


def _hash_copies(tensor: Any, algorithm: str) -> bytes:
    """Return the digest of a tensor on a device or not in C order, copied part by part."""
    stream = Stream(algorithm)
    for _, part in parts.iterate_parts(tensor):
        row = parts.as_bytes(part)
        for start in range(0, len(row), parts.MOST_COPIED):
            stream.update(row[start : start + parts.MOST_COPIED].cpu().numpy())
    return stream.digest()
