"""torch.save files before torch 1.6, and with `_use_new_zipfile_serialization=False`: consecutive pickles.

The pickles are a magic number, the protocol version, system information, the object, and its storage keys. The storages
follow, each as its number of elements and its bytes, little-endian on all machines.
Layout: `_legacy_save` in torch/serialization.py of torch 2.6 to 2.15.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile, UnsupportedFormat
from syncheck.readers.pickles.locate import Record, locate_tensor
from syncheck.readers.pickles.tree import flatten
from syncheck.readers.pickles.unpickle import Pickled, Stream, unpickle
from syncheck.readers.untrusted import are_strings, open_regular_file
from syncheck.snapshots import Snapshot
from syncheck.text import brief

if TYPE_CHECKING:
    from syncheck.readers.pickles.stand_ins import Storage

FORMAT = "torch-legacy"
# torch/serialization.py: MAGIC_NUMBER in pickle protocol 2, and PROTOCOL_VERSION.
MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_VERSION = 1001
_COUNT = struct.Struct("<q")
_AGAIN = "it is cut short or damaged: save or copy the file again"


def matches(head: bytes) -> bool:
    """Whether a file starts with the magic number of this format."""
    return head.startswith(MAGIC)


def read(path: str) -> Snapshot:
    """Open a checkpoint without reading tensor data.

    Raises MalformedFile for a truncated or inconsistent file, RefusedFile for a pickle that would execute code,
    UnsupportedFormat for another version of the format.
    """
    with open_regular_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        opened = os.fstat(file.fileno())
        pickled, records = read_stream(Stream(mapped), path)
        flat = flatten(pickled.tree, path, pickled.size, pickled.rebuilt)

    tensors = {
        name: locate_tensor(name, location, path, lambda storage: records[storage.key], opened)
        for name, location in flat.tensors.items()
    }
    return Snapshot(
        path=path,
        format=FORMAT,
        bytes=opened.st_size,
        tensors=tensors,
        values=flat.values,
        stubs=pickled.stubs,
        metadata=flat.metadata,
        numbered=flat.numbered,
        matched=flat.matched,
        model_values=flat.model_values,
    )


def read_stream(stream: Stream, path: str) -> tuple[Pickled, dict[str, Record]]:
    """Read the pickles of a file, and return the object and the bytes of each storage. stream: at the magic number."""
    stream.position += len(MAGIC)
    version = unpickle(stream, path, "protocol version").tree
    if version != _VERSION:
        raise UnsupportedFormat(
            path,
            place="protocol version",
            found=brief(version),
            needed=str(_VERSION),
        )

    unpickle(stream, path, "system information")
    storages: dict[str, Storage] = {}
    pickled = unpickle(stream, path, "object", storages)
    keys = unpickle(stream, path, "storage keys").tree
    return pickled, _locate_records(stream, keys, storages, path)


def _locate_records(stream: Stream, keys: Any, storages: dict[str, Storage], path: str) -> dict[str, Record]:
    """Locate the bytes of each storage. stream: at the element count of the first storage."""
    if not isinstance(keys, list) or not are_strings(keys):
        raise MalformedFile(
            path,
            place="storage keys",
            found=brief(keys),
            needed="strings",
            next_step=_AGAIN,
        )

    end, records = len(stream.data), dict[str, Record]()
    for key in keys:
        label = f"storage {key!r:.40}"
        head = stream.read(_COUNT.size)
        count = _COUNT.unpack(head)[0] if len(head) == _COUNT.size else -1
        storage = storages.get(key)
        if storage is None or storage.itemsize is None or not 0 <= count <= end:
            raise MalformedFile(
                path,
                place=label,
                found="no such storage, or no count of its elements",
                next_step=_AGAIN,
            )
        start, size = stream.position, count * storage.itemsize
        if start + size > end:
            raise MalformedFile(
                path,
                place=label,
                found=f"ends at byte {start + size}",
                needed=f"at most {end}",
                next_step=_AGAIN,
            )
        records[key] = Record(label, start, size)
        stream.position = start + size

    # Each storage of the object must have bytes, or tensors would lack theirs.
    missing = [key for key in storages if key not in records]
    if missing:
        raise MalformedFile(
            path,
            place="storage keys",
            found=f"{missing[0]!r:.40} is missing",
            next_step=_AGAIN,
        )
    return records
