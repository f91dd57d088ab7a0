"""torch.save files since torch 1.6: a zip of uncompressed records `<stem>/data.pkl` and `<stem>/data/<key>`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from syncheck.readers import torchscript
from syncheck.readers.pickles.tree import Flat, flatten
from syncheck.readers.untrusted import open_regular_file
from syncheck.readers.zip_archive import MAGIC, PICKLE, Archive, Directory, is_pickle
from syncheck.snapshots import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        content = _read_content(archive)
        flat = content.flat
        tensors = {name: archive.tensor(name, location) for name, location in flat.tensors.items()}
        snapshot = Snapshot(
            path=path,
            format=FORMAT,
            bytes=directory.size,
            tensors=tensors,
            values=dict(flat.values),
            stubs=content.stubs,
            metadata=flat.metadata,
            numbered=flat.numbered,
            matched=flat.matched,
            model_values=dict(flat.model_values),
        )
        if torchscript.is_script(archive):
            snapshot = torchscript.add_script(archive, snapshot)
        directory.check_overlaps()
    return snapshot


class _Content(NamedTuple):
    """The named content of a pickle."""

    pickle: bytes
    flat: Flat
    stubs: tuple[str, ...]


# The content of the last pickle, or None, while several files are opened; otherwise empty.
_kept: list[_Content | None] = []


@contextmanager
def keep_last_content() -> Iterator[None]:
    """Read a pickle once if the next files have the same one.

    Replicas whose values are equal have equal pickles, because the bytes of tensors are in other records.
    """
    _kept[:] = [None]
    try:
        yield
    finally:
        _kept.clear()


def _read_content(archive: Archive) -> _Content:
    """Return the named content of the pickle in an archive. Raises as `read`."""
    data = archive.read_record(PICKLE)
    last = _kept[0] if _kept else None
    if last is not None and last.pickle == data:
        return last

    pickled = archive.unpickle(data)
    flat = flatten(pickled.tree, archive.path, pickled.size, pickled.rebuilt)
    content = _Content(data, flat, pickled.stubs)
    if _kept:
        _kept[0] = content
    return content


def _read_several(directory: Directory) -> Snapshot:
    """Open a zip of torch.save files, or raise the error of another kind of zip."""
    # A rare format.
    from syncheck.readers import zip_of_files

    return zip_of_files.read(directory, FORMAT)
