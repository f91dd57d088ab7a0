"""Folders of torch.distributed.checkpoint: `.metadata` and one file or more of each rank, read without torch.

Each chunk of a tensor, and each pickled object, is a whole torch.save zip at some place of a `.distcp` file. A tensor
of one chunk is read like any other; of several, it is a tensor in parts. The names are those that torch.save of the
same state dict would have had.
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
from syncheck.readers.bookkeeping import settled
from syncheck.readers.dcp.index import METADATA, Chunk, Entry, read_index
from syncheck.readers.dcp.tree import rebuild
from syncheck.readers.files import read_file
from syncheck.readers.opening import regular
from syncheck.readers.pickles.stand_ins import TensorPlace, refused_place
from syncheck.readers.pickles.tree import flatten
from syncheck.readers.pickles.unpickle import unpickle
from syncheck.snapshots import Shard, Snapshot, Tensor, in_c_order

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from syncheck.messages import Message

FORMAT = "dcp"
CHUNKS = ".distcp"
# Written by torch.save: what Lightning and Megatron-Core keep apart, such as the step.
EXTRAS = ("meta.pt", "common.pt")
_ZIP_END, _ZIP_END_SIZE = b"PK\x05\x06", 22  # a zip's last record, which torch.save writes without a comment
_AGAIN = "the save did not finish, or the copy is not complete: save or copy the folder again"


def _with_extras(whole: Snapshot) -> Snapshot:
    """Add what the files hold that are no chunks. Raises CheckpointError for one that cannot be read."""
    there = [path for name in EXTRAS if os.path.lexists(path := os.path.join(whole.path, name))]
    if not there:
        return whole
    assembly = Assembly(whole.path, whole.format)
    for part in (whole, *map(read_file, there)):
        assembly.add(part)
    return assembly.snapshot()


def _unlisted(folder: str, named: Collection[str]) -> Iterator[Message]:
    """Yield a note about chunk files that belong to no tensor: torch does not read them, so they are not compared.

    named: those in which chunks lie, by their path below the folder.
    """
    found = sorted(name for name in os.listdir(folder) if name.endswith(CHUNKS) and name not in named)
    if found:
        yield Note.UNLISTED_FILES(count=len(found), names=tuple(found))


def matches_folder(folder: str) -> bool:
    """Whether a folder is of this format: with `.metadata`, or with chunks that have lost it. Raises OSError."""
    if os.path.isfile(os.path.join(folder, METADATA)):
        return True
    return any(name.endswith(CHUNKS) for name in os.listdir(folder))


def holds(relative: str) -> bool:
    """Whether a file belongs to such a checkpoint. relative: its path below the folder."""
    return relative in EXTRAS or relative.endswith(CHUNKS)


def read(folder: str) -> Snapshot:
    """Open a folder as one checkpoint: its tensors' names and places, its values and its metadata block.

    Raises MalformedFile for chunks that are missing, cut short, or do not cover their tensor, RefusedFile for a pickle
    that wants to run something, UnsupportedFormat for chunks that other writers made.
    """
    entries, size = read_index(folder)
    found = _Found(folder)
    chunks = [(name, chunk) for name, entry in entries.items() for chunk in entry.chunks]
    try:
        for name, chunk in sorted(chunks, key=lambda item: (item[1].file, item[1].offset)):
            found.read(name, chunk, entries[name])
    finally:
        found.close()
    leaves = {name: found.leaf(name, entry) for name, entry in entries.items()}
    tree = rebuild([(entries[name].path, leaf) for name, leaf in leaves.items()], folder)
    flat = flatten(tree, folder, size + found.pickled, found.made)
    unread = Tensor("", "unknown", (), (), folder, 0, refused=Refusal.STORAGE_IN_OBJECT())
    tensors = {name: replace(found.tensors.get(id(place), unread), name=name) for name, place in flat.tensors.items()}
    whole = Snapshot(
        folder, FORMAT, size + sum(found.sizes.values()), tensors, flat.values, tuple(sorted(found.stubs)),
        flat.metadata, (Note.ONE_COPY(), *found.notes(), *_unlisted(folder, found.sizes)),
    )  # fmt: skip
    return settled(_with_extras(whole))


@dataclass
class _Found:
    """What the records of a folder hold; read in the order in which they lie, one file open at a time."""

    folder: str
    tensors: dict[int, Tensor] = field(default_factory=dict)
    """By the id of the place that stands for it in the tree."""
    parts: dict[str, list[Shard]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    made: list[TensorPlace] = field(default_factory=list)
    """Every tensor that is stored; each is to end under a name."""
    unknown: list[str] = field(default_factory=list)
    stubs: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    pickled: int = 0
    file: BinaryIO | None = None
    opened: str = ""
    read_to: int = 0
    """Where in that file the last record ends."""

    def read(self, name: str, chunk: Chunk, entry: Entry) -> None:
        """Open one record. Raises CheckpointError, with the folder's path and the place in it."""
        place = f"{chunk.file}, '{name}'" + (f" at {list(chunk.start)}" if len(entry.chunks) > 1 else "")
        file = self._open(chunk, place)
        # Else one record, however long, could be read for each of a million names.
        if chunk.offset < self.read_to:
            found = f"its record begins at byte {chunk.offset}"
            needed = f"at least {self.read_to}, where the one before ends"
            raise MalformedFile(self.folder, place=place, found=found, needed=needed, next_step=_AGAIN)
        self.read_to = chunk.offset + chunk.length
        view = io.BufferedReader(_View(file, chunk.offset, chunk.length))
        if entry.shape is None and not _is_zip(file, chunk):
            self._add_unknown(name)
            return
        try:
            archive = torch_zip.Archive(view, os.path.join(self.folder, chunk.file))
            data = archive.bytes_of("data.pkl")
            made: list[TensorPlace] = []
            tree, stubs = unpickle(data, archive.path, f"{archive.stem}data.pkl", made=made)
            if entry.shape is None:
                big = archive.big_endian()
                self.tensors |= {id(place): _moved(archive.tensor(name, place, big), chunk) for place in made}
                self.made += made
                self.objects[name] = tree
                self.pickled += len(data)
                self.stubs |= set(stubs)
            else:
                self._add_part(name, tree, archive, chunk, entry)
        except CheckpointError as error:
            if error.path == self.folder:
                raise
            raise type(error)(self.folder, place=place, found=error.reason) from None
        except (ValueError, OverflowError) as error:  # the zip's directory leads out of the record
            raise MalformedFile(self.folder, place=place, found=str(error), next_step=_AGAIN) from None

    def close(self) -> None:
        """Close the file that is open."""
        if self.file is not None:
            self.file.close()

    def leaf(self, name: str, entry: Entry) -> Any:
        """Return what stands for an entry in the tree: the object that was pickled, or a tensor's place."""
        if entry.shape is None:
            return self.objects[name]
        place = TensorPlace(None, entry.dtype, 0, entry.shape, in_c_order(entry.shape))
        self.tensors[id(place)] = self._whole(name, entry)
        self.made.append(place)  # an id is one thing's own only as long as that lives
        return place

    def notes(self) -> Iterator[Message]:
        """Yield a note about records that could not be read."""
        if self.unknown:
            yield Note.UNKNOWN_RECORDS(count=len(self.unknown), names=tuple(sorted(self.unknown)))

    def _open(self, chunk: Chunk, place: str) -> BinaryIO:
        """Return the file of a chunk, which lies within it."""
        if self.file is None or self.opened != chunk.file:
            self.close()
            path = os.path.join(self.folder, chunk.file)
            try:
                self.file, self.opened, self.read_to = regular(path), chunk.file, 0
            except UnreadableFile as error:
                raise MalformedFile(self.folder, place=place, found=error.reason, next_step=_AGAIN) from None
            except (OSError, UnicodeEncodeError) as error:  # a name may hold half a character
                found = getattr(error, "strerror", None) or "a name that no file can have"
                raise MalformedFile(
                    self.folder, place=place, found=found.lower(),
                    needed=f"the file that {METADATA} names", next_step=_AGAIN,
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
        """Count an object that a planner of the user's own wrote: beside a replica that can be read it is missing."""
        self.unknown.append(name)
        place = refused_place(Refusal.UNKNOWN_RECORD())
        self.tensors[id(place)] = Tensor(name, "unknown", (), (), self.folder, 0, refused=place.refused)
        self.objects[name] = place

    def _add_part(self, name: str, tree: Any, archive: torch_zip.Archive, chunk: Chunk, entry: Entry) -> None:
        if not isinstance(tree, TensorPlace):
            tree = TensorPlace(None, None, 0, chunk.shape, (), refused=Refusal.UNKNOWN_CLASS())
        tensor = _moved(archive.tensor(name, tree, archive.big_endian()), chunk)
        dtype = entry.dtype.name if entry.dtype is not None else "unknown"
        if not tensor.refused and (tensor.shape, tensor.dtype) != (chunk.shape, dtype):
            raise MalformedFile(
                archive.path, found=f"the record holds {tensor.dtype} {list(tensor.shape)}",
                needed=f"{dtype} {list(chunk.shape)}, as {METADATA} says", next_step=_AGAIN,
            )  # fmt: skip
        self.parts.setdefault(name, []).append(Shard(tensor, chunk.start))

    def _whole(self, name: str, entry: Entry) -> Tensor:
        shape, parts = entry.shape or (), self.parts.get(name, [])
        if len(parts) == 1 and not parts[0].tensor.refused:
            return parts[0].tensor
        refused = next((part.tensor.refused for part in parts if part.tensor.refused), None)
        dtype = entry.dtype.name if entry.dtype is not None else "unknown"
        if entry.dtype is None:
            refused = refused or Refusal.UNKNOWN_DTYPE()
        parts = [] if refused else sorted(parts, key=lambda part: part.start)
        path = parts[0].tensor.path if parts else self.folder
        data = None if parts else b""  # of a tensor without elements
        return Tensor(name, dtype, shape, in_c_order(shape), path, 0, refused=refused, data=data, shards=tuple(parts))


def _is_zip(file: BinaryIO, chunk: Chunk) -> bool:
    """Whether a record begins or ends as a zip does; where it only ends as one, its beginning is damaged."""
    if torch_zip.matches(os.pread(file.fileno(), min(chunk.length, len(torch_zip.MAGIC)), chunk.offset)):
        return True
    end = chunk.offset + max(0, chunk.length - _ZIP_END_SIZE)
    return os.pread(file.fileno(), len(_ZIP_END), end) == _ZIP_END


class _View(io.RawIOBase):
    """A stretch of a file as a file of its own."""

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
            raise ValueError("a place before the start of the record")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        got = os.preadv(self.fileno(), [room], self._start + self._at) if len(room) else 0
        self._at += got
        return got


def _moved(tensor: Tensor, chunk: Chunk) -> Tensor:
    """Count a tensor's place from the start of the file and not from that of its chunk."""
    if tensor.data is not None or tensor.refused:
        return tensor
    record = tensor.record
    if record is not None:
        record = (record[0], record[1] + chunk.offset, record[2])
    return replace(tensor, offset=tensor.offset + chunk.offset, record=record)
