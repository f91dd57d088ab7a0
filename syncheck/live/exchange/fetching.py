"""Fetch the bytes of differing tensors to the rank that compares them, in windows of bounded size.

No rank ever holds a second model: fetched bytes stay in a cache of bounded size.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.errors import RankFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.live.channel import Channel
    from syncheck.snapshots import Sliced

# Maximum bytes per message, and cached bytes of all ranks together.
WINDOW = 16 << 20
CACHED = 256 << 20

Key = tuple[str, bytes]
"""A tensor's normalized name and a digest; a differing tensor has several digests."""


class Piece(NamedTuple):
    """Bytes `start` to `stop` of one rank's tensor."""

    name: str
    digest: bytes
    start: int
    stop: int


class RemoteTensor(NamedTuple):
    """A tensor to read from a rank. size: in bytes."""

    name: str
    digest: bytes
    rank: int
    size: int


def read_pieces(own: Mapping[Key, Sliced], pieces: Sequence[Piece]) -> list[bytes]:
    """Return the bytes of pieces of this rank's tensors. Raises RankFailed if a tensor has shrunk."""
    return [_read_part(own, (piece.name, piece.digest), piece.start, piece.stop) for piece in pieces]


def _read_part(own: Mapping[Key, Sliced], key: Key, start: int, stop: int) -> bytes:
    data = own[key][start:stop]
    if len(data) != stop - start:
        raise RankFailed(
            f"{key[0]}: size changed during the check (found {len(data)} bytes from byte {start} on, expected "
            f"{stop - start}); check between steps, while nothing writes the tensors"
        )
    return data


@dataclass
class Fetcher:
    """Reads tensors of all ranks, on the rank that compares. own: its own tensors; wanted: tensors of other ranks.

    One message fetches several small neighbors in `wanted`; large tensors come in windows.
    """

    channel: Channel
    own: Mapping[Key, Sliced]
    wanted: Sequence[RemoteTensor]
    _batches: list[tuple[int, list[Piece]]] = field(default_factory=list)
    _pieces: dict[Key, list[tuple[Piece, int]]] = field(default_factory=dict)
    _cache: OrderedDict[int, dict[Piece, bytes]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        # The cache must hold one window of each set of equal ranks at a time. Windows are at least 64 KiB, or the
        # number of messages would explode.
        sets: dict[str, int] = {}
        for tensor in self.wanted:
            sets[tensor.name] = sets.get(tensor.name, 0) + 1
        self._window = min(WINDOW, max(1 << 16, CACHED // (2 * max(sets.values(), default=1))))
        filled: dict[int, tuple[int, int]] = {}  # by rank: its last batch and the bytes in it
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
                self._pieces.setdefault((name, digest), []).append((piece, batch))

    def read(self, key: Key, start: int, stop: int) -> bytes:
        """Return bytes of one tensor, of this rank or of another."""
        if key in self.own:
            return _read_part(self.own, key, start, stop)
        parts = []
        for piece, batch in self._pieces.get(key, ()):
            if piece.start < stop and piece.stop > start:
                low, high = max(start, piece.start), min(stop, piece.stop)
                parts.append(self._fetch_batch(batch)[piece][low - piece.start : high - piece.start])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _fetch_batch(self, number: int) -> dict[Piece, bytes]:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        while len(self._cache) >= max(2, CACHED // self._window):
            self._cache.popitem(last=False)
        rank, pieces = self._batches[number]
        sent = self.channel.request(rank, pieces)
        self._cache[number] = dict(zip(pieces, sent, strict=True))
        return self._cache[number]


@dataclass(frozen=True)
class RemoteBytes:
    """The bytes of all ranks with one digest, fetched on access."""

    fetcher: Fetcher
    key: Key

    def __getitem__(self, part: Any) -> bytes:
        return self.fetcher.read(self.key, part.start, part.stop)
