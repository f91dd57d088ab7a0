"""`.metadata` of a torch.distributed.checkpoint folder: which tensors there are, in which chunks, and where those lie.

It is a pickle of the dataclasses of torch/distributed/checkpoint/metadata.py (torch 2.6 to 2.15). None of them is
imported: the unpickler makes inert stubs of them, and what they were given is checked here.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncheck.dtypes import DType
from syncheck.errors import MalformedFile, UnreadableFile, UnsupportedFormat, brief
from syncheck.readers import bounds
from syncheck.readers.opening import regular
from syncheck.readers.pickles.inert import Inert
from syncheck.readers.pickles.unpickle import Stream, unpickle
from syncheck.snapshots import MOST_DIMENSIONS, MOST_ELEMENTS, are_naturals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import TypeGuard

METADATA = ".metadata"
# Bytes of `.metadata`. A chunk takes about 200: this is five million of them, some 10 GB when read.
MAX_SIZE = 1_000_000_000
_AGAIN = "the folder is damaged or not written by torch.distributed.checkpoint: save or copy it again"


Span = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and size, by dimension."""

# Chunks of a mesh of ranks form a grid and need a few steps each; what is built to need the square of that is refused.
_STEPS = 1_000_000
_STEPS_PER_CHUNK = 64


def fault(shape: Sequence[int], spans: Sequence[Span]) -> str:
    """Say where chunks leave a gap, overlap, or reach out of a tensor; empty if they cover it exactly.

    spans: none of them empty.
    """
    if 0 in shape:
        return "chunks of an empty tensor" if spans else ""
    for start, size in spans:
        if any(at + length > most for at, length, most in zip(start, size, shape, strict=True)):
            return f"the chunk of size {list(size)} at {list(start)} reaches out of it"
    start, most = max(Counter(start for start, _ in spans).items(), key=lambda item: item[1], default=((), 0))
    if most > 1:  # quickly, whatever their number: a pickle can list one chunk a million times
        return f"{most} chunks hold element {list(start)}"
    left = _STEPS + _STEPS_PER_CHUNK * len(spans)
    waiting: list[tuple[tuple[int, ...], Sequence[Span]]] = [((), spans)]
    while waiting:
        # The chunks that hold the elements whose first indices are `at`.
        at, here = waiting.pop()
        if len(at) == len(shape):
            if len(here) != 1:
                return f"{len(here) or 'no'} chunks hold element {list(at)}"
            continue
        for low, inside in _slabs(here, len(at), shape[len(at)]):
            left -= len(inside) + 1
            if left < 0:
                return f"{len(spans)} chunks that cut one another into too many pieces to check"
            waiting.append(((*at, low), inside))
    return ""


