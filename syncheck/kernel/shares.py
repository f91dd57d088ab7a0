"""Cut the work on one tensor over threads, where it is large enough to pay.

Reading a file, comparing and numpy's arithmetic on a block all let other threads run, so threads share the blocks of a
tensor: the first takes blocks 0, 2, 4, ... of two, and the files are still read from front to end.
"""

from __future__ import annotations

from itertools import islice
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from syncheck.dtypes import DTYPES
from syncheck.kernel.blocks import is_plain, ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from syncheck.kernel.blocks import Files
    from syncheck.snapshots import Tensor

# Bytes of all replicas: these take twenty times as long to read as a thread takes to start.
LARGE = 16 << 20

# Threads, whatever was asked for: each has blocks of its own, and more than these only wait for one another.
MOST = 64

Result = TypeVar("Result")


def run_in_shares(
    tensors: Sequence[Tensor], files: Files, work: Callable[[Iterator[tuple[int, int]], int], Result]
) -> list[Result]:
    """Call `work` with each share of the ranges of these tensors and its number; return what it returned, in order.

    The shares run at the same time. Raises what the first of them raised that failed.
    """
    jobs = _jobs(tensors, files)
    if jobs == 1:
        return [work(ranges(tensors), 0)]
    for tensor in tensors:
        files.descriptor(tensor)  # opened here, so that the threads only look them up
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def share(job: int) -> Iterator[tuple[int, int]]:
        for found in islice(ranges(tensors), job, None, jobs):
            if errors:  # also that of Ctrl-C
                return
            yield found

    def run(job: int) -> None:
        try:
            results[job] = work(share(job), job)
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that called
            errors[job] = error

    threads, own = [], [0]
    for job in range(1, jobs):
        thread = Thread(target=run, args=(job,), daemon=True)
        try:
            thread.start()
            threads.append(thread)
        except RuntimeError:  # no more threads for this user, or no room for the stack of one
            own.append(job)
    for job in own:
        run(job)
    for thread in threads:
        thread.join()
    for _, error in sorted(errors.items()):
        raise error
    return [results[job] for job in range(jobs)]


def _jobs(tensors: Sequence[Tensor], files: Files) -> int:
    """Return how many threads pay: one for what is small, in memory, or not stored as it is compared."""
    first = tensors[0]
    if (
        files.jobs == 1
        or first.numel * DTYPES[first.dtype].size * len(tensors) < LARGE
        or len({t.path for t in tensors}) > files.limit
    ):
        return 1
    if not all(is_plain(tensor) and tensor.data is None for tensor in tensors):
        return 1
    return min(files.jobs, MOST)
