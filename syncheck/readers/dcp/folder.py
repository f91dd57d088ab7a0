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
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from syncheck.errors import CheckpointError, MalformedFile, UnreadableFile
from syncheck.frozen import mutable_record
from syncheck.messages import Note, Refusal
from syncheck.readers import torch_zip
from syncheck.readers.assembly import Assembly
from syncheck.readers.dcp.index import METADATA, Chunk, Entry, read_index
from syncheck.readers.formats import read_file
from syncheck.readers.pickles.stand_ins import TensorLocation, refused_tensor
from syncheck.readers.pickles.tree import flatten
from syncheck.readers.untrusted import FileRange, open_regular_file
from syncheck.readers.zip_archive import MAGIC, PICKLE, Archive, Directory
from syncheck.snapshots import Shard, Snapshot, Tensor, contiguous_strides
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

    from syncheck.messages import Message
    from syncheck.readers.pickles.unpickle import Pickled

FORMAT = "dcp"
CHUNKS = ".distcp"
# torch.save files in which Lightning and Megatron-Core store more values, for example the step.
EXTRAS = ("meta.pt", "common.pt")
_ZIP_END, _ZIP_END_SIZE = b"PK\x05\x06", 22  # a zip's last record, to which torch.save adds no comment
_STATE, _GROUPS = "state.", "param_groups."
# Limit of nested keys, which are converted with recursion.
_MAX_DEPTH = 200
_AGAIN = "the save did not finish, or the copy is not complete: save or copy the folder again"


def _with_extras(snapshot: Snapshot) -> Snapshot:
    """Add the content of the extra torch.save files. Raises CheckpointError for an unreadable file."""
    possible_paths = [os.path.join(snapshot.path, name) for name in EXTRAS]
    paths = [path for path in possible_paths if os.path.lexists(path)]
    if not paths:
        return snapshot

    assembly = Assembly(snapshot.path, snapshot.format)
    assembly.add(snapshot)
    for path in paths:
        assembly.add(read_file(path))
    return assembly.snapshot()


def _note_unlisted_files(folder: str, listed_files: Collection[str]) -> list[Message]:
    """Return a note about chunk files without a tensor: torch does not read them, so they are not compared.

    listed_files: files of the chunks, by path below the folder.
    """
    names = [name for name in os.listdir(folder) if name.endswith(CHUNKS)]
    unlisted_names = sorted(set(names).difference(listed_files))
    if not unlisted_names:
        return []
    return [Note.UNLISTED_FILES(count=len(unlisted_names), names=tuple(unlisted_names))]


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
    entries, index_size = read_index(folder)
    records = _Records(folder, entries)
    for file, chunks in _group_chunks(entries).items():
        records.read_file(file, chunks)

    leaves = [(entry.path, records.make_leaf(name, entry)) for name, entry in entries.items()]
    tree = _rebuild(leaves, folder)
    flat = flatten(tree, folder, index_size + records.pickled, records.rebuilt)
    tensors = {name: replace(records.find_tensor(location), name=name) for name, location in flat.tensors.items()}

    snapshot = Snapshot(
        path=folder,
        format=FORMAT,
        bytes=index_size + sum(records.sizes.values()),
        tensors=tensors,
        values=flat.values,
        stubs=tuple(sorted(records.stubs)),
        metadata=flat.metadata,
        notes=(Note.ONE_COPY(), *records.list_notes(), *_note_unlisted_files(folder, records.sizes)),
        model_values=flat.model_values,
    )
    return _with_extras(snapshot)


class _NamedChunk(NamedTuple):
    """A chunk with the name of its entry."""

    chunk: Chunk
    name: str


def _group_chunks(entries: Mapping[str, Entry]) -> dict[str, list[_NamedChunk]]:
    """Return the chunks of all entries by file, in the order of their records."""
    chunks: list[_NamedChunk] = []
    for name, entry in entries.items():
        chunks += [_NamedChunk(chunk, name) for chunk in entry.chunks]
    chunks.sort(key=_record_order)
    chunks_by_file: dict[str, list[_NamedChunk]] = {}
    for named_chunk in chunks:
        chunks_by_file.setdefault(named_chunk.chunk.file, []).append(named_chunk)
    return chunks_by_file


