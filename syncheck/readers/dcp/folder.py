"""Read torch.distributed.checkpoint folders, `.metadata` and at least one file per rank, without torch.

Each chunk of a tensor and each pickled object is a complete torch.save zip within a `.distcp` file. A tensor of one
chunk is read like any other; a tensor of several chunks has shards. Tensors have the names that torch.save would give
to the same state dict.
Layout: torch/distributed/checkpoint/filesystem.py of torch 2.6 to 2.15.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, BinaryIO

from syncheck.errors import CheckpointError, MalformedFile, UnreadableFile
from syncheck.messages import Note, Refusal
from syncheck.readers import torch_zip
from syncheck.readers.assembly import Assembly
from syncheck.readers.dcp.index import METADATA, Chunk, Entry, read_index
from syncheck.readers.formats import read_file
from syncheck.readers.pickles.stand_ins import TensorLocation, refused_tensor
from syncheck.readers.pickles.tree import flatten
from syncheck.readers.untrusted import FileRange, open_regular_file
from syncheck.readers.zip_archive import MAGIC, Archive, Directory
from syncheck.snapshots import Shard, Snapshot, Tensor, contiguous_strides
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence

    from syncheck.messages import Message

FORMAT = "dcp"
CHUNKS = ".distcp"
# torch.save files in which Lightning and Megatron-Core store more values, such as the step.
EXTRAS = ("meta.pt", "common.pt")
_ZIP_END, _ZIP_END_SIZE = b"PK\x05\x06", 22  # a zip's last record, to which torch.save adds no comment
_STATE, _GROUPS = "state.", "param_groups."
# Limit of nested keys, which are converted with recursion.
_MAX_DEPTH = 200
_AGAIN = "the save did not finish, or the copy is not complete: save or copy the folder again"


def _with_extras(whole: Snapshot) -> Snapshot:
    """Add the content of the extra torch.save files. Raises CheckpointError for an unreadable file."""
    paths = [path for name in EXTRAS if os.path.lexists(path := os.path.join(whole.path, name))]
    if not paths:
        return whole
    assembly = Assembly(whole.path, whole.format)
    for part in (whole, *map(read_file, paths)):
        assembly.add(part)
    return assembly.snapshot()


def _note_unlisted_files(folder: str, listed: Collection[str]) -> Iterator[Message]:
    """Yield a note about chunk files without a tensor: torch does not read them, so they are not compared.

    listed: files of the chunks, by path below the folder.
    """
    found = sorted(name for name in os.listdir(folder) if name.endswith(CHUNKS) and name not in listed)
    if found:
        yield Note.UNLISTED_FILES(count=len(found), names=tuple(found))


def matches_folder(folder: str) -> bool:
    """Whether a folder has `.metadata`, or chunk files without it. Raises OSError."""
    if os.path.isfile(os.path.join(folder, METADATA)):
        return True
    return any(name.endswith(CHUNKS) for name in os.listdir(folder))


def holds(relative: str) -> bool:
    """Whether a file belongs to this format. relative: its path below the folder."""
    return relative in EXTRAS or relative.endswith(CHUNKS)


def read(folder: str) -> Snapshot:
    """Open a folder as one checkpoint without reading tensor data.

    Raises MalformedFile for chunks that are missing, truncated, or do not cover their tensor, RefusedFile for a pickle
    that would execute code, UnsupportedFormat for chunks of other writers.
    """
    entries, size = read_index(folder)
    found = _Records(folder, entries)
    chunks = [(chunk, name) for name, entry in entries.items() for chunk in entry.chunks]
    chunks.sort(key=lambda item: (item[0].file, item[0].offset))
    for file, records in groupby(chunks, key=lambda item: item[0].file):
        found.read_file(file, list(records))
    leaves = {name: found.make_leaf(name, entry) for name, entry in entries.items()}
    tree = _rebuild([(entries[name].path, leaf) for name, leaf in leaves.items()], folder)
    flat = flatten(tree, folder, size + found.pickled, found.rebuilt)
    unread = Tensor("", "unknown", (), (), folder, 0, refused=Refusal.STORAGE_IN_OBJECT())
    tensors = {
        name: replace(found.tensors.get(id(location), unread), name=name) for name, location in flat.tensors.items()
    }
    whole = Snapshot(
        folder, FORMAT, size + sum(found.sizes.values()), tensors, flat.values, tuple(sorted(found.stubs)),
        flat.metadata, (Note.ONE_COPY(), *found.list_notes(), *_note_unlisted_files(folder, found.sizes)),
        model_values=flat.model_values,
    )  # fmt: skip
    return _with_extras(whole)


@dataclass
class _Records:
    """Reads the records of a folder."""

    folder: str
    entries: Mapping[str, Entry]
    tensors: dict[int, Tensor] = field(default_factory=dict)
    """By the id of the tensor's TensorLocation in the tree."""
    shards: dict[str, list[Shard]] = field(default_factory=lambda: defaultdict(list))
    objects: dict[str, Any] = field(default_factory=dict)
    rebuilt: list[TensorLocation] = field(default_factory=list)
    """All stored tensors; each needs a name."""
    unknown: list[str] = field(default_factory=list)
    stubs: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    pickled: int = 0

    def read_file(self, name: str, records: Sequence[tuple[Chunk, str]]) -> None:
        """Read the records of a file. records: in their order, with the names of their entries.

        Raises CheckpointError for the folder, with the record's location.
        """
        try:
            file = open_regular_file(os.path.join(self.folder, name))
        except UnreadableFile as error:
            raise self._malformed(*records[0], error.reason) from None
        except (OSError, UnicodeEncodeError) as error:  # a name may contain a lone surrogate
            found = getattr(error, "strerror", None) or "an invalid file name"
            raise self._malformed(*records[0], found.lower(), f"the file listed in {METADATA}") from None
        with file:
            size = self.sizes[name] = os.fstat(file.fileno()).st_size
            read_to = 0
            for chunk, entry in records:
                if (end := chunk.offset + chunk.length) > size:
                    raise self._malformed(chunk, entry, f"ends at byte {end}", f"at most {size}, the file's size")
                # Without this check, a million names could refer to one long record.
                if chunk.offset < read_to:
                    found = f"its record begins at byte {chunk.offset}"
                    raise self._malformed(chunk, entry, found, f"at least {read_to}, the end of the previous record")
                read_to = end
                try:
                    self._read_record(file, chunk, entry)
                except CheckpointError as error:
                    raise type(error)(self.folder, place=self._place(chunk, entry), found=error.reason) from None
                except (ValueError, OverflowError) as error:  # the zip's directory refers beyond the record
                    raise self._malformed(chunk, entry, str(error)) from None

    def _read_record(self, file: BinaryIO, chunk: Chunk, name: str) -> None:
        entry = self.entries[name]
        if entry.shape is None and not _is_zip(file, chunk):
            # An object of a custom planner: counted, so that it is reported as missing if another replica can be read.
            self.unknown.append(name)
            self.objects[name] = location = refused_tensor(Refusal.UNKNOWN_RECORD())
            self.tensors[id(location)] = Tensor(name, "unknown", (), (), self.folder, 0, refused=location.refused)
            return
        view = io.BufferedReader(FileRange(file, chunk.offset, chunk.length))
        path = os.path.join(self.folder, chunk.file)
        archive = Archive(Directory(view, path, chunk.offset))
        pickled = archive.unpickle()
        if entry.shape is None:
            self.tensors |= {id(part): archive.tensor(name, part) for part in pickled.rebuilt}
            self.rebuilt += pickled.rebuilt
            self.objects[name] = pickled.tree
            self.pickled += pickled.size
            self.stubs |= set(pickled.stubs)
            return
        location = pickled.tree
        if not isinstance(location, TensorLocation):
            location = TensorLocation(None, None, 0, chunk.shape, (), refused=Refusal.UNKNOWN_CLASS())
        tensor = archive.tensor(name, location)
        dtype = entry.dtype.name if entry.dtype is not None else "unknown"
        if not tensor.refused and (tensor.shape, tensor.dtype) != (chunk.shape, dtype):
            found = f"the record contains {tensor.dtype} {list(tensor.shape)}"
            needed = f"{dtype} {list(chunk.shape)}, as in {METADATA}"
            raise MalformedFile(archive.path, found=found, needed=needed, next_step=_AGAIN)
        self.shards[name].append(Shard(tensor, chunk.start))

    def _place(self, chunk: Chunk, name: str) -> str:
        return f"{chunk.file}, '{name}'" + (f" at {list(chunk.start)}" if len(self.entries[name].chunks) > 1 else "")

    def _malformed(self, chunk: Chunk, name: str, found: str, needed: str = "") -> MalformedFile:
        return MalformedFile(self.folder, place=self._place(chunk, name), found=found, needed=needed, next_step=_AGAIN)

    def make_leaf(self, name: str, entry: Entry) -> Any:
        """Return an entry's leaf in the tree: the pickled object, or the location of a tensor."""
        if entry.shape is None:
            return self.objects[name]
        location = TensorLocation(None, entry.dtype, 0, entry.shape, contiguous_strides(entry.shape))
        self.tensors[id(location)] = self._combine_shards(name, entry)
        self.rebuilt.append(location)  # keeps the object alive, so that its id stays unique
        return location

    def list_notes(self) -> Iterator[Message]:
        """Yield a note about unreadable records."""
        if self.unknown:
            yield Note.UNKNOWN_RECORDS(count=len(self.unknown), names=tuple(sorted(self.unknown)))

    def _combine_shards(self, name: str, entry: Entry) -> Tensor:
        shape, shards = entry.shape or (), self.shards[name]
        if len(shards) == 1 and not shards[0].tensor.refused:
            return shards[0].tensor
        refused = next((shard.tensor.refused for shard in shards if shard.tensor.refused), None)
        dtype = entry.dtype.name if entry.dtype is not None else "unknown"
        if entry.dtype is None:
            refused = refused or Refusal.UNKNOWN_DTYPE()
        shards = [] if refused else sorted(shards, key=lambda shard: shard.start)
        path = shards[0].tensor.path if shards else self.folder
        data = None if shards else b""  # for a tensor without elements
        return Tensor(
            name, dtype, shape, contiguous_strides(shape), path, 0, refused=refused, data=data, shards=tuple(shards)
        )