def _slabs(spans: Sequence[Span], axis: int, length: int) -> Iterator[tuple[int, list[Span]]]:
    """Cut a dimension wherever a chunk begins or ends: where each slab begins, and the chunks that cross it."""
    edges = sorted({0, length, *(e for start, size in spans for e in (start[axis], start[axis] + size[axis]))})
    ordered = sorted(spans, key=lambda span: span[0][axis])
    crossing: list[Span] = []
    coming = 0
    for low, _ in itertools.pairwise(edges):
        crossing = [span for span in crossing if span[0][axis] + span[1][axis] > low]
        while coming < len(ordered) and ordered[coming][0][axis] == low:
            crossing.append(ordered[coming])
            coming += 1
        yield low, list(crossing)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a tensor. start, shape: in elements; file: below the folder; offset, length: of its record there."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor (shape and chunks), or an object that was pickled (shape None, one chunk).

    path: its keys in the state dict that was saved. dtype: None where it is not known.
    """

    path: tuple[str | int, ...]
    chunks: tuple[Chunk, ...]
    shape: tuple[int, ...] | None = None
    dtype: DType | None = None


def read_index(folder: str) -> tuple[dict[str, Entry], int]:
    """Return what a folder holds by its flat names, in the order of the state dict, and the size of `.metadata`.

    Raises MalformedFile where the file is missing or inconsistent, UnsupportedFormat for what other writers put there.
    """
    data = _content(folder)
    tree, _ = unpickle(Stream(data, most=bounds.MOST_INDEX_OBJECTS), folder, METADATA)
    fields = _fields(tree, "Metadata", folder, METADATA)
    known, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(known, dict) or not isinstance(stored, dict):
        raise _broken(folder, METADATA, "no state_dict_metadata or storage_data")
    paths = fields.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    places = _places(stored, folder)
    names = [name for name in paths if name in known] + [name for name in known if name not in paths]
    entries = {}
    for name in names:
        if not isinstance(name, str):
            raise _broken(folder, METADATA, f"a name that is no text: {brief(name)}")
        path = paths.get(name, (name,))
        if not _is_path(path):
            raise _broken(folder, f"{METADATA}, '{name}'", f"keys {brief(path)}")
        # torch makes names of keys so, and looks for them by these: torch/distributed/checkpoint/_nested_dict.py.
        if ".".join(map(str, path)) != name:
            raise _broken(folder, f"{METADATA}, '{name}'", f"keys {brief(path)}", "those that its name is made of")
        entries[name] = _entry(name, tuple(path), known[name], places, folder)
    return entries, len(data)


def _content(folder: str) -> bytes:
    try:
        with regular(os.path.join(folder, METADATA)) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_SIZE:
                raise _broken(folder, METADATA, f"{size} bytes", f"at most {MAX_SIZE}")
            return file.read(size)
    except UnreadableFile as error:
        raise _broken(folder, METADATA, error.reason) from None
    except FileNotFoundError:
        raise MalformedFile(
            folder, found=f"no {METADATA}", needed="that file, which is written last",
            next_step="the save did not finish, or hidden files were not copied: use another checkpoint or copy again",
        ) from None  # fmt: skip


def _places(stored: Mapping[Any, Any], folder: str) -> dict[tuple[str, Any], tuple[str, int, int]]:
    """Map (flat name, start of the chunk or None) to (file, offset, length)."""
    places = {}
    for key, value in stored.items():
        index = _fields(key, "MetadataIndex", folder, METADATA)
        name, start = index.get("fqn"), index.get("offset")
        info = _fields(value, "_StorageInfo", folder, f"{METADATA}, '{brief(name)}'")
        file, numbers = info.get("relative_path"), (info.get("offset"), info.get("length"))
        if info.get("transform_descriptors"):
            raise UnsupportedFormat(
                folder, place=f"{METADATA}, '{brief(name)}'", needed="chunks as torch.save writes them",
                found=f"chunks transformed by {brief(info['transform_descriptors'])}",
            )  # fmt: skip
        if not isinstance(name, str) or not (start is None or _are_sizes(start)):
            raise _broken(folder, METADATA, f"a chunk of {brief(name)} at {brief(start)}")
        if not isinstance(file, str) or not _are_sizes(numbers) or not _is_below(file):
            found = f"a place {brief(file)}, byte and length {brief(numbers)}"
            raise _broken(folder, f"{METADATA}, '{name}'", found, "a file in the folder, and numbers of bytes")
        places[name, start] = file, numbers[0], numbers[1]
    return places


def _entry(name: str, path: tuple[str | int, ...], found: Any, places: Mapping[Any, Any], folder: str) -> Entry:
    """Check one entry: its chunks have places, and cover the tensor exactly."""
    kind = getattr(found, "name", type(found).__name__).rpartition(".")[2]
    place = f"{METADATA}, '{name}'"
    if kind == "BytesStorageMetadata":
        if (name, None) not in places:
            raise _broken(folder, place, "no record says where its bytes lie")
        return Entry(path, (Chunk((), (), *places[name, None]),))
    fields = _fields(found, "TensorStorageMetadata", folder, place)
    shape, listed = fields.get("size"), fields.get("chunks")
    if not _are_sizes(shape) or not isinstance(listed, list) or len(shape) > MOST_DIMENSIONS:
        raise _broken(folder, place, f"a tensor of size {brief(shape)} in chunks {brief(listed)}")
    chunks = []
    for one in listed:
        spans = _fields(one, "ChunkStorageMetadata", folder, place)
        start, size = spans.get("offsets"), spans.get("sizes")
        if not _are_sizes(start) or not _are_sizes(size) or not len(start) == len(size) == len(shape):
            found_chunk = f"a chunk of size {brief(size)} at {brief(start)} of a tensor of size {list(shape)}"
            raise _broken(folder, place, found_chunk)
        if 0 in size:  # of more ranks than rows, some hold nothing
            continue
        if (name, start) not in places:
            raise _broken(folder, place, f"no record says where its chunk at {list(start)} lies")
        chunks.append(Chunk(start, size, *places[name, start]))
    chunks.sort(key=lambda chunk: chunk.start)
    wrong = fault(shape, [(chunk.start, chunk.shape) for chunk in chunks])
    if wrong:
        raise _broken(folder, place, wrong, f"chunks that cover {list(shape)} without gap or overlap")
    return Entry(path, tuple(chunks), shape, _dtype(fields.get("properties")))


def _dtype(properties: Any) -> DType | None:
    """Return the dtype that a tensor was saved with; None for one that is not in our table."""
    state = properties.given[-1] if isinstance(properties, Inert) and properties.given else ()
    dtype = getattr(state[0], "dtype", None) if isinstance(state, tuple) and state else None
    return dtype if isinstance(dtype, DType) else None


def _fields(thing: Any, kind: str, folder: str, place: str) -> dict[str, Any]:
    """Return what a dataclass was pickled with."""
    if isinstance(thing, Inert) and thing.name.rpartition(".")[2] == kind and thing.given:
        state = thing.given[-1]
        if isinstance(state, dict):
            return state
    found = thing.name if isinstance(thing, Inert) else type(thing).__name__
    raise _broken(folder, place, f"a {found:.80}", f"a {kind} of torch.distributed.checkpoint")


def _are_sizes(value: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and are_naturals(value)


def _is_path(value: Any) -> TypeGuard[tuple[str | int, ...]]:
    if not isinstance(value, tuple) or not value:
        return False
    return all(type(key) is str or (type(key) is int and abs(key) <= MOST_ELEMENTS) for key in value)


def _is_below(file: str) -> bool:
    """Whether a path leads to something in the folder; it is the file's word, and not to be trusted."""
    return "\0" not in file and not {"", ".", ".."}.intersection(file.split("/"))


def _broken(folder: str, place: str, found: str, needed: str = "") -> MalformedFile:
    return MalformedFile(folder, place=place, found=found, needed=needed, next_step=_AGAIN)