def _record_order(named_chunk: _NamedChunk) -> tuple[str, int]:
    return named_chunk.chunk.file, named_chunk.chunk.offset


@mutable_record
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

    def read_file(self, name: str, chunks: Sequence[_NamedChunk]) -> None:
        """Read the records of a file. chunks: in the order of their records.

        Raises CheckpointError for the folder, with the record's location.
        """
        with self._open(name, chunks[0]) as file:
            size = os.fstat(file.fileno()).st_size
            self.sizes[name] = size
            read_to = 0
            for named_chunk in chunks:
                start = named_chunk.chunk.offset
                end = start + named_chunk.chunk.length
                if end > size:
                    raise self._malformed(
                        named_chunk,
                        problem=f"ends at byte {end}",
                        needed=f"at most {size}, the file's size",
                    )
                # Without this check, a million names could refer to one long record.
                if start < read_to:
                    problem = f"its record begins at byte {start}"
                    raise self._malformed(
                        named_chunk,
                        problem=problem,
                        needed=f"at least {read_to}, the end of the previous record",
                    )
                read_to = end
                try:
                    self._read_record(file, named_chunk)
                except CheckpointError as error:
                    raise type(error)(self.folder, place=self._locate(named_chunk), found=error.reason) from None
                except (ValueError, OverflowError) as error:  # the zip's directory refers beyond the record
                    raise self._malformed(
                        named_chunk,
                        problem=str(error),
                    ) from None

    def _open(self, name: str, first_chunk: _NamedChunk) -> BinaryIO:
        """Open a file. first_chunk: for errors."""
        try:
            return open_regular_file(os.path.join(self.folder, name))
        except UnreadableFile as error:
            raise self._malformed(
                first_chunk,
                problem=error.reason,
            ) from None
        except (OSError, UnicodeEncodeError) as error:  # a name may contain a lone surrogate
            problem = getattr(error, "strerror", None) or "an invalid file name"
            raise self._malformed(
                first_chunk,
                problem=problem.lower(),
                needed=f"the file listed in {METADATA}",
            ) from None

    def _read_record(self, file: BinaryIO, named_chunk: _NamedChunk) -> None:
        chunk, name = named_chunk
        entry = self.entries[name]
        if entry.shape is None and not _is_zip(file, chunk):
            self._add_unknown(name)
            return

        view = io.BufferedReader(FileRange(file, chunk.offset, chunk.length))
        path = os.path.join(self.folder, chunk.file)
        # Each record is a complete zip, whose offsets count from its own start.
        archive = Archive(Directory(view, path, chunk.offset))
        pickled = archive.unpickle(archive.read_record(PICKLE))
        if entry.shape is None:
            self._add_object(name, archive, pickled)
        else:
            self.shards[name].append(_make_shard(named_chunk, entry, archive, pickled))

    def _add_unknown(self, name: str) -> None:
        """Add an object of a custom planner.

        It is counted, so that it is reported as missing if another replica can be read.
        """
        self.unknown.append(name)
        location = refused_tensor(Refusal.UNKNOWN_RECORD())
        self.objects[name] = location
        self.tensors[id(location)] = Tensor(
            name=name,
            dtype="unknown",
            shape=(),
            strides=(),
            path=self.folder,
            offset=0,
            refused=location.refused,
        )

    def _add_object(self, name: str, archive: Archive, pickled: Pickled) -> None:
        """Add a pickled object, and the tensors in it."""
        for location in pickled.rebuilt:
            self.tensors[id(location)] = archive.tensor(name, location)
        self.rebuilt += pickled.rebuilt
        self.objects[name] = pickled.tree
        self.pickled += pickled.size
        self.stubs |= set(pickled.stubs)

    def _locate(self, named_chunk: _NamedChunk) -> str:
        """Return the location of a chunk for errors: its file and name, and its start if the tensor has several."""
        chunk, name = named_chunk
        has_several_chunks = len(self.entries[name].chunks) > 1
        start = f" at {list(chunk.start)}" if has_several_chunks else ""
        return f"{chunk.file}, '{name}'{start}"

    def _malformed(self, named_chunk: _NamedChunk, *, problem: str, needed: str = "") -> MalformedFile:
        return MalformedFile(
            self.folder,
            place=self._locate(named_chunk),
            found=problem,
            needed=needed,
            next_step=_AGAIN,
        )

    def make_leaf(self, name: str, entry: Entry) -> Any:
        """Return an entry's leaf in the tree: the pickled object, or the location of a tensor."""
        if entry.shape is None:
            return self.objects[name]

        location = TensorLocation(None, entry.dtype, 0, entry.shape, contiguous_strides(entry.shape))
        self.tensors[id(location)] = self._combine_shards(name, entry)
        # Keeps the location alive, so that its id stays unique.
        self.rebuilt.append(location)
        return location

    def find_tensor(self, location: TensorLocation) -> Tensor:
        """Return the tensor of a location in the tree."""
        if id(location) in self.tensors:
            return self.tensors[id(location)]
        # A storage in an object became a tensor only when the tree was flattened.
        return Tensor(
            name="",
            dtype="unknown",
            shape=(),
            strides=(),
            path=self.folder,
            offset=0,
            refused=Refusal.STORAGE_IN_OBJECT(),
        )

    def list_notes(self) -> list[Message]:
        """Return a note about unreadable records, if there are any."""
        if not self.unknown:
            return []
        return [Note.UNKNOWN_RECORDS(count=len(self.unknown), names=tuple(sorted(self.unknown)))]

    def _combine_shards(self, name: str, entry: Entry) -> Tensor:
        shape = entry.shape or ()
        shards = self.shards[name]
        reasons = [shard.tensor.refused for shard in shards if shard.tensor.refused]
        if len(shards) == 1 and not reasons:
            return shards[0].tensor

        refused = None
        if reasons:
            refused = reasons[0]
        elif entry.dtype is None:
            refused = Refusal.UNKNOWN_DTYPE()
        readable_shards = sorted(shards, key=_shard_start) if refused is None else []
        tensor = Tensor(
            name=name,
            dtype=_name_dtype(entry),
            shape=shape,
            strides=contiguous_strides(shape),
            path=self.folder,
            offset=0,
            refused=refused,
        )
        # A tensor without elements has no shards.
        if not readable_shards:
            return replace(tensor, data=b"")
        return replace(tensor, path=readable_shards[0].tensor.path, shards=tuple(readable_shards))