def _is_zip(file: BinaryIO, chunk: Chunk) -> bool:
    """Whether a record starts or ends as a zip; if it only ends as a zip, it is damaged."""
    if torch_zip.matches(os.pread(file.fileno(), min(chunk.length, len(MAGIC)), chunk.offset)):
        return True
    end = chunk.offset + max(0, chunk.length - _ZIP_END_SIZE)
    return os.pread(file.fileno(), len(_ZIP_END), end) == _ZIP_END


class _Branch(dict[Any, Any]):
    """A container of the saved state dict, as opposed to dicts within a pickled object."""


def _rebuild(leaves: Iterable[tuple[tuple[str | int, ...], Any]], folder: str) -> Any:
    """Return the nested state dict, with the names of a torch.save file.

    leaves: (keys, object) pairs; integer keys are list indexes.
    Raises MalformedFile if a path of keys continues below another leaf.
    """
    root = _Branch()
    for path, leaf in leaves:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Branch())
            if not isinstance(node, _Branch):
                break
        if len(path) > _MAX_DEPTH or not isinstance(node, _Branch) or path[-1] in node:
            raise MalformedFile(folder, place=METADATA, found=f"keys {brief(path)}", needed="unique keys")
        node[path[-1]] = leaf
    return _convert(root)


def _convert(node: Any) -> Any:
    """Convert branches to lists, and to state dicts of optimizers."""
    if not isinstance(node, _Branch):
        return node
    parts = {key: _convert(part) for key, part in node.items()}
    if parts and all(type(key) is int for key in parts) and sorted(parts) == list(range(len(parts))):
        return [parts[i] for i in range(len(parts))]
    if any(str(key).startswith(_GROUPS) for key in parts):
        if all(isinstance(key, str) and key.startswith((_STATE, _GROUPS)) for key in parts):
            return _unflatten(parts)
    elif isinstance(parts.get("param_groups"), list) and parts.keys() <= {"state", "param_groups"}:
        return _restore_optimizer(parts)
    return parts


