"""Tensors' bytes, block by block: what is read at a time stays small whatever a tensor's size.

A block is a range of elements in C order. Contiguous tensors are read into a buffer that is used again; tensors with
other strides, another byte order or a pending conjugation are gathered, a block at a time.
"""

from __future__ import annotations

import math
import mmap
import os
import resource
import stat
import sys
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from syncheck.dtypes import DTYPES
from syncheck.errors import MalformedFile, UnreadableFile
from syncheck.kernel import pieces
from syncheck.snapshots import in_c_order

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
# Of a tensor that does not lie in C order, a gap of up to so many bytes is read along with what lies around it, unless
# that makes it so many times the bytes that are wanted. What needs more reads than that, as of a matrix that lies
# transposed, is copied from a mapping of the file: twice as fast.
_GAP, _GATHERED, _MOST_READS = 4096, 8, 1024
# Threads unless told: more than these wait for the same memory.
JOBS = 4


class Files:
    """Open files by path, the least recently used closed first. A context manager.

    Raises MalformedFile when a file that it closes was changed since it was opened.

    limit: files open at a time. jobs: threads that read a large tensor at a time; None for as many as this process may
    run on, up to `JOBS`.
    """

    def __init__(self, limit: int = OPEN_FILES, jobs: int | None = None) -> None:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.limit = limit if allowed == resource.RLIM_INFINITY else max(1, min(limit, allowed // 2))
        self.jobs = jobs or min(JOBS, _processors())
        self._open: OrderedDict[str, int] = OrderedDict()
        self._found: dict[str, os.stat_result] = {}
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._buffers: dict[int, bytearray] = {}

    def __enter__(self) -> Files:
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
            raise _unreadable(path, error) from None
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
        if 1 in tensor.shape:  # their strides mean nothing, and numpy has fewer dimensions than torch
            kept = [both for both in zip(tensor.shape, tensor.strides, strict=True) if both[0] != 1]
            tensor = replace(tensor, shape=tuple(n for n, _ in kept), strides=tuple(s for _, s in kept))
        boxes = list(pieces.boxes(tensor.shape, start, count))
        if tensor.data is None:
            rows = [self._gathered(tensor, box, row.size) for box in boxes]
        else:
            data, steps = cast("Any", tensor.data), [s * row.size for s in tensor.strides]
            view: Any = np.ndarray(tensor.shape, f"V{row.size}", data, tensor.offset, steps)
            rows = [np.ascontiguousarray(view[box]).reshape(-1) for box in boxes]
        values = np.concatenate(rows).view(row.dtype().newbyteorder(">" if tensor.big_endian else "<"))
        if "conj" in tensor.lazy:
            values = np.conjugate(values)
        if "neg" in tensor.lazy:
            values = np.negative(values)
        return bytes(values.astype(row.dtype().newbyteorder("<"), copy=False).tobytes())

    def _gathered(self, tensor: Tensor, box: pieces.Box, size: int) -> Any:
        """Return a box of a tensor whose elements do not lie in C order: its elements, in C order.

        By reads where it can be: a mapping of a file that is cut while it is copied kills the process.
        size: bytes of an element.
        """
        import numpy as np

        at = tensor.offset + size * sum(span.start * step for span, step in zip(box, tensor.strides, strict=True))
        # Of few elements, few dimensions are longer than 1: no more than any numpy takes.
        long = [axis for axis, span in enumerate(box) if span.stop - span.start != 1]
        lengths, strides = [box[i].stop - box[i].start for i in long], [tensor.strides[i] * size for i in long]
        inner = sorted(range(len(lengths)), key=lambda axis: -(lengths[axis] - 1) * strides[axis])
        outer: list[int] = []
        reach, wanted, reads = size, size * math.prod(lengths), 1
        reach += sum((lengths[axis] - 1) * strides[axis] for axis in inner)
        while inner:
            length, stride = lengths[inner[0]], strides[inner[0]]
            without = reach - (length - 1) * stride
            if reach <= _GATHERED * wanted and stride - without <= _GAP:
                break
            outer.append(inner.pop(0))
            reach, wanted, reads = without, wanted // length, reads * length
        if reads > _MOST_READS:
            return self._from_map(tensor, at, lengths, strides, size)
        places = np.full((), at, np.int64)
        for axis in outer:
            places = np.add.outer(places, np.arange(lengths[axis], dtype=np.int64) * strides[axis])
        descriptor = self.descriptor(tensor)
        try:
            data = b"".join([os.pread(descriptor, reach, place) for place in places.reshape(-1).tolist()])
        except OSError as error:
            raise _unreadable(tensor.path, error) from None
        if len(data) != reach * reads:
            raise _shrunk(tensor, "the tensor's last element")
        order = (*outer, *inner)
        steps = [*(stride * reach for stride in in_c_order(places.shape)), *(strides[axis] for axis in inner)]
        found: Any = np.ndarray([lengths[axis] for axis in order], f"V{size}", data, 0, steps)
        back = sorted(range(len(order)), key=order.__getitem__)
        return np.ascontiguousarray(found.transpose(back)).reshape(-1)

    def _from_map(self, tensor: Tensor, at: int, lengths: Sequence[int], strides: Sequence[int], size: int) -> Any:
        import numpy as np

        where = self._map(tensor)
        end = at + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True)) + size
        if where.size() < end:  # of the file as it is now
            raise _shrunk(tensor, "the tensor's last element")
        view: Any = np.ndarray(lengths, f"V{size}", where, at, strides)
        return view.flatten()

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
            except (OSError, ValueError) as error:  # ValueError: it is empty by now
                if isinstance(error, OSError):
                    raise _unreadable(path, error) from None
                raise _shrunk(tensor, "the tensor's last element") from None
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


def _changed(path: str, found: str = "it was changed while it was read") -> MalformedFile:
    return MalformedFile(path, found=found, next_step="run again when nothing writes it")


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