def _make_shard(named_chunk: _NamedChunk, entry: Entry, archive: Archive, pickled: Pickled) -> Shard:
    """Return the tensor in a record as a shard. Raises MalformedFile if it is not the tensor of the index."""
    chunk = named_chunk.chunk
    location = pickled.tree
    if not isinstance(location, TensorLocation):
        location = TensorLocation(None, None, 0, chunk.shape, (), refused=Refusal.UNKNOWN_CLASS())
    tensor = archive.tensor(named_chunk.name, location)
    dtype_name = _name_dtype(entry)
    is_expected = tensor.shape == chunk.shape and tensor.dtype == dtype_name
    if not tensor.refused and not is_expected:
        raise MalformedFile(
            archive.path,
            found=f"the record contains {tensor.dtype} {list(tensor.shape)}",
            needed=f"{dtype_name} {list(chunk.shape)}, as in {METADATA}",
            next_step=_AGAIN,
        )
    return Shard(tensor, chunk.start)


def _name_dtype(entry: Entry) -> str:
    return "unknown" if entry.dtype is None else entry.dtype.name


def _shard_start(shard: Shard) -> tuple[int, ...]:
    return shard.start


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
        branch = _enter_branch(root, path[:-1])
        if branch is None or len(path) > _MAX_DEPTH or path[-1] in branch:
            raise MalformedFile(
                folder,
                place=METADATA,
                found=f"keys {brief(path)}",
                needed="unique keys",
            )
        branch[path[-1]] = leaf
    return _convert(root)


