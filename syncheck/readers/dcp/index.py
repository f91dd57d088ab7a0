"""Read `.metadata` of a torch.distributed.checkpoint folder: its tensors, their chunks, and the location of each chunk.

The file is a pickle of the dataclasses in torch/distributed/checkpoint/metadata.py (torch 2.6 to 2.15). They are not
imported: the unpickler creates inert objects, and this module checks their content.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.errors import MalformedFile, UnreadableFile, UnsupportedFormat
from syncheck.frozen import record
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

    from syncheck.layout.boxes import Box

METADATA = ".metadata"
# Limit in bytes. A chunk takes about 200 bytes, so this is five million chunks, or 10 GB when loaded.
MAX_SIZE = 1_000_000_000
_AGAIN = "the folder is damaged or not written by torch.distributed.checkpoint: save or copy it again"


@record
class Chunk:
    """A box of a tensor, and the location of its record."""

    start: tuple[int, ...]
    """In elements, as the shape."""
    shape: tuple[int, ...]
    file: str
    """The path below the folder."""
    offset: int
    """In bytes, as the length."""
    length: int


@record
class Entry:
    """A tensor (shape and chunks), or a pickled object (shape None, one chunk)."""

    path: tuple[str | int, ...]
    """The keys in the saved state dict."""
    chunks: tuple[Chunk, ...]
    shape: tuple[int, ...] | None = None
    dtype: DType | None = None
    """None if unknown."""


class _Location(NamedTuple):
    """The location of a record: a file below the folder, and bytes in it."""

    file: str
    offset: int
    length: int


# By flat name, and start of the chunk or None for an object.
_Locations = dict[tuple[str, Any], _Location]


def read_index(folder: str) -> tuple[dict[str, Entry], int]:
    """Return the entries of a folder by flat name, in state-dict order, and the size of `.metadata`.

    Raises MalformedFile for a missing or inconsistent file, UnsupportedFormat for chunks of other writers.
    """
    data = _read_bytes(folder)
    tree = unpickle(Stream(data, most=untrusted.MOST_INDEX_OBJECTS), folder, METADATA).tree
    fields = _get_fields(tree, "Metadata", folder, METADATA)
    descriptions = fields.get("state_dict_metadata")
    storage_data = fields.get("storage_data")
    if not isinstance(descriptions, dict) or not isinstance(storage_data, dict):
        raise _malformed(
            folder,
            METADATA,
            problem="no state_dict_metadata or storage_data",
        )

    planner_data = fields.get("planner_data")
    paths = planner_data if isinstance(planner_data, dict) else {}
    locations = _locate_chunks(storage_data, folder)
    # In the order of the state dict, if the planner saved it.
    names = [name for name in paths if name in descriptions]
    names += [name for name in descriptions if name not in paths]
    entries = {}
    for name in names:
        path = _check_path(name, paths.get(name, (name,)), folder)
        entries[name] = _check_entry(name, path, descriptions[name], locations, folder)
    return entries, len(data)


def _check_path(name: Any, path: Any, folder: str) -> tuple[str | int, ...]:
    """Return the keys of an entry in the state dict."""
    if not isinstance(name, str):
        raise _malformed(
            folder,
            METADATA,
            problem=f"a name that is not a string: {brief(name)}",
        )
    if not _is_path(path):
        raise _malformed(
            folder,
            f"{METADATA}, '{name}'",
            problem=f"keys {brief(path)}",
        )
    # torch builds names from keys, and looks entries up by name: torch/distributed/checkpoint/_nested_dict.py.
    if ".".join(str(key) for key in path) != name:
        raise _malformed(
            folder,
            f"{METADATA}, '{name}'",
            problem=f"keys {brief(path)}",
            needed="the segments of its name",
        )
    return tuple(path)


def _read_bytes(folder: str) -> bytes:
    try:
        return read_whole(os.path.join(folder, METADATA), MAX_SIZE, _AGAIN)
    except UnreadableFile as error:
        raise _malformed(
            folder,
            METADATA,
            problem=error.reason,
        ) from None
    except FileNotFoundError:
        raise MalformedFile(
            folder,
            found=f"no {METADATA}",
            needed="this file, which is written last",
            next_step="the save did not finish, or hidden files were not copied: use another checkpoint or copy again",
        ) from None


def _locate_chunks(storage_data: Mapping[Any, Any], folder: str) -> _Locations:
    """Return the location of the record of each chunk and object."""
    locations: _Locations = {}
    for pickled_index, pickled_info in storage_data.items():
        index = _get_fields(pickled_index, "MetadataIndex", folder, METADATA)
        name, start = index.get("fqn"), index.get("offset")
        label = f"{METADATA}, '{brief(name)}'"
        info = _get_fields(pickled_info, "_StorageInfo", folder, label)
        _refuse_transformed(info.get("transform_descriptors"), label, folder)
        is_object = start is None
        if not isinstance(name, str) or not (is_object or _are_sizes(start)):
            raise _malformed(
                folder,
                METADATA,
                problem=f"a chunk of {brief(name)} at {brief(start)}",
            )
        locations[name, start] = _check_location(name, info, folder)
    return locations


def _refuse_transformed(transforms: Any, label: str, folder: str) -> None:
    """Raise UnsupportedFormat for a chunk that was compressed or encrypted."""
    if not transforms:
        return
    raise UnsupportedFormat(
        folder,
        place=label,
        found=f"chunks transformed by {brief(transforms)}",
        needed="chunks as torch.save writes them",
    )


def _check_location(name: str, info: dict[str, Any], folder: str) -> _Location:
    """Return the location of a record. name: of its entry. info: the fields of its `_StorageInfo`."""
    file = info.get("relative_path")
    numbers = (info.get("offset"), info.get("length"))
    if not _is_below(file) or not _are_sizes(numbers):
        problem = f"a location {brief(file)}, offset and length {brief(numbers)}"
        raise _malformed(
            folder,
            f"{METADATA}, '{name}'",
            problem=problem,
            needed="a file in the folder, and numbers of bytes",
        )
    return _Location(file, *numbers)


def _check_entry(name: str, path: tuple[str | int, ...], description: Any, locations: _Locations, folder: str) -> Entry:
    """Check one entry: every chunk has a location, and the chunks cover the tensor exactly."""
    class_name = getattr(description, "name", type(description).__name__).rpartition(".")[2]
    label = f"{METADATA}, '{name}'"
    if class_name == "BytesStorageMetadata":
        if (name, None) not in locations:
            raise _malformed(
                folder,
                label,
                problem="its record is not listed",
            )
        return Entry(path, (Chunk((), (), *locations[name, None]),))

    fields = _get_fields(description, "TensorStorageMetadata", folder, label)
    shape = fields.get("size")
    pickled_chunks = fields.get("chunks")
    if not _is_shape(shape) or not isinstance(pickled_chunks, list):
        raise _malformed(
            folder,
            label,
            problem=f"a tensor of size {brief(shape)} in chunks {brief(pickled_chunks)}",
        )

    chunks = []
    for pickled_chunk in pickled_chunks:
        start, size = _check_box(pickled_chunk, shape, label, folder)
        # With more ranks than rows, some chunks are empty.
        if 0 in size:
            continue
        if (name, start) not in locations:
            raise _malformed(
                folder,
                label,
                problem=f"the record of its chunk at {list(start)} is not listed",
            )
        chunks.append(Chunk(start, size, *locations[name, start]))

    # The order of chunks depends on the ranks that saved them.
    chunks.sort(key=_start_of)
    fault = find_fault(shape, [(chunk.start, chunk.shape) for chunk in chunks])
    if fault:
        raise _malformed(
            folder,
            label,
            problem=fault,
            needed=f"chunks that cover {list(shape)} without gap or overlap",
        )
    return Entry(path, tuple(chunks), shape, _read_dtype(fields.get("properties")))


def _start_of(chunk: Chunk) -> tuple[int, ...]:
    return chunk.start


def _check_box(pickled_chunk: Any, shape: tuple[int, ...], label: str, folder: str) -> Box:
    """Return the box of a chunk, start and size in elements, with the dimensions of its tensor."""
    fields = _get_fields(pickled_chunk, "ChunkStorageMetadata", folder, label)
    start, size = fields.get("offsets"), fields.get("sizes")
    if _are_sizes(start) and _are_sizes(size) and len(start) == len(size) == len(shape):
        return start, size

    problem = f"a chunk of size {brief(size)} at {brief(start)} of a tensor of size {list(shape)}"
    raise _malformed(
        folder,
        label,
        problem=problem,
    )


def _read_dtype(properties: Any) -> DType | None:
    """Return the saved dtype, or None if it is not supported."""
    if not isinstance(properties, Inert) or not properties.arguments:
        return None

    state = properties.arguments[-1]
    if not isinstance(state, tuple) or not state:
        return None

    dtype = getattr(state[0], "dtype", None)
    return dtype if isinstance(dtype, DType) else None


def _get_fields(pickled: Any, class_name: str, folder: str, label: str) -> dict[str, Any]:
    """Return the fields of a pickled dataclass."""
    pickled_name = type(pickled).__name__
    if isinstance(pickled, Inert):
        pickled_name = pickled.name
        state = pickled.arguments[-1] if pickled.arguments else None
        if pickled_name.rpartition(".")[2] == class_name and isinstance(state, dict):
            return state
    raise _malformed(
        folder,
        label,
        problem=f"a {pickled_name:.80}",
        needed=f"a {class_name} of torch.distributed.checkpoint",
    )


def _are_sizes(value: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and are_naturals(value)


def _is_shape(value: Any) -> TypeGuard[tuple[int, ...]]:
    return _are_sizes(value) and len(value) <= MOST_DIMENSIONS


def _is_path(value: Any) -> TypeGuard[tuple[str | int, ...]]:
    if not isinstance(value, tuple) or not value:
        return False
    return all(_is_key(key) for key in value)


def _is_key(key: Any) -> bool:
    if type(key) is int:
        return abs(key) <= MOST_ELEMENTS
    return type(key) is str


def _is_below(file: Any) -> TypeGuard[str]:
    """Whether an untrusted value is a path that stays within the folder."""
    if not isinstance(file, str) or "\0" in file:
        return False
    return {"", ".", ".."}.isdisjoint(file.split("/"))


def _malformed(folder: str, label: str, *, problem: str, needed: str = "") -> MalformedFile:
    return MalformedFile(
        folder,
        place=label,
        found=problem,
        needed=needed,
        next_step=_AGAIN,
    )
