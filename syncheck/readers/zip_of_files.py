"""Zips of torch.save files, like the models of stable-baselines3: `policy.pth`, `policy.optimizer.pth`, `data`, ...

Each torch.save file is read within the zip, below its name without the file extension.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from syncheck.errors import CheckpointError, NotACheckpoint, UnsupportedFormat
from syncheck.messages import Note
from syncheck.readers.pickles.tree import flatten
from syncheck.readers.unread import NEEDED, Unread, describe_zip
from syncheck.readers.untrusted import FileRange
from syncheck.readers.zip_archive import MAGIC, PICKLE, Archive, Directory
from syncheck.snapshots import Snapshot

if TYPE_CHECKING:
    from syncheck.messages import Message
    from syncheck.readers.pickles.stand_ins import TensorLocation
    from syncheck.snapshots import Tensor

_EXTENSIONS = (".pth", ".pt", ".ckpt", ".bin")
# Between the number of a file and the key of a storage in it.
_SEPARATOR = ":"


def read(directory: Directory, format_name: str) -> Snapshot:
    """Open the torch.save files of a zip as one checkpoint.

    Raises NotACheckpoint for a zip of other files, and CheckpointError with the name of an unreadable file.
    """
    files = _Files(directory)
    for name in _list_files(directory):
        try:
            files.add(name)
        except CheckpointError as error:
            raise type(error)(directory.path, place=name, found=error.reason) from None

    directory.check_overlaps()
    flat = flatten(files.tree, directory.path, files.pickled_bytes, files.rebuilt)
    tensors = {name: files.locate(name, location) for name, location in flat.tensors.items()}
    return Snapshot(
        path=directory.path,
        format=format_name,
        bytes=directory.size,
        tensors=tensors,
        values=flat.values,
        stubs=tuple(sorted(files.stubs)),
        metadata=flat.metadata,
        notes=_note_unread_records(directory, files),
        numbered=flat.numbered,
        matched=flat.matched,
        model_values=flat.model_values,
    )


def _list_files(directory: Directory) -> list[str]:
    """Return the names of the torch.save files. Raises NotACheckpoint if there are none."""
    unread = describe_zip(directory.records)
    candidates = [name for name in directory.records if name.lower().endswith(_EXTENSIONS)]
    names = [name for name in candidates if _is_torch_file(directory, name)]
    if unread is None and not names:
        first_names = ", ".join(list(directory.records)[:3])
        unread = Unread(f"a zip ({first_names})", "unpack it, and pass a file or folder of it")
    if unread is not None:
        raise NotACheckpoint(
            directory.path,
            found=unread.title,
            needed=NEEDED,
            next_step=unread.next_step,
        )

    # A file of weights that is not read must not be missing from the comparison.
    for name in candidates:
        if name not in names:
            raise UnsupportedFormat(
                directory.path,
                place=name,
                found="not an uncompressed torch.save file since torch 1.6",
                needed="one, as the other files of the zip",
                next_step="unpack the zip, and pass its files",
            )
    return names


def _is_torch_file(directory: Directory, name: str) -> bool:
    """Whether a record is an uncompressed file that starts as torch.save writes it."""
    try:
        offset, size = directory.locate(name)
    except UnsupportedFormat:
        return False
    record = FileRange(directory.file, offset, size)
    return io.BufferedReader(record).read(len(MAGIC)) == MAGIC


def _note_unread_records(directory: Directory, files: _Files) -> tuple[Message, ...]:
    unread_names = sorted(directory.records.keys() - files.names)
    if not unread_names:
        return ()
    return (Note.UNKNOWN_RECORDS(count=len(unread_names), names=tuple(unread_names)),)


class _Files:
    """The content of the torch.save files of a zip.

    tree: by name without the file extension.
    rebuilt: all tensors that the files rebuild.
    """

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.names: set[str] = set()
        self.tree: dict[str, Any] = {}
        self.rebuilt: list[TensorLocation] = []
        self.stubs: set[str] = set()
        self.pickled_bytes = 0
        self._archives: list[Archive] = []

    def add(self, name: str) -> None:
        """Read the pickle of a torch.save file."""
        offset, size = self.directory.locate(name)
        view = io.BufferedReader(FileRange(self.directory.file, offset, size))
        # Storages of all files have numbers from 0 as keys.
        key_prefix = f"{len(self._archives)}{_SEPARATOR}"
        archive = Archive(Directory(view, self.directory.path, offset), key_prefix)
        pickled = archive.unpickle(archive.read_record(PICKLE))
        self._archives.append(archive)
        self.names.add(name)
        stem = name.rpartition(".")[0]
        # Two files can differ in their extension only.
        key = name if stem in self.tree else stem
        self.tree[key] = pickled.tree
        self.rebuilt += pickled.rebuilt
        self.stubs |= set(pickled.stubs)
        self.pickled_bytes += pickled.size

    def locate(self, name: str, location: TensorLocation) -> Tensor:
        """Check that a tensor is within its record, and return it with its offset in the whole file."""
        number = 0
        if location.storage is not None:
            number = int(location.storage.key.partition(_SEPARATOR)[0])
        return self._archives[number].tensor(name, location)
