"""torch.save files since torch 1.6: a zip of uncompressed records `<stem>/data.pkl` and `<stem>/data/<key>`."""

from __future__ import annotations

from syncheck.readers import torchscript
from syncheck.readers.pickles.tree import flatten
from syncheck.readers.untrusted import open_regular_file
from syncheck.readers.zip_archive import MAGIC, Archive, Directory, is_pickle
from syncheck.snapshots import Snapshot

FORMAT = "torch-zip"


def matches(head: bytes) -> bool:
    """Whether a file starts with the magic number of this format."""
    return head.startswith(MAGIC)


def read(path: str) -> Snapshot:
    """Open a checkpoint without reading tensor data.

    Raises MalformedFile for a truncated, compressed or inconsistent file, RefusedFile for a pickle that would execute
    code, NotACheckpoint for another kind of zip.
    """
    with open_regular_file(path) as file:
        directory = Directory(file, path)
        if not any(is_pickle(name) for name in directory.records):
            return _read_several(directory)
        archive = Archive(directory)
        pickled = archive.unpickle()
        flat = flatten(pickled.tree, path, pickled.size, pickled.rebuilt)
        tensors = {name: archive.tensor(name, location) for name, location in flat.tensors.items()}
        snapshot = Snapshot(
            path=path,
            format=FORMAT,
            bytes=directory.size,
            tensors=tensors,
            values=flat.values,
            stubs=pickled.stubs,
            metadata=flat.metadata,
            numbered=flat.numbered,
            matched=flat.matched,
            model_values=flat.model_values,
        )
        if torchscript.is_script(archive):
            snapshot = torchscript.add_script(archive, snapshot)
        directory.check_overlaps()
    return snapshot


def _read_several(directory: Directory) -> Snapshot:
    """Open a zip of torch.save files, or raise the error of another kind of zip."""
    # A rare format.
    from syncheck.readers import zip_of_files

    return zip_of_files.read(directory, FORMAT)
