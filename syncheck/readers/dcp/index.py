"""Read `.metadata` of a torch.distributed.checkpoint folder: its tensors, their chunks, and the location of each chunk.

The file is a pickle of the dataclasses in torch/distributed/checkpoint/metadata.py (torch 2.6 to 2.15). They are not
imported: the unpickler creates inert objects, and this module checks their content.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile, UnreadableFile, UnsupportedFormat
from syncheck.layout.boxes import find_fault
from syncheck.readers import untrusted
from syncheck.readers.pickles.stand_ins import Inert
from syncheck.readers.pickles.unpickle import Stream, unpickle
from syncheck.readers.untrusted import read_whole
from syncheck.snapshots import MOST_DIMENSIONS, MOST_ELEMENTS, are_naturals
from syncheck.tensors.dtypes import DType
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeGuard

METADATA = ".metadata"
# Limit in bytes. A chunk takes about 200 bytes, so this is five million chunks, or 10 GB when loaded.
MAX_SIZE = 1_000_000_000
_AGAIN = "the folder is damaged or not written by torch.distributed.checkpoint: save or copy it again"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor. start, shape: in elements. file: path below the folder. offset, length: of its record."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor (shape and chunks), or a pickled object (shape None, one chunk).

    path: keys in the saved state dict. dtype: None if unknown.
    """

    path: tuple[str | int, ...]
    chunks: tuple[Chunk, ...]
    shape: tuple[int, ...] | None = None
    dtype: DType | None = None


def read_index(folder: str) -> tuple[dict[str, Entry], int]:
    """Return the entries of a folder by flat name, in state-dict order, and the size of `.metadata`.

    Raises MalformedFile for a missing or inconsistent file, UnsupportedFormat for chunks of other writers.
    """
    data = _read_bytes(folder)
    tree = unpickle(Stream(data, most=untrusted.MOST_INDEX_OBJECTS), folder, METADATA).tree
    fields = _get_fields(tree, "Metadata", folder, METADATA)
    known, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(known, dict) or not isinstance(stored, dict):
        raise _malformed(folder, METADATA, "no state_dict_metadata or storage_data")
    paths = fields.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    locations = _locate_chunks(stored, folder)
    names = [name for name in paths if name in known] + [name for name in known if name not in paths]
    entries = {}
    for name in names:
        if not isinstance(name, str):
            raise _malformed(folder, METADATA, f"a name that is not a string: {brief(name)}")
        path = paths.get(name, (name,))
        if not _is_path(path):
            raise _malformed(folder, f"{METADATA}, '{name}'", f"keys {brief(path)}")
        # torch builds names from keys, and looks entries up by name: torch/distributed/checkpoint/_nested_dict.py.
        if ".".join(map(str, path)) != name:
            raise _malformed(folder, f"{METADATA}, '{name}'", f"keys {brief(path)}", "the segments of its name")
        entries[name] = _check_entry(name, tuple(path), known[name], locations, folder)
    return entries, len(data)


def _read_bytes(folder: str) -> bytes:
    try:
        return read_whole(os.path.join(folder, METADATA), MAX_SIZE, _AGAIN)
    except UnreadableFile as error:
        raise _malformed(folder, METADATA, error.reason) from None
    except FileNotFoundError:
        raise MalformedFile(
            folder, found=f"no {METADATA}", needed="this file, which is written last",
            next_step="the save did not finish, or hidden files were not copied: use another checkpoint or copy again",
        ) from None  # fmt: skip


def _locate_chunks(stored: Mapping[Any, Any], folder: str) -> dict[tuple[str, Any], tuple[str, int, int]]:
    """Map (flat name, start of the chunk or None) to (file, offset, length)."""
    locations = {}
    for key, value in stored.items():
        index = _get_fields(key, "MetadataIndex", folder, METADATA)
        name, start = index.get("fqn"), index.get("offset")
        info = _get_fields(value, "_StorageInfo", folder, f"{METADATA}, '{brief(name)}'")
        file, numbers = info.get("relative_path"), (info.get("offset"), info.get("length"))
        if info.get("transform_descriptors"):
            raise UnsupportedFormat(
                folder, place=f"{METADATA}, '{brief(name)}'", needed="chunks as torch.save writes them",
                found=f"chunks transformed by {brief(info['transform_descriptors'])}",
            )  # fmt: skip
        if not isinstance(name, str) or not (start is None or _are_sizes(start)):
            raise _malformed(folder, METADATA, f"a chunk of {brief(name)} at {brief(start)}")
        if not isinstance(file, str) or not _are_sizes(numbers) or not _is_below(file):
            found = f"a location {brief(file)}, offset and length {brief(numbers)}"
            raise _malformed(folder, f"{METADATA}, '{name}'", found, "a file in the folder, and numbers of bytes")
        locations[name, start] = file, numbers[0], numbers[1]
    return locations