def _restore_optimizer(parts: dict[str, Any]) -> dict[str, Any]:
    """Undo changes of saving an optimizer's state dict: integer keys became strings, empty states were omitted."""
    state = parts.get("state", {})
    groups = [group for group in parts["param_groups"] if isinstance(group, dict)]
    listed = [group["params"] for group in groups if isinstance(group.get("params"), list)]
    ids = {str(key): key for keys in listed for key in keys if type(key) is int}
    if isinstance(state, dict):
        state = {ids.get(key, key) if isinstance(key, str) else key: entries for key, entries in state.items()}
    return {"state": state, "param_groups": parts["param_groups"]}


def _unflatten(parts: dict[str, Any]) -> dict[str, Any]:
    """Undo flatten_optimizer_state_dict=True: keys such as state.fc.weight.exp_avg and param_groups.fc.weight.lr.

    Settings are stored per parameter; parameters with equal settings form a group.
    """
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in parts.items():
        entries, start = (state, _STATE) if key.startswith(_STATE) else (settings, _GROUPS)
        parameter, _, entry = key.removeprefix(start).rpartition(".")
        entries.setdefault(parameter, {})[entry] = value
    groups: dict[Hashable, dict[str, Any]] = {}
    for parameter, found in settings.items():
        settings_key = tuple((name, _make_comparable(value, parameter)) for name, value in sorted(found.items()))
        group = groups.setdefault(settings_key, {**found, "params": []})
        group["params"].append(parameter)
    return {"state": state, "param_groups": list(groups.values())}


def _make_comparable(value: Any, parameter: str) -> Hashable:
    """Return a key for comparing settings; a setting that is not a plain value belongs to this parameter only."""
    if isinstance(value, (tuple, list)) and all(isinstance(part, (int, float, str)) for part in value):
        return tuple(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else (parameter, id(value))
