"""Read the bytes of tensors in blocks, so that memory does not grow with the size of tensors.

A block is a range of elements in C order. Contiguous tensors are read into reused buffers. Tensors with other strides,
another byte order or a pending conjugation are read by `strided`.

Threads share the work on a large tensor: reading files and numpy arithmetic release the GIL. Blocks are assigned to
threads in turn (with two threads, the first gets blocks 0, 2, 4, ...), so files are still read from front to end.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from itertools import islice
from threading import Event, Thread
from typing import TYPE_CHECKING, TypeVar

from syncheck.errors import CheckpointError, UnreadableFile
from syncheck.tensors import pieces
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.open_files import OPEN_FILES, OpenFiles, truncated_file
from syncheck.tensors.traffic import TRAFFIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from syncheck.snapshots import Tensor

# Minimum size of all replicas together, in bytes. Reading them takes 20 times as long as starting a thread.
LARGE = 16 << 20
# Maximum number of threads, even if `jobs` is higher: each thread has its own buffers.
MOST_THREADS = 64
Result = TypeVar("Result")

# Bytes of a block. The fastest size between 64 KiB and 2 MiB: two blocks of 256 KiB fit into the cache of a core.
BLOCK = 1 << 18
# Bytes of the blocks of all replicas of a tensor, per thread: 1,024 different replicas must not take 1 GiB.
ALL_BLOCKS = 16 << 20
# Default number of threads. Memory bandwidth limits more threads.
JOBS = 4


class Files(OpenFiles):
    """Open files that are read in blocks.

    limit: maximum number of open files.
    jobs: number of threads that read a large tensor; by default the number of processors of this process, at most
        `JOBS`.
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

            def fetch(part: Tensor, start: int, count: int) -> bytes | bytearray:
                return self.read(part, start, count, slot)

            return pieces.assemble(
                tensor,
                start,
                count,
                fetch,
            )

        if is_plain(tensor):
            size = DTYPES[tensor.dtype].size
            offset = tensor.offset + start * size
            length = count * size
            if tensor.data is not None:
                return tensor.data[offset : offset + length]

            return self._pread(
                tensor,
                offset,
                length,
                slot,
            )

        # numpy cannot join the elements of no box.
        if not count:
            return b""

        from syncheck.tensors import strided  # needs numpy

        return strided.read_strided(
            self,
            tensor,
            start,
            count,
        )

    def _pread(self, tensor: Tensor, offset: int, length: int, slot: int) -> bytes | bytearray:
        descriptor = self.descriptor(tensor)
        try:
            data, valid = self._read_bytes(descriptor, offset, length, slot)
        except OSError as error:
            raise UnreadableFile.because(tensor.path, error) from None

        if valid != length:
            raise truncated_file(tensor, f"byte {offset + length}")

        TRAFFIC.read += length
        return data

    def _read_bytes(self, descriptor: int, offset: int, length: int, slot: int) -> tuple[bytes | bytearray, int]:
        """Return a buffer and the number of valid bytes in it."""
        if length < BLOCK // 4:
            data = os.pread(descriptor, length, offset)
            return data, len(data)

        # The buffer has exactly this length, so that `==` of two buffers is a memcmp.
        buffer = self._buffers.get(slot)
        if buffer is None or len(buffer) != length:
            buffer = bytearray(length)
            self._buffers[slot] = buffer

        valid = os.preadv(descriptor, [buffer], offset)
        # Signals and network file systems cause short reads.
        while 0 < valid < length:
            remaining = memoryview(buffer)[valid:]
            more = os.preadv(descriptor, [remaining], offset + valid)
            if not more:
                break  # the end of the file

            valid += more

        return buffer, valid


def count_processors() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))

    return os.cpu_count() or 1


def has_elements(tensor: Tensor) -> bool:
    """Whether the elements of a whole tensor can be read.

    False for tensors that the reader refuses (sparse, quantized, meta, of an unknown dtype, ...), for fingerprints,
    which have a digest only, and for one rank's shard. Check this before any use of the dtype's size or the strides.
    """
    if tensor.refused or tensor.dtype not in DTYPES:
        return False

    # A fingerprint has no elements.
    if tensor.digest is not None:
        return False

    return tensor.sharding is None


def is_plain(tensor: Tensor) -> bool:
    """Whether the bytes in the file are contiguous, in native byte order and without pending operations."""
    if tensor.lazy or tensor.shards:
        return False

    is_native = tensor.big_endian == (sys.byteorder == "big")
    return is_native and is_contiguous(tensor.shape, tensor.strides)