def _check_entry(
    name: str, path: tuple[str | int, ...], found: Any, locations: Mapping[Any, Any], folder: str
) -> Entry:
    """Check one entry: every chunk has a location, and the chunks cover the tensor exactly."""
    kind = getattr(found, "name", type(found).__name__).rpartition(".")[2]
    place = f"{METADATA}, '{name}'"
    if kind == "BytesStorageMetadata":
        if (name, None) not in locations:
            raise _malformed(folder, place, "its record is not listed")
        return Entry(path, (Chunk((), (), *locations[name, None]),))
    fields = _get_fields(found, "TensorStorageMetadata", folder, place)
    shape, listed = fields.get("size"), fields.get("chunks")
    if not _are_sizes(shape) or not isinstance(listed, list) or len(shape) > MOST_DIMENSIONS:
        raise _malformed(folder, place, f"a tensor of size {brief(shape)} in chunks {brief(listed)}")
    chunks = []
    for one in listed:
        spans = _get_fields(one, "ChunkStorageMetadata", folder, place)
        start, size = spans.get("offsets"), spans.get("sizes")
        if not _are_sizes(start) or not _are_sizes(size) or not len(start) == len(size) == len(shape):
            found_chunk = f"a chunk of size {brief(size)} at {brief(start)} of a tensor of size {list(shape)}"
            raise _malformed(folder, place, found_chunk)
        if 0 in size:  # with more ranks than rows, some chunks are empty
            continue
        if (name, start) not in locations:
            raise _malformed(folder, place, f"the record of its chunk at {list(start)} is not listed")
        chunks.append(Chunk(start, size, *locations[name, start]))
    chunks.sort(key=lambda chunk: chunk.start)
    wrong = find_fault(shape, [(chunk.start, chunk.shape) for chunk in chunks])
    if wrong:
        raise _malformed(folder, place, wrong, f"chunks that cover {list(shape)} without gap or overlap")
    return Entry(path, tuple(chunks), shape, _read_dtype(fields.get("properties")))


def _read_dtype(properties: Any) -> DType | None:
    """Return the saved dtype, or None if it is not supported."""
    state = properties.arguments[-1] if isinstance(properties, Inert) and properties.arguments else ()
    dtype = getattr(state[0], "dtype", None) if isinstance(state, tuple) and state else None
    return dtype if isinstance(dtype, DType) else None


def _get_fields(pickled: Any, kind: str, folder: str, place: str) -> dict[str, Any]:
    """Return the fields of a pickled dataclass."""
    if isinstance(pickled, Inert) and pickled.name.rpartition(".")[2] == kind and pickled.arguments:
        state = pickled.arguments[-1]
        if isinstance(state, dict):
            return state
    found = pickled.name if isinstance(pickled, Inert) else type(pickled).__name__
    raise _malformed(folder, place, f"a {found:.80}", f"a {kind} of torch.distributed.checkpoint")


def _are_sizes(value: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and are_naturals(value)


def _is_path(value: Any) -> TypeGuard[tuple[str | int, ...]]:
    if not isinstance(value, tuple) or not value:
        return False
    return all(type(key) is str or (type(key) is int and abs(key) <= MOST_ELEMENTS) for key in value)


def _is_below(file: str) -> bool:
    """Whether an untrusted path stays within the folder."""
    return "\0" not in file and not {"", ".", ".."}.intersection(file.split("/"))


def _malformed(folder: str, place: str, found: str, needed: str = "") -> MalformedFile:
    return MalformedFile(folder, place=place, found=found, needed=needed, next_step=_AGAIN)