def _enter_branch(root: _Branch, keys: Iterable[str | int]) -> _Branch | None:
    """Return the branch below a path of keys, and create it if necessary. None below a leaf."""
    branch = root
    for key in keys:
        child = branch.setdefault(key, _Branch())
        if not isinstance(child, _Branch):
            return None
        branch = child
    return branch


def _convert(node: Any) -> Any:
    """Convert branches to lists, and to state dicts of optimizers."""
    if not isinstance(node, _Branch):
        return node

    parts = {key: _convert(part) for key, part in node.items()}
    # torch flattens lists too, with the indexes as keys.
    if _are_indexes(parts):
        return [parts[i] for i in range(len(parts))]
    if any(str(key).startswith(_GROUPS) for key in parts):
        if all(_is_flat_key(key) for key in parts):
            return _unflatten(parts)
        return parts

    has_groups = isinstance(parts.get("param_groups"), list)
    if has_groups and parts.keys() <= {"state", "param_groups"}:
        return _restore_optimizer(parts)
    return parts


def _are_indexes(keys: Collection[Any]) -> bool:
    """Whether the keys of a branch are the indexes of a list."""
    if not keys or not all(type(key) is int for key in keys):
        return False
    return sorted(keys) == list(range(len(keys)))


def _is_flat_key(key: Any) -> bool:
    """Whether a key may be one of a flattened optimizer state dict."""
    return isinstance(key, str) and key.startswith((_STATE, _GROUPS))


def _restore_optimizer(parts: dict[str, Any]) -> dict[str, Any]:
    """Undo changes of saving an optimizer's state dict: integer keys became strings, empty states were omitted."""
    state = parts.get("state", {})
    if isinstance(state, dict):
        ids = _list_integer_ids(parts["param_groups"])
        state = {ids.get(key, key): entries for key, entries in state.items()}
    return {"state": state, "param_groups": parts["param_groups"]}


def _list_integer_ids(groups: list[Any]) -> dict[Any, int]:
    """Return the integer ids in parameter groups, by their text."""
    ids: dict[Any, int] = {}
    for group in groups:
        members = group.get("params") if isinstance(group, dict) else None
        if not isinstance(members, list):
            continue
        for key in members:
            if type(key) is int:
                ids[str(key)] = key
    return ids


def _unflatten(parts: dict[str, Any]) -> dict[str, Any]:
    """Undo flatten_optimizer_state_dict=True: keys such as state.fc.weight.exp_avg and param_groups.fc.weight.lr.

    Settings are stored per parameter; parameters with equal settings form a group.
    """
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in parts.items():
        entries, prefix = settings, _GROUPS
        if key.startswith(_STATE):
            entries, prefix = state, _STATE
        parameter, _, entry = key.removeprefix(prefix).rpartition(".")
        entries.setdefault(parameter, {})[entry] = value

    groups: dict[Hashable, dict[str, Any]] = {}
    for parameter, settings_of_parameter in settings.items():
        items = sorted(settings_of_parameter.items())
        group_key = tuple((name, _make_comparable(value, parameter)) for name, value in items)
        # The first parameter of a group determines the order of its settings.
        group = groups.setdefault(group_key, {**settings_of_parameter, "params": []})
        group["params"].append(parameter)
    return {"state": state, "param_groups": list(groups.values())}


def _make_comparable(value: Any, parameter: str) -> Hashable:
    """Return a key for comparing settings; a setting that is not a plain value belongs to this parameter only."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(part, (int, float, str)) for part in value):
        return tuple(value)
    return parameter, id(value)
