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
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.live.digest import parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
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
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cpus // ranks, 1), MAX_THREADS)


class Stream:
    """An incremental digest over blocks of any size, equal to the digest of a CPU tensor with the same bytes.

    algorithm: XXH3 or COMMON; None for the default of `digest_all`. Raises UsageError if the algorithm is unavailable.
    """

    def __init__(self, algorithm: str | None = None) -> None:
        self._new_hash = _get_hash_factory(algorithm or default_algorithm())
        self._chunk = self._new_hash()
        # COMMON has no chunks.
        self._size = CHUNK if (algorithm or default_algorithm()) == XXH3 else sys.maxsize
        self._room = self._size
        self._chunk_digests: list[bytes] = []

    def update(self, data: Any) -> None:
        """Add bytes, or any object with a contiguous buffer."""
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
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


def hash_on_cpu(sources: Sequence[Any], algorithm: str, threads: int | None = None) -> list[bytes]:
    """Return the 16-byte digest of each source. Raises UsageError for an unavailable algorithm.

    sources: strided tensors on any device, or arrays. CPU memory in C order is read in place, everything else is copied
    part by part. threads: maximum number of threads; None for this rank's share of the CPUs.
    """
    new = _get_hash_factory(algorithm)
    hash_bytes = _get_hash_function(algorithm)
    digests = [b""] * len(sources)
    chunk_digests: dict[int, list[bytes]] = {}
    todo: deque[tuple[int, int, Any]] = deque()
    total = 0
    with parts.as_plain_tensors():
        for i, source in enumerate(sources):
            view = _get_buffer(source, i)
            if view is None:  # copied and hashed in the same thread
                total += source.nbytes
                todo.append((i, 0, source))
                chunk_digests[i] = [b""]
            elif (size := view.nbytes) < SMALL:
                digests[i] = hash_bytes(view)
            else:
                total += size
                starts = range(0, size, CHUNK if algorithm == XXH3 else size)
                chunk_digests[i] = [b""] * len(starts)
                todo.extend((i, part, view[start : start + starts.step]) for part, start in enumerate(starts))

    def work() -> None:
        with parts.as_plain_tensors():
            while todo:
                try:
                    i, part, data = todo.popleft()
                except IndexError:  # another thread took the last item
                    return
                chunk_digests[i][part] = (
                    hash_bytes(data) if isinstance(data, memoryview) else _hash_copies(data, algorithm)
                )

    _run_in_threads(work, todo, 1 if total < LARGE else default_threads() if threads is None else threads)
    for i, values in chunk_digests.items():
        digests[i] = _combine(values, new)
    return digests


def _get_hash_factory(algorithm: str) -> Callable[[], Any]:
    """Return a function that creates a hash object of the algorithm."""
    if algorithm == COMMON:
        return functools.partial(hashlib.blake2b, digest_size=WIDTH)
    if algorithm != XXH3:
        raise UsageError(f"digest algorithm {algorithm!r} is unavailable on the CPU; choose {XXH3} or {COMMON}")
    if load_xxhash() is None:
        raise UsageError(f"digest algorithm {XXH3} requires the package xxhash; pip install xxhash, or choose {COMMON}")
    factory: Callable[[], Any] = load_xxhash().xxh3_128
    return factory


def _get_hash_function(algorithm: str) -> Callable[[Any], bytes]:
    """Return the function from the bytes of at most one chunk to their digest."""
    if algorithm == XXH3:
        function: Callable[[Any], bytes] = load_xxhash().xxh3_128_digest
        return function
    return lambda data: hashlib.blake2b(data, digest_size=WIDTH).digest()


def _combine(chunk_digests: Sequence[bytes], new: Callable[[], Any]) -> bytes:
    if len(chunk_digests) == 1:
        return chunk_digests[0]
    combined = new()
    combined.update(b"".join(chunk_digests))
    digest: bytes = combined.digest()
    return digest


def _get_buffer(source: Any, number: int) -> memoryview | None:
    """Return the source's bytes on the CPU as a buffer, valid as long as the source, or None if a copy is required.

    Reads the address directly: Tensor.numpy() takes five times as long, and models have thousands of small tensors.
    """
    if not parts.is_torch(source):
        return memoryview(parts.array_bytes(source))
    if source.is_cpu and source.is_contiguous() and not source.is_neg() and not source.is_conj():
        size = source.nbytes
        if source.untyped_storage().nbytes() >= size + source.storage_offset() * source.element_size():
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


def _run_in_threads(work: Callable[[], None], todo: deque[Any], threads: int) -> None:
    """Call `work` in this and other threads until the queue is empty. Raises the first error of any thread."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            errors.append(error)
            todo.clear()

    others = [Thread(target=guarded, daemon=True) for _ in range(min(threads, len(todo)) - 1)]
    try:
        with suppress(RuntimeError):  # with fewer threads than planned, the result is the same
            for thread in others:
                thread.start()
        guarded()
    finally:
        todo.clear()
        # The threads read memory that the caller may free.
        for thread in others:
            if thread.ident is not None:  # started
                thread.join()
    if errors:
        raise errors[0]
