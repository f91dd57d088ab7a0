"""Fetch the bytes of differing tensors to the rank that compares them, in windows of bounded size.

No rank ever holds a second model: fetched bytes stay in a cache of bounded size.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.errors import RankFailed
from syncheck.frozen import record

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

    @property
    def key(self) -> Key:
        """The key under which ranks exchange its bytes."""
        return self.name, self.digest


def read_pieces(local_bytes: Mapping[Key, Sliced], pieces: Sequence[Piece]) -> list[bytes]:
    """Return the bytes of pieces of this rank's tensors. Raises RankFailed if a tensor has shrunk."""
    return [_read_part(local_bytes, (piece.name, piece.digest), piece.start, piece.stop) for piece in pieces]


def _read_part(local_bytes: Mapping[Key, Sliced], key: Key, start: int, stop: int) -> bytes:
    data = local_bytes[key][start:stop]
    if len(data) != stop - start:
        name, _ = key
        raise RankFailed(
            f"{name}: size changed during the check (found {len(data)} bytes from byte {start} on, expected "
            f"{stop - start}); check between steps, while nothing writes the tensors"
        )

    return data


@dataclass
class Fetcher:
    """Reads tensors of all ranks, on the rank that compares.

    One message fetches several small neighbors in `remote_tensors`; large tensors come in windows.

    local_bytes: the bytes of this rank's tensors.
    remote_tensors: tensors of other ranks.
    """

    channel: Channel
    local_bytes: Mapping[Key, Sliced]
    remote_tensors: Sequence[RemoteTensor]
    _batches: list[tuple[int, list[Piece]]] = field(default_factory=list)
    _pieces: dict[Key, list[tuple[Piece, int]]] = field(default_factory=dict)
    _cache: OrderedDict[int, dict[Piece, bytes]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._window = self._choose_window()
        filled: dict[int, tuple[int, int]] = {}  # by rank: its last batch and the bytes in it
        for tensor in self.remote_tensors:
            name, digest, rank, size = tensor
            for start in range(0, size, self._window):
                piece = Piece(
                    name=name,
                    digest=digest,
                    start=start,
                    stop=min(size, start + self._window),
                )
                length = piece.stop - piece.start
                batch, full = filled.get(rank, (-1, self._window))
                if full + length > self._window:
                    batch, full = len(self._batches), 0
                    self._batches.append((rank, []))

                self._batches[batch][1].append(piece)
                filled[rank] = batch, full + length
                self._pieces.setdefault(tensor.key, []).append((piece, batch))

    def _choose_window(self) -> int:
        """Return the maximum bytes of a message.

        The cache must hold one window of each set of equal ranks at a time.
        """
        sets = Counter(tensor.name for tensor in self.remote_tensors)
        most_sets = max(sets.values(), default=1)
        # Windows are at least 64 KiB, or the number of messages would explode.
        return min(WINDOW, max(1 << 16, CACHED // (2 * most_sets)))

    def read(self, key: Key, start: int, stop: int) -> bytes:
        """Return bytes of one tensor, of this rank or of another."""
        if key in self.local_bytes:
            return _read_part(self.local_bytes, key, start, stop)

        parts = []
        for piece, batch in self._pieces.get(key, ()):
            low = max(start, piece.start)
            high = min(stop, piece.stop)
            # Only pieces that overlap the part are fetched.
            if low < high:
                parts.append(self._fetch_batch(batch)[piece][low - piece.start : high - piece.start])

        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _fetch_batch(self, number: int) -> dict[Piece, bytes]:
        """Return the bytes of the pieces in a batch. The batch that was unused for the longest time is dropped."""
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]

        while len(self._cache) >= max(2, CACHED // self._window):
            self._cache.popitem(last=False)

        rank, pieces = self._batches[number]
        data = self.channel.request(rank, pieces)
        self._cache[number] = dict(zip(pieces, data, strict=True))
        return self._cache[number]


@record
class RemoteBytes:
    """The bytes of all ranks with one digest, fetched on access."""

    fetcher: Fetcher
    key: Key

    def __getitem__(self, part: Any) -> bytes:
        return self.fetcher.read(self.key, part.start, part.stop)
