"""Keep a limited number of files open, and detect files that change during the comparison."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import stat
from collections import OrderedDict
from typing import TYPE_CHECKING

from syncheck.errors import MalformedFile, UnreadableFile

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from syncheck.snapshots import Tensor

# Maximum number of open files, and never more than half of `ulimit -n`.
OPEN_FILES = 400


class OpenFiles:
    """A least-recently-used cache of open files by path. A context manager.

    Closing raises MalformedFile if the file has changed since it was opened. limit: maximum number of open files.
    """

    def __init__(self, limit: int = OPEN_FILES) -> None:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if allowed != resource.RLIM_INFINITY:
            limit = max(1, min(limit, allowed // 2))

        self.limit = limit
        self._open: OrderedDict[str, int] = OrderedDict()
        self._stats: dict[str, os.stat_result] = {}
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._maps.clear()
        changed = [path for path in [*self._open] if not self._close(path)]
        # An error of the comparison comes first.
        if changed and error is None:
            raise _changed_file(changed[0])

    def descriptor(self, tensor: Tensor) -> int:
        """Return a descriptor of a tensor's file, valid until `limit` other files have been opened.

        Raises UnreadableFile, or MalformedFile if the file is not the file whose header was read: the tensor's offset
        has no meaning in another file.
        """
        path = tensor.path
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]

        if len(self._open) >= self.limit:
            self._close_oldest()

        descriptor = self._open_file(path)
        status = os.fstat(descriptor)
        problem = _find_problem(tensor, status)
        if problem is not None:
            os.close(descriptor)
            raise _changed_file(path, problem)

        _read_ahead(descriptor)
        self._open[path] = descriptor
        self._stats[path] = status
        return descriptor

    def _open_file(self, path: str) -> int:
        """Return a new descriptor. Raises UnreadableFile."""
        while True:
            try:
                # O_NONBLOCK: the path may be a pipe by now, and opening a pipe blocks.
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                is_out_of_descriptors = error.errno == errno.EMFILE
                if not is_out_of_descriptors or not self._open:
                    raise UnreadableFile.because(path, error) from None

            self._make_room()

    def close_all(self) -> None:
        """Close all files, so that another comparison may open as many. Raises MalformedFile for a changed file."""
        self._maps.clear()
        while self._open:
            self._close_oldest()

    def _make_room(self) -> None:
        """Close a file and all mappings, after the process ran out of descriptors.

        Other users of the process hold descriptors, too. The smaller limit leaves room for them from now on.
        """
        self._maps.clear()
        self.limit = max(1, len(self._open) - 1)
        self._close_oldest()

    def _close_oldest(self) -> None:
        oldest = next(iter(self._open))
        if not self._close(oldest):
            raise _changed_file(oldest)

    def _close(self, path: str) -> bool:
        """Close a file. Return False if the file has changed: the bytes read may mix two states."""
        descriptor = self._open.pop(path)
        is_unchanged = _is_same(self._stats.pop(path), os.fstat(descriptor))
        os.close(descriptor)
        return is_unchanged

    def mapping(self, tensor: Tensor) -> mmap.mmap:
        """Return a mapping of a tensor's file. Raises as `descriptor` does."""
        path = tensor.path
        if path not in self._maps:
            # Each mapping holds another descriptor, so the number of mappings is limited, too.
            most_maps = max(1, self.limit // 2)
            if len(self._maps) >= most_maps:
                self._maps.popitem(last=False)

            self._maps[path] = self._map_file(tensor)

        self._maps.move_to_end(path)
        return self._maps[path]

    def _map_file(self, tensor: Tensor) -> mmap.mmap:
        """Return a new mapping. Raises as `descriptor` does."""
        while True:
            descriptor = self.descriptor(tensor)
            try:
                return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            except ValueError:  # the file is empty by now
                raise truncated_file(tensor) from None
            except OSError as error:
                is_out_of_descriptors = error.errno == errno.EMFILE
                can_make_room = len(self._maps) > 0 or len(self._open) > 1
                if not is_out_of_descriptors or not can_make_room:
                    raise UnreadableFile.because(tensor.path, error) from None

            self._make_room()


def _read_ahead(descriptor: int) -> None:
    """Double the read-ahead window of the kernel for a file."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def _find_problem(tensor: Tensor, status: os.stat_result) -> str | None:
    """Return why an opened file is not the file with the tensor; None if it is. status: of the opened file."""
    if not stat.S_ISREG(status.st_mode):
        return "it is no longer a file"

    if tensor.opened is None:
        return None

    if not _is_same(tensor.opened, status):
        return "it was changed since it was opened"

    return None


def _is_same(before: os.stat_result, now: os.stat_result) -> bool:
    if not os.path.samestat(before, now):
        return False

    return (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns)


def _changed_file(path: str, problem: str = "it was changed while it was read") -> MalformedFile:
    return MalformedFile(
        path,
        found=problem,
        next_step="run again when no process writes to it",
    )


def truncated_file(tensor: Tensor, end: str = "the tensor's last element") -> MalformedFile:
    """Return the error for a file that has been truncated since it was opened."""
    return MalformedFile(
        tensor.path,
        place=f"tensor '{tensor.name}'",
        found=f"the file ends before {end}",
        next_step="it was changed while it was read: run again when no process writes to it",
    )
