"""Files of pickle.dump: state dicts of arrays, and of tensors.

numpy arrays are part of the pickle. A tensor's storage is a call of `torch.storage._load_from_bytes` with the bytes of
a torch.save file in the format before torch 1.6 (`TypedStorage.__reduce__` in torch/storage.py of torch 2.6 to 2.15).
A file can have several consecutive pickles.
"""

from __future__ import annotations

import mmap
import os
import re
from typing import TYPE_CHECKING

from syncheck.errors import MalformedFile
from syncheck.readers import torch_legacy
from syncheck.readers.pickles.locate import Record, locate_tensor
from syncheck.readers.pickles.stand_ins import Storage
from syncheck.readers.pickles.tree import flatten
from syncheck.readers.pickles.unpickle import Stream, unpickle
from syncheck.readers.untrusted import open_regular_file
from syncheck.snapshots import Snapshot

if TYPE_CHECKING:
    from typing import Any

    from syncheck.readers.pickles.stand_ins import TensorLocation

FORMAT = "pickle"
# Protocols 2 to 5 start with their number. Protocols 0 and 1 start with a container or the name of a common module.
_START = (
    rb"\x80[\x02-\x05]|\([dl]?p[01]\n|\([dl][pq]|[\]}]q[\x00\x01]|"
    rb"c(?:__builtin__|builtins|__main__|collections|copy_reg|copyreg|numpy|torch)[\w.]*\n[\w.]+\n"
)
# Pickles of other content are common: in a folder, only files with a checkpoint's file extension are read.
NEEDS_EXTENSION = True
# Limit of pickles in one file.
_MOST_PICKLES = 10_000
# Bytes that the unpickler may have read ahead, more than its buffer and its largest frame of small objects.
_READ_AHEAD = 1 << 18
# Storages that are compared to locate one. A small storage that is not found stays in memory.
_MOST_COMPARED = 16
_AGAIN = "it is cut short or damaged: save or copy the file again"


def matches(head: bytes) -> bool:
    """Whether a file starts like a pickle that is not of torch.save."""
    return re.match(_START, head) is not None and not torch_legacy.matches(head)


def read(path: str) -> Snapshot:
    """Open a checkpoint. The pickle is in memory while it is read; afterwards, the bytes of tensors stay on disk.

    Raises MalformedFile for a truncated or inconsistent file, RefusedFile for a pickle that would execute code,
    UnsupportedFormat for arrays that are not part of the pickle.
    """
    with open_regular_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        opened = os.fstat(file.fileno())
        stream = Stream(mapped)
        storages = _Storages(stream, path)
        trees: list[Any] = []
        rebuilt: list[TensorLocation] = []
        stubs: set[str] = set()
        while stream.position < opened.st_size:
            number = len(trees) + 1
            if number > _MOST_PICKLES:
                raise MalformedFile(
                    path,
                    found=f"more than {_MOST_PICKLES} pickles",
                    needed="fewer",
                    next_step=_AGAIN,
                )
            pickled = unpickle(stream, path, f"pickle {number}", load_storage=storages.load)
            trees.append(pickled.tree)
            rebuilt += pickled.rebuilt
            stubs |= set(pickled.stubs)
        # Names of several trees start with their number.
        tree: Any = trees[0] if len(trees) == 1 else trees
        flat = flatten(tree, path, opened.st_size, rebuilt)

    tensors = {
        name: locate_tensor(name, location, path, storages.locate, opened) for name, location in flat.tensors.items()
    }
    return Snapshot(
        path=path,
        format=FORMAT,
        bytes=opened.st_size,
        tensors=tensors,
        values=flat.values,
        stubs=tuple(sorted(stubs)),
        metadata=flat.metadata,
        numbered=flat.numbered,
        matched=flat.matched,
        model_values=flat.model_values,
    )


class _Storages:
    """The storages of a plain pickle, each of which is a torch.save file within it."""

    def __init__(self, stream: Stream, path: str) -> None:
        self.stream, self.path = stream, path
        self._records: dict[str, Record] = {}
        # With the bytes, so that an identifier stays unique.
        self._loaded: dict[int, tuple[bytes, Storage]] = {}
        self._remaining = len(stream.data)

    def load(self, content: Any = None, *_: Any) -> Storage:
        """Return a storage of the pickle. content: the bytes of a torch.save file."""
        if not isinstance(content, bytes) or not torch_legacy.matches(content):
            raise self._malformed("a storage that is not a torch.save file from before torch 1.6")
        if id(content) in self._loaded:
            return self._loaded[id(content)][1]

        # A pickle can make many copies of one text, which would take unbounded time.
        self._remaining -= len(content)
        if self._remaining < 0:
            raise self._malformed("storages with more bytes than the file")

        pickled, records = torch_legacy.read_stream(Stream(content), self.path)
        if not isinstance(pickled.tree, Storage):
            raise self._malformed("a torch.save file without a storage in it")

        inner = pickled.tree
        key = str(len(self._loaded))
        storage = Storage(inner.dtype, key, inner.numel, inner.itemsize, inner.start, inner.size)
        record = records[inner.key]
        start = self._find(content)
        if start is None:
            data = content[record.start : record.start + record.size]
            self._records[key] = Record(f"storage {key}", 0, record.size, data=data)
        else:
            self._records[key] = Record(f"storage {key}", start + record.start, record.size)
        self._loaded[id(content)] = content, storage
        return storage

    def _find(self, content: bytes) -> int | None:
        """Return the offset of these bytes, which were read last. None if they are encoded as text."""
        data = self.stream.data
        first = max(0, self.stream.position - len(content) - _READ_AHEAD)
        end = min(len(data), self.stream.position + _READ_AHEAD)
        # Small storages that were read ahead start like this one, so that several starts are compared.
        for _ in range(_MOST_COMPARED):
            end = data.rfind(torch_legacy.MAGIC, first, end)
            if end < 0:
                break
            if data[end : end + len(content)] == content:
                return end
        return None

    def locate(self, storage: Storage) -> Record:
        """Return the bytes of a storage. Raises MalformedFile for a storage that the pickle does not contain."""
        if storage.key not in self._records:
            raise self._malformed(f"a storage with the key {storage.key!r:.40}, which is not part of the pickle")
        return self._records[storage.key]

    def _malformed(self, problem: str) -> MalformedFile:
        return MalformedFile(
            self.path,
            found=problem,
            needed="storages as pickle.dump writes",
            next_step=_AGAIN,
        )
