"""Tensors' bytes, block by block: what is read at a time stays small whatever a tensor's size.

A block is a range of elements in C order. Contiguous tensors are read into a buffer that is used again; tensors with
other strides, another byte order or a pending conjugation are copied from a mapping of the file, a block at a time.
"""

from __future__ import annotations

import mmap
import os
import resource
import stat
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from syncheck import pieces
from syncheck.dtypes import DTYPES
from syncheck.errors import MalformedFile, UnreadableFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from syncheck.snapshots import Tensor

# Bytes. Two blocks of 256 KiB stay in a core's cache between reading and comparing: of 64 KiB to 2 MiB the fastest.
BLOCK = 1 << 18
# All replicas' blocks of one tensor together, for each thread: 1,024 replicas that all differ must not take 1 GiB.
ALL_BLOCKS = 16 << 20
# Files held open at a time, and never more than half of what `ulimit -n` allows.
OPEN_FILES = 400
# Threads unless told: more than these wait for the same memory.
JOBS = 4


class Files:
    """Open files by path, the least recently used closed first. A context manager.

    limit: files open at a time. jobs: threads that read a large tensor at a time; None for as many as this process may
    run on, up to `JOBS`.
    """

    def __init__(self, limit: int = OPEN_FILES, jobs: int | None = None) -> None:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.limit = limit if allowed == resource.RLIM_INFINITY else max(1, min(limit, allowed // 2))
        self.jobs = jobs or min(JOBS, _processors())
        self._open: OrderedDict[str, int] = OrderedDict()
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._buffers: dict[int, bytearray] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        self._maps.clear()

    def descriptor(self, tensor: Tensor) -> int:
        """Return an open descriptor of a tensor's file, valid until `limit` others were asked for.

        Raises UnreadableFile, and MalformedFile where the file is not the one whose header was read: what lies at the
        tensor's place in another file says nothing.
        """
        path = tensor.path
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) >= self.limit:
            os.close(self._open.popitem(last=False)[1])
        try:
            # What has become a pipe would block.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _unreadable(path, error) from None
        found = os.fstat(descriptor)
        regular = stat.S_ISREG(found.st_mode)
        if not regular or not (tensor.opened is None or _is_same(tensor.opened, found)):
            os.close(descriptor)
            raise MalformedFile(
                path,
                found="it was changed since it was opened" if regular else "it is no file any more",
                next_step="run again when nothing writes it",
            )
        _read_ahead(descriptor)
        self._open[path] = descriptor
        return descriptor

    def read(self, tensor: Tensor, start: int, count: int, slot: int) -> bytes | bytearray:
        """Return `count` elements from element `start` on, in C order, as little-endian bytes.

        The result is valid until the next call with the same slot; threads use slots of their own. Raises
        MalformedFile when the file has become shorter since it was opened.
        """
        if tensor.parts:
            return pieces.assemble(tensor, start, count, lambda part, at, length: self.read(part, at, length, slot))
        if is_plain(tensor):
            size = DTYPES[tensor.dtype].size
            if tensor.data is not None:
                return tensor.data[start * size : (start + count) * size]
            return self._pread(tensor, tensor.offset + start * size, count * size, slot)
        return self._copied(tensor, start, count)

    def _pread(self, tensor: Tensor, offset: int, length: int, slot: int) -> bytes | bytearray:
        descriptor = self.descriptor(tensor)
        try:
            data, got = self._filled(descriptor, offset, length, slot)
        except OSError as error:
            raise _unreadable(tensor.path, error) from None
        if got != length:
            raise _shrunk(tensor, f"byte {offset + length}")
        return data

    def _filled(self, descriptor: int, offset: int, length: int, slot: int) -> tuple[bytes | bytearray, int]:
        """Return the bytes, and how many of them are valid."""
        if length < BLOCK // 4:
            short = os.pread(descriptor, length, offset)
            return short, len(short)
        # A buffer of exactly this length, so that two of them compare by memcmp.
        if len(self._buffers.get(slot, b"")) != length:
            self._buffers[slot] = bytearray(length)
        data = self._buffers[slot]
        got = os.preadv(descriptor, [data], offset)
        while 0 < got < length:  # a signal or a network file system may give less than asked for
            more = os.preadv(descriptor, [memoryview(data)[got:]], offset + got)
            got = got + more if more else -1
        return data, got

    def _copied(self, tensor: Tensor, start: int, count: int) -> bytes:
        if not count:
            return b""
        import numpy as np

        row = DTYPES[tensor.dtype]
        # Without dimensions of size 1: their strides mean nothing, and numpy has fewer dimensions than torch.
        shape = [n for n in tensor.shape if n != 1]
        strides = [s * row.size for n, s in zip(tensor.shape, tensor.strides, strict=True) if n != 1]
        try:
            where: Any = self._map(tensor) if tensor.data is None else tensor.data
            view: Any = np.ndarray(shape, f"V{row.size}", where, tensor.offset, strides)
        except (TypeError, ValueError):  # the mapping is shorter than the tensor, or empty
            raise _shrunk(tensor, "the tensor's last element") from None
        rows = [np.ascontiguousarray(view[box]).reshape(-1) for box in pieces.boxes(shape, start, count)]
        values = np.concatenate(rows).view(row.dtype().newbyteorder(">" if tensor.big_endian else "<"))
        if "conj" in tensor.lazy:
            values = np.conjugate(values)
        if "neg" in tensor.lazy:
            values = np.negative(values)
        return bytes(values.astype(row.dtype().newbyteorder("<"), copy=False).tobytes())

    def _map(self, tensor: Tensor) -> mmap.mmap:
        path = tensor.path
        if path not in self._maps:
            # A mapping holds a descriptor of its own: half as many again as the files, within what the system allows.
            if len(self._maps) >= max(1, self.limit // 2):
                self._maps.popitem(last=False)
            descriptor = self.descriptor(tensor)
            try:
                # A mapping costs address space only; few tensors need one.
                self._maps[path] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise _unreadable(path, error) from None
        self._maps.move_to_end(path)
        return self._maps[path]


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_ahead(descriptor: int) -> None:
    """Let the system read further ahead than it does by itself: of files that are not in memory yet."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def _is_same(before: os.stat_result, now: os.stat_result) -> bool:
    return os.path.samestat(before, now) and (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns)


def _unreadable(path: str, error: OSError) -> UnreadableFile:
    return UnreadableFile(path, found=(error.strerror or str(error)).lower())


def _shrunk(tensor: Tensor, where: str) -> MalformedFile:
    return MalformedFile(
        tensor.path,
        place=f"tensor '{tensor.name}'",
        found=f"the file ends before {where}",
        next_step="it was changed while it was read: run again when nothing writes it",
    )


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's bytes lie in the file as they are to be compared."""
    return (
        not tensor.lazy
        and not tensor.parts
        and tensor.big_endian == (sys.byteorder == "big")
        and is_contiguous(tensor.shape, tensor.strides)
    )


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie in C order without gaps. Strides of dimensions of size 1, or of no size, mean nothing."""
    if 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def ranges(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Cut tensors of one shape and dtype into (start, count) of elements that can be read at a time from each."""
    first = tensors[0]
    size = DTYPES[first.dtype].size
    block = max(4096, min(BLOCK, ALL_BLOCKS // len(tensors)))
    step = block // size
    for start in range(0, first.numel, step):
        yield start, min(step, first.numel - start)
