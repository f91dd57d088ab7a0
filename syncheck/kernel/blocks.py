"""Tensors' bytes, block by block: what is read at a time stays small whatever a tensor's size.

A block is a range of elements in C order. Contiguous tensors are read into a buffer that is used again; tensors with
other strides, another byte order or a pending conjugation are gathered, a block at a time.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from syncheck.dtypes import DTYPES
from syncheck.errors import CheckpointError, UnreadableFile
from syncheck.kernel import pieces
from syncheck.kernel.open_files import OPEN_FILES, OpenFiles, truncated_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from syncheck.snapshots import Tensor

# Bytes. Two blocks of 256 KiB stay in a core's cache between reading and comparing: of 64 KiB to 2 MiB the fastest.
BLOCK = 1 << 18
# All replicas' blocks of one tensor together, for each thread: 1,024 replicas that all differ must not take 1 GiB.
ALL_BLOCKS = 16 << 20
# Threads unless told: more than these wait for the same memory.
JOBS = 4


class Files(OpenFiles):
    """Open files, and what is read of them block by block.

    limit: files open at a time. jobs: threads that read a large tensor at a time; None for as many as this process may
    run on, up to `JOBS`.
    """

    def __init__(self, limit: int = OPEN_FILES, jobs: int | None = None) -> None:
        super().__init__(limit)
        self.jobs = jobs or min(JOBS, _processors())
        self._buffers: dict[int, bytearray] = {}

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
        if not count:
            return b""
        from syncheck.kernel import strided  # it needs numpy

        return strided.read_strided(self, tensor, start, count)

    def _pread(self, tensor: Tensor, offset: int, length: int, slot: int) -> bytes | bytearray:
        descriptor = self.descriptor(tensor)
        try:
            data, got = self._filled(descriptor, offset, length, slot)
        except OSError as error:
            raise UnreadableFile.because(tensor.path, error) from None
        if got != length:
            raise truncated_file(tensor, f"byte {offset + length}")
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


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def broken_files(replicas: Sequence[Iterable[Tensor]], first: CheckpointError) -> list[CheckpointError]:
    """Return an error for each replica that broke like the first, but for the last replica if all of them did.

    Files that were removed, cut or overwritten are found by their first elements. Where `first` is of an unchanged
    file, its disk fails, and all bytes of all replicas are read.
    """
    found = {first.path: first}
    for whole in (False, True):
        again = False
        for tensors in replicas:
            try:
                with Files(jobs=1) as files:
                    for tensor in tensors:
                        if not tensor.refused and tensor.data is None and tensor.digest is None:
                            for start, count in ranges([tensor]) if whole else [(0, min(1, tensor.numel))]:
                                files.read(tensor, start, count, 0)
            except CheckpointError as error:
                again |= error.path == first.path
                found.setdefault(error.path, error)
        if again:
            break
    return list(found.values())[: max(1, len(replicas) - 1)]
