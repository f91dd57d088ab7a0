"""Digests of bytes in the memory of the CPU: XXH3, or BLAKE2 where the package xxhash is not installed.

XXH3 reads as fast as memory gives. So that one large tensor keeps all threads busy too, the digest of more than CHUNK
bytes is that of the digests of its chunks; hashing lets other threads run.
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

CHUNK = 4 << 20  # bytes; part of the algorithm: another value makes other digests
XXH3 = "xxh3-128/4MiB"
# What every Python can compute, in one piece: the digest that fingerprints store.
COMMON = "blake2b-128"
WIDTH = 16  # bytes of a digest

# Tensors below this are hashed at once: to hand one to another thread takes as long.
SMALL = 64 << 10
# Where all tensors that are not small have fewer bytes than this together, one thread hashes them: in that time about
# ten could be started.
LARGE = 4 << 20
# More threads than these do not read faster: memory is the limit.
MAX_THREADS = 16

_READ_ONLY = 0x100  # PyBUF_READ of CPython's object.h
# Not `ctypes.pythonapi.PyMemoryView_FromMemory`: to give that its types would change it for everybody.
_view_of: Callable[[int, int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))


@functools.cache
def load_xxhash() -> Any:
    """Return the module xxhash, or None where it is not installed."""
    try:
        import xxhash
    except ImportError:
        return None
    return xxhash


def default_algorithm() -> str:
    """Return the name of the algorithm for what is on the CPU."""
    return COMMON if load_xxhash() is None else XXH3


def default_threads() -> int:
    """Return how many threads a rank may use: its share of the CPUs that this machine gives it.

    torchrun sets OMP_NUM_THREADS to 1 unless told, and LOCAL_WORLD_SIZE to the number of ranks on this machine.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = max(int(told), 1) if told.isdecimal() else 1
    given = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(given // ranks, 1), MAX_THREADS)


class Stream:
    """The digest of bytes that come in blocks, of any size: the same as that of a tensor with these bytes on the CPU.

    algorithm: XXH3 or COMMON; None is the one that `digest_all` takes. Raises UsageError where it is not to be had.
    """

    def __init__(self, algorithm: str | None = None) -> None:
        self._tree = _get_hash_factory(algorithm or default_algorithm())
        self._chunk = self._tree()
        # COMMON is one piece, however long.
        self._size = CHUNK if (algorithm or default_algorithm()) == XXH3 else sys.maxsize
        self._room = self._size
        self._done: list[bytes] = []

    def update(self, data: Any) -> None:
        """Add bytes, or anything else with a contiguous buffer."""
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        start = 0
        while start < len(view):
            if not self._room:
                self._done.append(self._chunk.digest())
                self._chunk, self._room = self._tree(), self._size
            piece = view[start : start + self._room]
            self._chunk.update(piece)
            self._room -= len(piece)
            start += len(piece)

    def digest(self) -> bytes:
        """Return the digest, 16 bytes, of all that was added so far."""
        last: bytes = self._chunk.digest()
        return _combine([*self._done, last], self._tree)


def hash_on_cpu(sources: Sequence[Any], algorithm: str, threads: int | None = None) -> list[bytes]:
    """Return the digest, 16 bytes, of each source. Raises UsageError where `algorithm` is not to be had.

    sources: strided tensors on any device, or arrays. Those in C order on the CPU are read where they lie. Of others
    parts are copied, and nothing is kept of them. threads: at most so many, None for a rank's share of the CPUs.
    """
    new = _get_hash_factory(algorithm)
    one = _get_hash_function(algorithm)
    found = [b""] * len(sources)
    pieces: dict[int, list[bytes]] = {}
    todo: deque[tuple[int, int, Any]] = deque()
    large = 0
    with parts.as_plain_tensors():
        for i, source in enumerate(sources):
            view = _get_buffer(source, i)
            if view is None:  # hashed in the thread that copies it
                large += source.nbytes
                todo.append((i, 0, source))
                pieces[i] = [b""]
            elif (size := view.nbytes) < SMALL:
                found[i] = one(view)
            else:
                large += size
                starts = range(0, size, CHUNK if algorithm == XXH3 else size)
                pieces[i] = [b""] * len(starts)
                todo.extend((i, part, view[start : start + starts.step]) for part, start in enumerate(starts))

    def work() -> None:
        with parts.as_plain_tensors():
            while todo:
                try:
                    i, part, data = todo.popleft()
                except IndexError:  # another thread took the last one
                    return
                pieces[i][part] = one(data) if isinstance(data, memoryview) else _hash_copies(data, algorithm)

    _run_in_threads(work, todo, 1 if large < LARGE else default_threads() if threads is None else threads)
    for i, told in pieces.items():
        found[i] = _combine(told, new)
    return found


def _get_hash_factory(algorithm: str) -> Callable[[], Any]:
    """Return what makes a new hash by an algorithm."""
    if algorithm == COMMON:
        return functools.partial(hashlib.blake2b, digest_size=WIDTH)
    if algorithm != XXH3:
        raise UsageError(f"digest algorithm {algorithm!r} is not known for bytes on the CPU; take {XXH3} or {COMMON}")
    if load_xxhash() is None:
        raise UsageError(f"digest algorithm {XXH3} needs the package xxhash: pip install xxhash, or take {COMMON}")
    made: Callable[[], Any] = load_xxhash().xxh3_128
    return made


def _get_hash_function(algorithm: str) -> Callable[[Any], bytes]:
    """Return the function from bytes of at most a chunk to their digest."""
    if algorithm == XXH3:
        found: Callable[[Any], bytes] = load_xxhash().xxh3_128_digest
        return found
    return lambda data: hashlib.blake2b(data, digest_size=WIDTH).digest()


def _combine(told: Sequence[bytes], new: Callable[[], Any]) -> bytes:
    if len(told) == 1:
        return told[0]
    root = new()
    root.update(b"".join(told))
    found: bytes = root.digest()
    return found


def _get_buffer(source: Any, number: int) -> memoryview | None:
    """Return the bytes of a source on the CPU as a buffer, valid as long as the source, or None where it takes copies.

    Reads the address: a tensor's own way to numpy takes five times as long, and there are thousands of small ones.
    """
    if not parts.is_torch(source):
        return memoryview(parts.array_bytes(source))
    if source.is_cpu and source.is_contiguous() and not source.is_neg() and not source.is_conj():
        size = source.nbytes
        if source.untyped_storage().nbytes() >= size + source.storage_offset() * source.element_size():
            return _view_of(source.data_ptr(), size, _READ_ONLY) if size else memoryview(b"")
    parts.require_storage(source, number)
    return None


def _hash_copies(tensor: Any, algorithm: str) -> bytes:
    """Return the digest of a tensor that is on a device, or not in C order, copied a part at a time."""
    stream = Stream(algorithm)
    for _, part in parts.iterate_parts(tensor):
        row = parts.as_bytes(part)
        for start in range(0, len(row), parts.MOST_COPIED):
            stream.update(row[start : start + parts.MOST_COPIED].cpu().numpy())
    return stream.digest()


def _run_in_threads(work: Callable[[], None], todo: deque[Any], threads: int) -> None:
    """Call `work` here and in other threads until nothing is left to do. Raises what one of them raised."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that called
            errors.append(error)
            todo.clear()

    others = [Thread(target=guarded, daemon=True) for _ in range(min(threads, len(todo)) - 1)]
    try:
        with suppress(RuntimeError):  # the system has no more threads: fewer do the same work
            for thread in others:
                thread.start()
        guarded()
    finally:
        todo.clear()
        # They read memory that the caller may free.
        for thread in others:
            if thread.ident is not None:  # it has started
                thread.join()
    if errors:
        raise errors[0]
