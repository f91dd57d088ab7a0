"""The checkpoint file of one rank, readable by that rank only."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck import paths
from syncheck.comparison.ties import find_shared_tensors
from syncheck.dtypes import DTYPES
from syncheck.errors import CheckpointError, RankFailed, UsageError
from syncheck.kernel.blocks import Files, is_plain, ranges
from syncheck.live.digest import Stream
from syncheck.live.digest.host import default_algorithm
from syncheck.snapshots import Snapshot, contiguous_strides

if TYPE_CHECKING:
    from syncheck.snapshots import Tensor


class FileBytes:
    """The bytes of a tensor in a file, in C order and little-endian, read part by part."""

    __slots__ = ("_files", "_tensor")

    def __init__(self, tensor: Tensor, files: Files) -> None:
        self._tensor, self._files = tensor, files

    def __getitem__(self, part: Any) -> bytes:
        size = DTYPES[self._tensor.dtype].size
        try:
            return bytes(self._files.read(self._tensor, part.start // size, (part.stop - part.start) // size, 0))
        except CheckpointError as error:
            # The comparing rank would treat a CheckpointError as one unreadable file among several, and continue.
            raise RankFailed(str(error)) from error

    def digest(self, algorithm: str | None) -> tuple[str, bytes]:
        """Return algorithm and digest, like `live.digest.digest_all` for a tensor in memory."""
        name = algorithm or default_algorithm()
        stream = Stream(name)
        for start, count in ranges([self._tensor]):
            stream.update(self._files.read(self._tensor, start, count, 0))
        return name, stream.digest()


def open_checkpoint(path: str, files: Files) -> Snapshot:
    """Open the checkpoint at a path; its tensors are read through `files`.

    Raises CheckpointError for unreadable files, UsageError for a folder of several checkpoints and for a fingerprint.
    """
    opened = paths.open_checkpoints([path])
    for broken in opened.unreadable:
        raise UsageError(f"{broken.path}: {broken.reason}")
    if len(opened.snapshots) != 1:
        raise UsageError(f"{path}: {len(opened.snapshots)} checkpoints; expected the checkpoint of this rank")
    snapshot = opened.snapshots[0]
    if any(tensor.digest is not None for tensor in snapshot.tensors.values()):
        raise UsageError(f"{path}: a fingerprint; compare fingerprints without torchrun: syncheck compare *.json")
    tensors = {name: _make_readable(tensor, files) for name, tensor in snapshot.tensors.items()}
    # Ties follow from offsets in the file, which other ranks do not see.
    return replace(snapshot, tensors=tensors, ties=tuple(map(tuple, find_shared_tensors(snapshot.tensors.values()))))


def _make_readable(tensor: Tensor, files: Files) -> Tensor:
    if tensor.refused:
        return tensor
    # Reading resolves the memory order of the file.
    return replace(
        tensor,
        strides=contiguous_strides(tensor.shape),
        offset=0,
        big_endian=False,
        lazy="",
        shards=(),
        crc32=tensor.crc32 if is_plain(tensor) else None,
        record=None,
        opened=None,
        data=FileBytes(tensor, files),
    )
