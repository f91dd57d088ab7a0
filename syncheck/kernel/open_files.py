"""The files that tensors lie in: few are open at a time, and one that was changed meanwhile is an error."""

from __future__ import annotations

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

# Files held open at a time, and never more than half of what `ulimit -n` allows.
OPEN_FILES = 400


class OpenFiles:
    """Open files by path, the least recently used closed first. A context manager.

    Raises MalformedFile when a file that it closes was changed since it was opened. limit: files open at a time.
    """

    def __init__(self, limit: int = OPEN_FILES) -> None:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.limit = limit if allowed == resource.RLIM_INFINITY else max(1, min(limit, allowed // 2))
        self._open: OrderedDict[str, int] = OrderedDict()
        self._found: dict[str, os.stat_result] = {}
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._maps.clear()
        changed = [path for path in [*self._open] if not self._closed(path)]
        if changed and error is None:
            raise _changed(changed[0])

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
            oldest = next(iter(self._open))
            if not self._closed(oldest):
                raise _changed(oldest)
        try:
            # What has become a pipe would block.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise UnreadableFile.because(path, error) from None
        found = os.fstat(descriptor)
        regular = stat.S_ISREG(found.st_mode)
        if not regular or not (tensor.opened is None or _is_same(tensor.opened, found)):
            os.close(descriptor)
            raise _changed(path, "it was changed since it was opened" if regular else "it is no file any more")
        _read_ahead(descriptor)
        self._open[path], self._found[path] = descriptor, found
        return descriptor

    def _closed(self, path: str) -> bool:
        """Close a file, and return whether it is what it was: else what was read is of two states, or of none."""
        descriptor = self._open.pop(path)
        same = _is_same(self._found.pop(path), os.fstat(descriptor))
        os.close(descriptor)
        return same

    def mapping(self, tensor: Tensor) -> mmap.mmap:
        """Return a mapping of a tensor's file. Raises as `descriptor` does."""
        path = tensor.path
        if path not in self._maps:
            # A mapping holds a descriptor of its own: half as many again as the files, within what the system allows.
            if len(self._maps) >= max(1, self.limit // 2):
                self._maps.popitem(last=False)
            descriptor = self.descriptor(tensor)
            try:
                # A mapping costs address space only; few tensors need one.
                self._maps[path] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:  # ValueError: it is empty by now
                if isinstance(error, OSError):
                    raise UnreadableFile.because(path, error) from None
                raise truncated_file(tensor) from None
        self._maps.move_to_end(path)
        return self._maps[path]


def _read_ahead(descriptor: int) -> None:
    """Let the system read further ahead than it does by itself: of files that are not in memory yet."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def _is_same(before: os.stat_result, now: os.stat_result) -> bool:
    return os.path.samestat(before, now) and (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns)


def _changed(path: str, found: str = "it was changed while it was read") -> MalformedFile:
    return MalformedFile(path, found=found, next_step="run again when nothing writes it")


def truncated_file(tensor: Tensor, where: str = "the tensor's last element") -> MalformedFile:
    """Return the error for a file that ends before bytes that were there when it was opened."""
    return MalformedFile(
        tensor.path,
        place=f"tensor '{tensor.name}'",
        found=f"the file ends before {where}",
        next_step="it was changed while it was read: run again when nothing writes it",
    )
