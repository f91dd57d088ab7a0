"""The checkpoint of one rank, which only that rank's process can read, as the ranks compare what they hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck import paths
from syncheck.comparison.ties import shared
from syncheck.dtypes import DTYPES
from syncheck.errors import CheckpointError, RankFailed, UsageError
from syncheck.kernel.blocks import Files, is_plain, ranges
from syncheck.live.digest import Stream
from syncheck.live.digest.host import default_algorithm
from syncheck.snapshots import Snapshot, in_c_order

if TYPE_CHECKING:
    from syncheck.snapshots import Tensor


class FileBytes:
    """The bytes of a tensor in a file, in C order and little-endian, read a part at a time."""

    __slots__ = ("_files", "_tensor")

    def __init__(self, tensor: Tensor, files: Files) -> None:
        self._tensor, self._files = tensor, files

    def __getitem__(self, part: Any) -> bytes:
        size = DTYPES[self._tensor.dtype].size
        try:
            return bytes(self._files.read(self._tensor, part.start // size, (part.stop - part.start) // size, 0))
        except CheckpointError as error:
            # On the rank that compares it would pass for one of several files, of which the rest is compared.
            raise RankFailed(str(error)) from error

    def digest(self, algorithm: str | None) -> tuple[str, bytes]:
        """Return algorithm and digest, as `live.digest.digest_all` does of a tensor in memory."""
        name = algorithm or default_algorithm()
        found = Stream(name)
        for start, count in ranges([self._tensor]):
            found.update(self._files.read(self._tensor, start, count, 0))
        return name, found.digest()


def open_checkpoint(path: str, files: Files) -> Snapshot:
    """Open the one checkpoint at a path; its tensors are read through `files`.

    Raises CheckpointError for what cannot be read, UsageError for a folder of several checkpoints and a fingerprint.
    """
    found = paths.open_all([path])
    for broken in found.unreadable:
        raise UsageError(f"{broken.path}: {broken.reason}")
    if len(found.snapshots) != 1:
        raise UsageError(f"{path}: {len(found.snapshots)} checkpoints; needs the one of this rank")
    snapshot = found.snapshots[0]
    if any(tensor.digest is not None for tensor in snapshot.tensors.values()):
        raise UsageError(f"{path}: a fingerprint; these are compared without torchrun: syncheck compare *.json")
    tensors = {name: _make_readable(tensor, files) for name, tensor in snapshot.tensors.items()}
    # Ties are told by places in the file, which the others cannot see.
    return replace(snapshot, tensors=tensors, ties=tuple(map(tuple, shared(snapshot.tensors.values()))))


def _make_readable(tensor: Tensor, files: Files) -> Tensor:
    if tensor.refused:
        return tensor
    # Whatever lay about it in the file is undone by reading.
    return replace(
        tensor,
        strides=in_c_order(tensor.shape),
        offset=0,
        big_endian=False,
        lazy="",
        parts=(),
        crc32=tensor.crc32 if is_plain(tensor) else None,
        record=None,
        opened=None,
        data=FileBytes(tensor, files),
    )
