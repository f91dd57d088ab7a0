"""Split the work on one large tensor between threads.

Reading files and numpy arithmetic release the GIL. Blocks are assigned to threads in turn (with two threads, the first
gets blocks 0, 2, 4, ...), so files are still read from front to end.
"""

from __future__ import annotations

from itertools import islice, takewhile
from threading import Event, Thread
from typing import TYPE_CHECKING, TypeVar

from syncheck.dtypes import DTYPES
from syncheck.kernel.blocks import is_plain, ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from syncheck.kernel.blocks import Files
    from syncheck.snapshots import Tensor

# Minimum size of all replicas together, in bytes. Reading them takes 20 times as long as starting a thread.
LARGE = 16 << 20

# Maximum number of threads, even if `jobs` is higher: each thread has its own buffers.
MOST = 64

Result = TypeVar("Result")


def run_in_shares(
    tensors: Sequence[Tensor], files: Files, work: Callable[[Iterator[tuple[int, int]], int], Result]
) -> list[Result]:
    """Call `work` with the blocks and the number of each share, in parallel. Return the results in order.

    If calls fail, raises the exception of the first share that failed.
    """
    jobs = _jobs(tensors, files)
    if jobs == 1:
        return [work(ranges(tensors), 0)]
    for tensor in _stored(tensors):
        files.descriptor(tensor)  # open all files first, because `OpenFiles` has no lock
    if _jobs(tensors, files) == 1:  # the process had too few descriptors for all of them
        return [work(ranges(tensors), 0)]
    results: dict[int, Result] = {}

    def run(job: int, failed: Event) -> None:
        results[job] = work(takewhile(lambda _: not failed.is_set(), islice(ranges(tensors), job, None, jobs)), job)

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

    threads, own = [], [0]
    try:
        for job in range(1, jobs):
            thread = Thread(target=run, args=(job,), daemon=True)
            try:
                thread.start()
                threads.append(thread)
            except RuntimeError:
                own.append(job)
        for job in own:
            run(job)
    except BaseException:  # an interrupt of this thread
        failed.set()
        raise
    finally:
        for thread in threads:  # they may read memory that the caller frees
            thread.join()
    for _, error in sorted(errors.items()):
        raise error


def _jobs(tensors: Sequence[Tensor], files: Files) -> int:
    """Return the number of threads; 1 if the tensor is small, in memory, or needs conversion."""
    first = tensors[0]
    if (
        files.jobs == 1
        or first.numel * DTYPES[first.dtype].size * len(tensors) < LARGE
        or len({t.path for t in _stored(tensors)}) > files.limit
    ):
        return 1
    if not all(is_plain(tensor) and tensor.data is None for tensor in _stored(tensors)):
        return 1
    return min(files.jobs, MOST)


def _stored(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in files: the boxes of a tensor in several boxes, else the tensor itself."""
    return [shard.tensor for tensor in tensors for shard in tensor.shards] + [t for t in tensors if not t.shards]
