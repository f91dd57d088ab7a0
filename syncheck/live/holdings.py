"""What the ranks of a process group hold: exchanged in as few bytes as will do, and known to all of them."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.live.catalogue import catalogue_of
from syncheck.live.digest import COMMON, digest_all, root
from syncheck.live.held import Held
from syncheck.live.memory import agree_on_buffers
from syncheck.names import normalize
from syncheck.snapshots import Metadata, Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.api import Options
    from syncheck.live.catalogue import Catalogue
    from syncheck.live.channel import Channel
    from syncheck.snapshots import Tensor

    Key = tuple[bytes, bytes]


@dataclass(frozen=True)
class Place:
    """What is known of one rank. key: equal on ranks that hold the same; mesh: where it stands, by dimension."""

    key: Key
    options: bytes
    host: str
    mesh: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Holding:
    """What some ranks hold, all the same. short: names without wrappers' prefixes, by name."""

    catalogue: Catalogue
    short: Mapping[str, str]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Holdings:
    """What all ranks hold. places: by rank, in their order; by_key: each different holding once.

    whole: no rank of the world is missing.
    """

    places: Mapping[int, Place]
    by_key: Mapping[Key, Holding]
    whole: bool

    def of(self, rank: int) -> Holding:
        """Return what a rank holds."""
        return self.by_key[self.places[rank].key]

    @property
    def are_equal(self) -> bool:
        """Whether all ranks hold the same, and were to hold the same."""
        parts = any(held.catalogue.shardings for held in self.by_key.values())
        return len(self.by_key) == 1 and not parts and not any(place.mesh for place in self.places.values())

    def snapshots(self, ranks: Sequence[int] = ()) -> dict[int, Snapshot]:
        """Return replicas as all ranks see them, by default of all ranks. Those that hold the same share tensors."""
        made: dict[int, Snapshot] = {}
        for rank in ranks or self.places:
            place, held = self.places[rank], self.of(rank)
            of = held.catalogue
            metadata = replace(
                of.metadata or Metadata(),
                rank=rank,
                # Ranks outside a smaller group are not missing from it.
                world_size=len(self.places) if self.whole else None,
                host=place.host,
                mesh=dict(place.mesh),
            )
            title = f"{of.title} on {place.host}"
            made[rank] = Snapshot(title, of.format, of.size, held.tensors, of.values, of.stubs, metadata, of.notes)
        return dict(zip(made, agree_on_buffers(made.values()), strict=True))


def exchange(channel: Channel, taken: Snapshot, options: Options) -> Holdings:
    """Tell the other ranks what this one holds, and return what all hold. What is equal is sent once.

    To be run by `channel.together` on all ranks. Raises UsageError where they were not asked for the same.
    """
    found = digests_of(list(taken.tensors.values()))
    mine = catalogue_of(taken, [algorithm for algorithm, _ in found])
    mesh: tuple[tuple[str, int], ...] = ()
    if mine.metadata is not None and mine.metadata.mesh:
        mesh = tuple(mine.metadata.mesh.items())
        mine = replace(mine, metadata=replace(mine.metadata, mesh={}))  # of this rank alone
    blob = b"".join(digest for _, digest in found)
    key = mine.digest(), root(found)
    asked = hashlib.sha256(repr(options).encode()).digest()[:16]
    sent = channel.gather(Place(key, asked, os.uname().nodename, mesh), "digests")
    places: dict[int, Place] = {rank: sent[rank] for rank in sorted(sent)}
    if len({place.options for place in places.values()}) > 1:
        raise UsageError("the options are not the same on all ranks")
    catalogues = {key[0]: mine}
    structures = _first_of({rank: place.key[0] for rank, place in places.items()})
    if len(structures) > 1:
        sent = channel.gather(mine if channel.rank in structures.values() else None, "catalogues")
        catalogues = {structure: sent[rank] for structure, rank in structures.items()}
    owners, blobs = _first_of({rank: place.key for rank, place in places.items()}), {key: blob}
    if len(owners) > 1:
        blob = b"".join(digest for _, digest in _agreed(taken, found, catalogues))
        sent = channel.gather(blob if channel.rank in owners.values() else b"", "tensors")
        blobs = {key: sent[rank] for key, rank in owners.items()}
    by_key = {}
    for of, blob in blobs.items():
        catalogue = catalogues[of[0]]
        by_key[of] = Holding(catalogue, catalogue.short(), catalogue.tensors(_cut(catalogue, blob)))
    return Holdings(places, by_key, channel.whole)


def digests_of(tensors: Sequence[Tensor], algorithm: str | None = None) -> list[tuple[str, bytes]]:
    """Return algorithm and digest of each tensor; nothing of those whose bytes cannot be had."""
    found = iter(digest_all([t.data.source for t in tensors if isinstance(t.data, Held)], algorithm))
    return [next(found) if isinstance(tensor.data, Held) else ("", b"") for tensor in tensors]


def _first_of(keys: Mapping[int, Any]) -> dict[Any, int]:
    """Return the first rank of each key. keys: by rank, in their order."""
    found: dict[Any, int] = {}
    for rank, key in keys.items():
        found.setdefault(key, rank)
    return found


def _agreed(
    taken: Snapshot, found: list[tuple[str, bytes]], catalogues: Mapping[bytes, Catalogue]
) -> list[tuple[str, bytes]]:
    """Return the digests by algorithms on which all ranks agree, tensor by tensor: others are never compared."""
    used: dict[str, set[str]] = {}
    for catalogue in catalogues.values():
        short = catalogue.short()
        for row in catalogue.rows:
            if row.algorithm:
                used.setdefault(short[row.name], set()).add(row.algorithm)
    short = normalize(taken.tensors)
    again = [i for i, name in enumerate(taken.tensors) if len(used.get(short[name], ())) > 1]
    tensors, agreed = list(taken.tensors.values()), list(found)
    for i, common in zip(again, digests_of([tensors[i] for i in again], COMMON), strict=True):
        agreed[i] = common
    return agreed


def _cut(catalogue: Catalogue, blob: bytes) -> list[bytes]:
    """Return the digests of a catalogue's rows: of 16 bytes each, none where a row has no algorithm."""
    found, at = [], 0
    for row in catalogue.rows:
        end = at + (16 if row.algorithm else 0)
        found.append(blob[at:end])
        at = end
    return found
