"""The bytes of tensors that differ, fetched by the rank that measures them: in windows, and not more than it may.

No rank ever holds a second model: what was fetched is kept only as long as there is room for it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.dtypes import DTYPES
from syncheck.errors import RankFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.live.channel import Channel
    from syncheck.snapshots import Sliced, Tensor

# Bytes that one rank sends at a time, and that are kept of all ranks together.
WINDOW = 16 << 20
KEPT = 256 << 20

Key = tuple[str, bytes]
"""A tensor's name, normalized, and its digest: what differs has several digests."""


class Piece(NamedTuple):
    """A part of one rank's tensor: bytes `start` to `stop`."""

    name: str
    digest: bytes
    start: int
    stop: int


class RemoteTensor(NamedTuple):
    """A tensor of some rank that is to be read. size: in bytes."""

    name: str
    digest: bytes
    rank: int
    size: int


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor."""
    return tensor.numel * DTYPES[tensor.dtype].size


def read_pieces(own: Mapping[Key, Sliced], pieces: Sequence[Piece]) -> list[bytes]:
    """Return the bytes of some pieces of this rank's tensors. Raises RankFailed where there are no longer as many."""
    return [_read_part(own, (piece.name, piece.digest), piece.start, piece.stop) for piece in pieces]


def _read_part(own: Mapping[Key, Sliced], key: Key, start: int, stop: int) -> bytes:
    found = own[key][start:stop]
    if len(found) != stop - start:
        raise RankFailed(
            f"{key[0]}: {len(found)} bytes from byte {start} on, {stop - start} needed: its size changed during the "
            "check; check between steps, while nothing writes the tensors"
        )
    return found


@dataclass
class Fetcher:
    """Reads tensors of all ranks, on the one rank that measures. own: this rank's; wanted: those of others.

    Neighbours in `wanted` that are small come with one message, large tensors in windows.
    """

    channel: Channel
    own: Mapping[Key, Sliced]
    wanted: Sequence[RemoteTensor]
    _batches: list[tuple[int, list[Piece]]] = field(default_factory=list)
    _where: dict[Key, list[tuple[Piece, int]]] = field(default_factory=dict)
    _kept: OrderedDict[int, dict[Piece, bytes]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        # What is compared at a time, one window of each set of ranks that agree, has to stay. Of 64 KiB at least: of
        # ever smaller ones there would be ever more messages.
        sets: dict[str, int] = {}
        for one in self.wanted:
            sets[one.name] = sets.get(one.name, 0) + 1
        self._window = min(WINDOW, max(1 << 16, KEPT // (2 * max(sets.values(), default=1))))
        filled: dict[int, tuple[int, int]] = {}  # by rank: its last batch, and the bytes in it
        for name, digest, rank, size in self.wanted:
            for start in range(0, size, self._window):
                piece = Piece(name, digest, start, min(size, start + self._window))
                length = piece.stop - piece.start
                batch, full = filled.get(rank, (-1, self._window))
                if full + length > self._window:
                    batch, full = len(self._batches), 0
                    self._batches.append((rank, []))
                self._batches[batch][1].append(piece)
                filled[rank] = batch, full + length
                self._where.setdefault((name, digest), []).append((piece, batch))

    def read(self, key: Key, start: int, stop: int) -> bytes:
        """Return bytes of one tensor, of this rank or of another."""
        if key in self.own:
            return _read_part(self.own, key, start, stop)
        parts = []
        for piece, batch in self._where.get(key, ()):
            if piece.start < stop and piece.stop > start:
                low, high = max(start, piece.start), min(stop, piece.stop)
                parts.append(self._batch(batch)[piece][low - piece.start : high - piece.start])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _batch(self, number: int) -> dict[Piece, bytes]:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        while len(self._kept) >= max(2, KEPT // self._window):
            self._kept.popitem(last=False)
        rank, pieces = self._batches[number]
        sent = self.channel.request(rank, pieces)
        self._kept[number] = dict(zip(pieces, sent, strict=True))
        return self._kept[number]


@dataclass(frozen=True)
class RemoteBytes:
    """The bytes that all ranks of one digest hold, fetched when they are read."""

    fetcher: Fetcher
    key: Key

    def __getitem__(self, part: Any) -> bytes:
        return self.fetcher.read(self.key, part.start, part.stop)
