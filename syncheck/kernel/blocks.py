"""Read the bytes of tensors in blocks, so that memory does not grow with the size of tensors.

A block is a range of elements in C order. Contiguous tensors are read into reused buffers. Tensors with other strides,
another byte order or a pending conjugation are read by `strided`.
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

# Bytes of a block. The fastest size between 64 KiB and 2 MiB: two blocks of 256 KiB fit into the cache of a core.
BLOCK = 1 << 18
# Bytes of the blocks of all replicas of a tensor, per thread: 1,024 different replicas must not take 1 GiB.
ALL_BLOCKS = 16 << 20
# Default number of threads. Memory bandwidth limits more threads.
JOBS = 4


class Files(OpenFiles):
    """Open files that are read in blocks.

    limit: maximum number of open files. jobs: number of threads that read a large tensor; by default the number of
    processors of this process, at most `JOBS`.
    """

    def __init__(self, limit: int = OPEN_FILES, jobs: int | None = None) -> None:
        super().__init__(limit)
        self.jobs = jobs or min(JOBS, count_processors())
        self._buffers: dict[int, bytearray] = {}

    def read(self, tensor: Tensor, start: int, count: int, slot: int) -> bytes | bytearray:
        """Return `count` elements from element `start` on, in C order, as little-endian bytes.

        The result is valid until the next call with the same slot, so each thread needs its own slots. Raises
        MalformedFile if the file has been truncated since it was opened.
        """
        if tensor.shards:
            return pieces.assemble(tensor, start, count, lambda part, at, length: self.read(part, at, length, slot))
        if is_plain(tensor):
            size = DTYPES[tensor.dtype].size
            if tensor.data is not None:
                return tensor.data[tensor.offset + start * size : tensor.offset + (start + count) * size]
            return self._pread(tensor, tensor.offset + start * size, count * size, slot)
        if not count:
            return b""
        from syncheck.kernel import strided  # needs numpy

        return strided.read_strided(self, tensor, start, count)

    def _pread(self, tensor: Tensor, offset: int, length: int, slot: int) -> bytes | bytearray:
        descriptor = self.descriptor(tensor)
        try:
            data, got = self._read_bytes(descriptor, offset, length, slot)
        except OSError as error:
            raise UnreadableFile.because(tensor.path, error) from None
        if got != length:
            raise truncated_file(tensor, f"byte {offset + length}")
        return data

    def _read_bytes(self, descriptor: int, offset: int, length: int, slot: int) -> tuple[bytes | bytearray, int]:
        """Return a buffer and the number of valid bytes in it."""
        if length < BLOCK // 4:
            short = os.pread(descriptor, length, offset)
            return short, len(short)
        # The buffer has exactly this length, so that `==` of two buffers is a memcmp.
        if len(self._buffers.get(slot, b"")) != length:
            self._buffers[slot] = bytearray(length)
        data = self._buffers[slot]
        got = os.preadv(descriptor, [data], offset)
        while 0 < got < length:  # signals and network file systems cause short reads
            more = os.preadv(descriptor, [memoryview(data)[got:]], offset + got)
            got = got + more if more else -1
        return data, got


def count_processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_elements(tensor: Tensor) -> bool:
    """Whether the elements of a whole tensor can be read.

    False for tensors that the reader refuses (sparse, quantized, meta, of an unknown dtype, ...), for fingerprints,
    which have a digest only, and for one rank's shard. Check this before any use of the dtype's size or the strides.
    """
    return not tensor.refused and tensor.digest is None and tensor.sharding is None and tensor.dtype in DTYPES


def is_plain(tensor: Tensor) -> bool:
    """Whether the bytes in the file are contiguous, in native byte order and without pending operations."""
    return (
        not tensor.lazy
        and not tensor.shards
        and tensor.big_endian == (sys.byteorder == "big")
        and is_contiguous(tensor.shape, tensor.strides)
    )


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements are contiguous in C order. Strides of dimensions of size 0 or 1 are ignored."""
    if 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def ranges(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Split tensors with the same shape and dtype into blocks: (start, count) in elements."""
    first = tensors[0]
    size = DTYPES[first.dtype].size
    block = max(4096, min(BLOCK, ALL_BLOCKS // len(tensors)))
    step = block // size
    for start in range(0, first.numel, step):
        yield start, min(step, first.numel - start)


def broken_files(replicas: Sequence[Iterable[Tensor]], first: CheckpointError) -> list[CheckpointError]:
    """Return the errors of all replicas that cannot be read any more, except the last replica if all of them fail.

    Reading the first elements detects files that were removed, truncated or overwritten. If that does not reproduce
    the error `first`, the disk fails elsewhere, so all bytes of all replicas are read.
    """
    errors = {first.path: first}
    for whole in (False, True):
        reproduced = False
        for tensors in replicas:
            try:
                with Files(jobs=1) as files:
                    for tensor in tensors:
                        if not tensor.refused and tensor.data is None and tensor.digest is None:
                            for start, count in ranges([tensor]) if whole else [(0, min(1, tensor.numel))]:
                                files.read(tensor, start, count, 0)
            except CheckpointError as error:
                reproduced |= error.path == first.path
                errors.setdefault(error.path, error)
        if reproduced:
            break
    return list(errors.values())[: max(1, len(replicas) - 1)]