# Replicas and layers have the same few shapes, and each block that is read asks for its tensor.
@lru_cache(maxsize=1024)
def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements are contiguous in C order. Strides of dimensions of size 0 or 1 are ignored."""
    if 0 in shape:
        return True

    # The stride of the last dimension is 1, and that of each other one the elements of the dimensions after it.
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
    # Many replicas share the memory for blocks, down to the size of a page.
    share = ALL_BLOCKS // len(tensors)
    block = max(4096, min(BLOCK, share))
    step = block // size
    for start in range(0, first.numel, step):
        yield start, min(step, first.numel - start)


def broken_files(replicas: Sequence[Iterable[Tensor]], first: CheckpointError) -> list[CheckpointError]:
    """Return the errors of all replicas that cannot be read any more, except the last replica if all of them fail.

    Reading the first elements detects files that were removed, truncated or overwritten. If that does not reproduce
    the error `first`, the disk fails elsewhere, so all bytes of all replicas are read.
    """
    errors = {first.path: first}
    for only_first_elements in (True, False):
        read_errors = _find_read_errors(replicas, only_first_elements=only_first_elements)
        for path, error in read_errors.items():
            errors.setdefault(path, error)

        if first.path in read_errors:
            break

    most_errors = max(1, len(replicas) - 1)
    return list(errors.values())[:most_errors]


def _find_read_errors(replicas: Iterable[Iterable[Tensor]], *, only_first_elements: bool) -> dict[str, CheckpointError]:
    """Return the error of each replica that cannot be read, by path."""
    errors: dict[str, CheckpointError] = {}
    for tensors in replicas:
        try:
            _read_stored_tensors(tensors, only_first_elements=only_first_elements)
        except CheckpointError as error:
            errors.setdefault(error.path, error)

    return errors


def _read_stored_tensors(tensors: Iterable[Tensor], *, only_first_elements: bool) -> None:
    """Read the tensors of one replica. Raises CheckpointError."""
    with Files(jobs=1) as files:
        for tensor in tensors:
            if tensor.refused:
                continue

            # These have no bytes in a file.
            if tensor.data is not None or tensor.digest is not None:
                continue

            blocks = ranges([tensor])
            if only_first_elements:
                blocks = iter([(0, min(1, tensor.numel))])

            for start, count in blocks:
                files.read(tensor, start, count, 0)


def run_in_shares(
    tensors: Sequence[Tensor], files: Files, work: Callable[[Iterator[tuple[int, int]], int], Result]
) -> list[Result]:
    """Call `work` with the blocks and the number of each share, in parallel. Return the results in order.

    If calls fail, raises the exception of the first share that failed.
    """
    jobs = _choose_jobs(tensors, files)
    # Open all files before the threads start, because `OpenFiles` has no lock.
    if jobs > 1:
        for tensor in _list_stored(tensors):
            files.descriptor(tensor)
        # Opening may have lowered the limit of open files, because the process ran out of descriptors.
        jobs = _choose_jobs(tensors, files)

    if jobs == 1:
        return [work(ranges(tensors), 0)]

    results: dict[int, Result] = {}

    def iterate_share(job: int, failed: Event) -> Iterator[tuple[int, int]]:
        for block in islice(ranges(tensors), job, None, jobs):
            if failed.is_set():
                return

            yield block

    def run(job: int, failed: Event) -> None:
        results[job] = work(iterate_share(job, failed), job)

    run_in_threads(run, jobs)
    return [results[job] for job in range(jobs)]


def run_in_threads(work: Callable[[int, Event], None], jobs: int) -> None:
    """Call `work` with the numbers 0 to jobs - 1 in this and other threads, and wait for all calls.

    Each call also gets an event that is set if any call fails. Raises the exception of the first job that failed. If
    the system has no more threads, or no memory for a stack, this thread does the remaining jobs.
    """
    failed = Event()
    errors: dict[int, BaseException] = {}

    def run(job: int) -> None:
        try:
            work(job, failed)
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            errors[job] = error
            failed.set()

    threads = []
    jobs_of_this_thread = [0]
    try:
        for job in range(1, jobs):
            thread = Thread(target=run, args=(job,), daemon=True)
            try:
                thread.start()
                threads.append(thread)
            except RuntimeError:
                jobs_of_this_thread.append(job)

        for job in jobs_of_this_thread:
            run(job)
    except BaseException:  # an interrupt of this thread
        failed.set()
        raise
    finally:
        for thread in threads:  # they may read memory that the caller frees
            thread.join()

    if errors:
        raise errors[min(errors)]


def _choose_jobs(tensors: Sequence[Tensor], files: Files) -> int:
    """Return the number of threads; 1 if the tensor is small, in memory, or needs conversion."""
    first = tensors[0]
    size = DTYPES[first.dtype].size
    all_bytes = first.numel * size * len(tensors)
    if files.jobs == 1 or all_bytes < LARGE:
        return 1

    paths = set()
    for tensor in _list_stored(tensors):
        if tensor.data is not None:
            return 1

        if not is_plain(tensor):
            return 1

        paths.add(tensor.path)

    # Threads must not close the files of each other.
    if len(paths) > files.limit:
        return 1

    return min(files.jobs, MOST_THREADS)


def _list_stored(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in files: the boxes of a tensor in several boxes, else the tensor itself."""
    stored_tensors = []
    for tensor in tensors:
        if tensor.shards:
            stored_tensors += [shard.tensor for shard in tensor.shards]
        else:
            stored_tensors.append(tensor)

    return stored_tensors
