"""Read torch.distributed.checkpoint folders, `.metadata` and at least one file per rank, without torch.

Each chunk of a tensor and each pickled object is a complete torch.save zip within a `.distcp` file. A tensor of one
chunk is read like any other; a tensor of several chunks has shards. Tensors have the names that torch.save would give
to the same state dict.
Layout: torch/distributed/checkpoint/filesystem.py of torch 2.6 to 2.15.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, BinaryIO

from syncheck.errors import CheckpointError, MalformedFile, UnreadableFile
from syncheck.messages import Note, Refusal
from syncheck.readers import torch_zip
from syncheck.readers.assembly import Assembly
from syncheck.readers.bookkeeping import remove_bookkeeping
from syncheck.readers.dcp.index import METADATA, Chunk, Entry, read_index
from syncheck.readers.dcp.tree import rebuild
from syncheck.readers.files import read_file
from syncheck.readers.pickles.stand_ins import TensorLocation, refused_tensor
from syncheck.readers.pickles.tree import flatten
from syncheck.readers.pickles.unpickle import unpickle
from syncheck.readers.regular_file import open_regular_file
from syncheck.snapshots import Shard, Snapshot, Tensor, contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from syncheck.messages import Message

FORMAT = "dcp"
CHUNKS = ".distcp"
# torch.save files in which Lightning and Megatron-Core store more values, such as the step.
EXTRAS = ("meta.pt", "common.pt")
_ZIP_END, _ZIP_END_SIZE = b"PK\x05\x06", 22  # a zip's last record, to which torch.save adds no comment
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
    found = _Records(folder)
    chunks = [(name, chunk) for name, entry in entries.items() for chunk in entry.chunks]
    try:
        for name, chunk in sorted(chunks, key=lambda item: (item[1].file, item[1].offset)):
            found.read(name, chunk, entries[name])
    finally:
        found.close()
    leaves = {name: found.make_leaf(name, entry) for name, entry in entries.items()}
    tree = rebuild([(entries[name].path, leaf) for name, leaf in leaves.items()], folder)
    flat = flatten(tree, folder, size + found.pickled, found.made)
    unread = Tensor("", "unknown", (), (), folder, 0, refused=Refusal.STORAGE_IN_OBJECT())
    tensors = {
        name: replace(found.tensors.get(id(location), unread), name=name) for name, location in flat.tensors.items()
    }
    whole = Snapshot(
        folder, FORMAT, size + sum(found.sizes.values()), tensors, flat.values, tuple(sorted(found.stubs)),
        flat.metadata, (Note.ONE_COPY(), *found.list_notes(), *_note_unlisted_files(folder, found.sizes)),
    )  # fmt: skip
    return remove_bookkeeping(_with_extras(whole))


@dataclass
class _Records:
    """Reads the records of a folder in file order, with one open file at a time."""

    folder: str
    tensors: dict[int, Tensor] = field(default_factory=dict)
    """By the id of the tensor's TensorLocation in the tree."""
    shards: dict[str, list[Shard]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    made: list[TensorLocation] = field(default_factory=list)
    """All stored tensors; each needs a name."""
    unknown: list[str] = field(default_factory=list)
    stubs: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    pickled: int = 0
    file: BinaryIO | None = None
    opened: str = ""
    read_to: int = 0
    """End of the last record in the open file."""

    def read(self, name: str, chunk: Chunk, entry: Entry) -> None:
        """Read one record. Raises CheckpointError for the folder, with the record's location."""
        place = f"{chunk.file}, '{name}'" + (f" at {list(chunk.start)}" if len(entry.chunks) > 1 else "")
        file = self._open(chunk, place)
        # Without this check, a million names could refer to one long record.
        if chunk.offset < self.read_to:
            found = f"its record begins at byte {chunk.offset}"
            needed = f"at least {self.read_to}, the end of the previous record"
            raise MalformedFile(self.folder, place=place, found=found, needed=needed, next_step=_AGAIN)
        self.read_to = chunk.offset + chunk.length
        view = io.BufferedReader(_FileRange(file, chunk.offset, chunk.length))
        if entry.shape is None and not _is_zip(file, chunk):
            self._add_unknown(name)
            return
        try:
            archive = torch_zip.Archive(view, os.path.join(self.folder, chunk.file))
            data = archive.read_record("data.pkl")
            made: list[TensorLocation] = []
            tree, stubs = unpickle(data, archive.path, f"{archive.stem}data.pkl", made=made)
            if entry.shape is None:
                big = archive.is_big_endian()
                self.tensors |= {id(part): _shift_offset(archive.tensor(name, part, big), chunk) for part in made}
                self.made += made
                self.objects[name] = tree
                self.pickled += len(data)
                self.stubs |= set(stubs)
            else:
                self._add_shard(name, tree, archive, chunk, entry)
        except CheckpointError as error:
            if error.path == self.folder:
                raise
            raise type(error)(self.folder, place=place, found=error.reason) from None
        except (ValueError, OverflowError) as error:  # the zip's directory refers beyond the record
            raise MalformedFile(self.folder, place=place, found=str(error), next_step=_AGAIN) from None

    def close(self) -> None:
        """Close the open file."""
        if self.file is not None:
            self.file.close()

    def make_leaf(self, name: str, entry: Entry) -> Any:
        """Return an entry's leaf in the tree: the pickled object, or the location of a tensor."""
        if entry.shape is None:
            return self.objects[name]
        location = TensorLocation(None, entry.dtype, 0, entry.shape, contiguous_strides(entry.shape))
        self.tensors[id(location)] = self._combine_shards(name, entry)
        self.made.append(location)  # keeps the object alive, so that its id stays unique
        return location

    def list_notes(self) -> Iterator[Message]:
        """Yield a note about unreadable records."""
        if self.unknown:
            yield Note.UNKNOWN_RECORDS(count=len(self.unknown), names=tuple(sorted(self.unknown)))

    def _open(self, chunk: Chunk, place: str) -> BinaryIO:
        """Return the open file of a chunk, after checking that it contains the chunk."""
        if self.file is None or self.opened != chunk.file:
            self.close()
            path = os.path.join(self.folder, chunk.file)
            try:
                self.file, self.opened, self.read_to = open_regular_file(path), chunk.file, 0
            except UnreadableFile as error:
                raise MalformedFile(self.folder, place=place, found=error.reason, next_step=_AGAIN) from None
            except (OSError, UnicodeEncodeError) as error:  # a name may contain a lone surrogate
                found = getattr(error, "strerror", None) or "an invalid file name"
                raise MalformedFile(
                    self.folder, place=place, found=found.lower(),
                    needed=f"the file listed in {METADATA}", next_step=_AGAIN,
                ) from None  # fmt: skip
            self.sizes[chunk.file] = os.fstat(self.file.fileno()).st_size
        end, size = chunk.offset + chunk.length, self.sizes[chunk.file]
        if end > size:
            found = f"ends at byte {end}"
            raise MalformedFile(
                self.folder, place=place, found=found, needed=f"at most {size}, the file's size", next_step=_AGAIN
            )
        return self.file

    def _add_unknown(self, name: str) -> None:
        """Count an object of a custom planner, so that it is reported as missing if another replica can be read."""
        self.unknown.append(name)
        location = refused_tensor(Refusal.UNKNOWN_RECORD())
        self.tensors[id(location)] = Tensor(name, "unknown", (), (), self.folder, 0, refused=location.refused)
        self.objects[name] = location

    def _add_shard(self, name: str, tree: Any, archive: torch_zip.Archive, chunk: Chunk, entry: Entry) -> None:
        if not isinstance(tree, TensorLocation):
            tree = TensorLocation(None, None, 0, chunk.shape, (), refused=Refusal.UNKNOWN_CLASS())
        tensor = _shift_offset(archive.tensor(name, tree, archive.is_big_endian()), chunk)
        dtype = entry.dtype.name if entry.dtype is not None else "unknown"
        if not tensor.refused and (tensor.shape, tensor.dtype) != (chunk.shape, dtype):
            raise MalformedFile(
                archive.path, found=f"the record contains {tensor.dtype} {list(tensor.shape)}",
                needed=f"{dtype} {list(chunk.shape)}, as in {METADATA}", next_step=_AGAIN,
            )  # fmt: skip
        self.shards.setdefault(name, []).append(Shard(tensor, chunk.start))

    def _combine_shards(self, name: str, entry: Entry) -> Tensor:
        shape, shards = entry.shape or (), self.shards.get(name, [])
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
    if torch_zip.matches(os.pread(file.fileno(), min(chunk.length, len(torch_zip.MAGIC)), chunk.offset)):
        return True
    end = chunk.offset + max(0, chunk.length - _ZIP_END_SIZE)
    return os.pread(file.fileno(), len(_ZIP_END), end) == _ZIP_END


class _FileRange(io.RawIOBase):
    """A range of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("an offset before the start of the record")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        got = os.preadv(self.fileno(), [room], self._start + self._at) if len(room) else 0
        self._at += got
        return got


def _shift_offset(tensor: Tensor, chunk: Chunk) -> Tensor:
    """Make a tensor's offset relative to the start of the file instead of its chunk."""
    if tensor.data is not None or tensor.refused:
        return tensor
    record = tensor.record
    if record is not None:
        record = (record[0], record[1] + chunk.offset, record[2])
    return replace(tensor, offset=tensor.offset + chunk.offset, record=record)
