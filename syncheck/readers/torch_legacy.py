"""Files of torch.save before torch 1.6, and of today's with `_use_new_zipfile_serialization=False`: pickles in a row.

A magic number, the protocol's version, facts of the machine, the object, the keys of its storages; then for each
storage its number of elements and its bytes, little-endian on every machine. torch is not needed to read them.
Layout: torch/serialization.py, `_legacy_save` of torch 2.6 to 2.15.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile, UnsupportedFormat, brief
from syncheck.readers.opening import regular
from syncheck.readers.pickles.places import Record, tensor_at
from syncheck.readers.pickles.tree import flatten
from syncheck.readers.pickles.unpickle import Stream, unpickle
from syncheck.snapshots import Snapshot

if TYPE_CHECKING:
    from syncheck.readers.pickles.stand_ins import Storage, TensorPlace

FORMAT = "torch-legacy"
# torch/serialization.py: MAGIC_NUMBER in pickle protocol 2, and PROTOCOL_VERSION.
MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_VERSION = 1001
_COUNT = struct.Struct("<q")
_AGAIN = "it is cut short or damaged: save or copy the file again"


def matches(head: bytes) -> bool:
    """Whether the first bytes of a file are those of this format."""
    return head.startswith(MAGIC)


def read(path: str) -> Snapshot:
    """Open a checkpoint: its tensors' names and places, its values and its metadata block.

    Raises MalformedFile for a file that is cut short or inconsistent, RefusedFile for a pickle that wants to run
    something, UnsupportedFormat for another version of the format.
    """
    with regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        opened = os.fstat(file.fileno())
        stream = Stream(whole, len(MAGIC))
        version, _ = unpickle(stream, path, "protocol version")
        if version != _VERSION:
            raise UnsupportedFormat(path, place="protocol version", found=brief(version), needed=str(_VERSION))
        unpickle(stream, path, "facts of the machine")
        start = stream.at
        storages: dict[str, Storage] = {}
        made: list[TensorPlace] = []
        tree, stubs = unpickle(stream, path, "object", storages, made=made)
        flat = flatten(tree, path, stream.at - start, made)
        keys, _ = unpickle(stream, path, "keys of the storages")
        records = _records(stream, keys, storages, path)
    tensors = {
        name: tensor_at(name, place, path, lambda storage: records[storage.key], opened=opened)
        for name, place in flat.tensors.items()
    }
    return Snapshot(
        path, FORMAT, opened.st_size, tensors, flat.values, stubs, flat.metadata,
        numbered=flat.numbered,
    )  # fmt: skip


def _records(stream: Stream, keys: Any, storages: dict[str, Storage], path: str) -> dict[str, Record]:
    """Find where each storage's bytes lie; the stream stands at the first storage's count of elements."""
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise MalformedFile(path, place="keys of the storages", found=brief(keys), needed="texts", next_step=_AGAIN)
    end, records = len(stream.data), dict[str, Record]()
    for key in keys:
        label = f"storage {key!r:.40}"
        head = stream.read(_COUNT.size)
        count = _COUNT.unpack(head)[0] if len(head) == _COUNT.size else -1
        storage = storages.get(key)
        if storage is None or storage.itemsize is None or not 0 <= count <= end:
            raise MalformedFile(
                path, place=label, found="no such storage, or no count of its elements", next_step=_AGAIN
            )
        start, size = stream.at, count * storage.itemsize
        if start + size > end:
            raise MalformedFile(
                path, place=label, found=f"ends at byte {start + size}", needed=f"at most {end}", next_step=_AGAIN
            )
        records[key] = Record(label, start, size)
        stream.at = start + size
    missing = [key for key in storages if key not in records]
    if missing:
        raise MalformedFile(path, place="keys of the storages", found=f"none of {missing[0]!r:.40}", next_step=_AGAIN)
    return records
