"""What the ranks of a process group hold: exchanged in as few bytes as will do, and known to all of them."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError, one_line
from syncheck.live.digest import COMMON, WIDTH, digest_all, root
from syncheck.live.digest.lanes import KERNEL
from syncheck.live.exchange.catalogue import catalogue_of
from syncheck.live.exchange.stored import Stored
from syncheck.live.memory import FORMAT, agree_on_buffers
from syncheck.live.memory.held import Held
from syncheck.names import normalize
from syncheck.snapshots import Metadata, Snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.api import Options
    from syncheck.live.channel import Channel
    from syncheck.live.exchange.catalogue import Catalogue
    from syncheck.snapshots import Tensor

    Key = tuple[bytes, bytes]


@dataclass(frozen=True)
class Place:
    """What is known of one rank. key: equal on ranks that hold the same; mesh: where it stands, by dimension.

    path, size: what reports call its replica, and its bytes. host: where it was trained. fallback: why its digests were
    computed without the fused kernel of a GPU, else empty.
    """

    key: Key
    options: bytes
    path: str
    size: int
    host: str
    mesh: tuple[tuple[str, int], ...]
    fallback: str = ""


@dataclass
class Holding:
    """What some ranks hold, all the same. blob: the digests of the catalogue's tensors, in their order."""

    catalogue: Catalogue
    blob: bytes

    @cached_property
    def short(self) -> Mapping[str, str]:
        """Names without wrappers' prefixes, by name."""
        return self.catalogue.short()

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors without bytes, by name; made when somebody asks for them, for where all is well nobody does."""
        return self.catalogue.tensors(_cut(self.catalogue, self.blob))

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Holding:
        """Return the same with other tensors, such as some that can be read."""
        made = Holding(self.catalogue, self.blob)
        made.tensors = tensors
        return made


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
    def step(self) -> int | None:
        """The step at which files were saved, as their metadata says; of several the last one."""
        known = (held.catalogue.metadata for held in self.by_key.values())
        return max((one.step for one in known if one is not None and one.step is not None), default=None)

    @property
    def are_equal(self) -> bool:
        """Whether all ranks hold the same, were to hold the same, and none is missing."""
        worlds = {held.catalogue.metadata.world_size for held in self.by_key.values() if held.catalogue.metadata}
        if not worlds <= {None, len(self.places)}:
            return False
        parts = any(held.catalogue.shardings for held in self.by_key.values())
        return len(self.by_key) == 1 and not parts and not any(place.mesh for place in self.places.values())

    def snapshots(self, ranks: Sequence[int] = ()) -> dict[int, Snapshot]:
        """Return replicas as all ranks see them, by default of all ranks. Those that hold the same share tensors."""
        made: dict[int, Snapshot] = {}
        for rank in ranks or self.places:
            place, held = self.places[rank], self.of(rank)
            of = held.catalogue
            known = of.metadata or Metadata()
            metadata = replace(
                known,
                rank=rank,
                # Ranks outside a smaller group are not missing from it; those that saved a file and are not here are.
                world_size=None if ranks else known.world_size or (len(self.places) if self.whole else None),
                host=place.host,
                mesh=dict(place.mesh),
            )
            made[rank] = Snapshot(
                place.path, of.format, place.size, held.tensors, of.values, of.stubs, metadata, of.notes, of.ties
            )
        return dict(zip(made, agree_on_buffers(made.values()), strict=True))


def exchange(channel: Channel, taken: Snapshot, options: Options) -> Holdings:
    """Tell the other ranks what this one holds, and return what all hold. What is equal is sent once.

    To be run by `channel.together` on all ranks. Raises UsageError where they were not asked for the same.
    """
    found = digests_of(list(taken.tensors.values()))
    mine = catalogue_of(taken, [algorithm for algorithm, _ in found])
    mesh: tuple[tuple[str, int], ...] = ()
    host = os.uname().nodename
    path = f"{taken.path} on {host}" if taken.format == FORMAT else taken.path  # a file's path says where it is
    if mine.metadata is not None:
        host = mine.metadata.host or host  # the file may have been taken elsewhere since
        mesh = tuple(mine.metadata.mesh.items())
        own = replace(mine.metadata, rank=None, host=None, mesh={})  # what of it is of this rank alone goes apart
        mine = replace(mine, metadata=own)
    key = mine.digest(), root(found)
    asked = hashlib.sha256(repr(options).encode()).digest()[:16]
    fallback, KERNEL.fallback = one_line(KERNEL.fallback)[:200], ""
    sent = channel.gather(Place(key, asked, path, taken.bytes, host, mesh, fallback), "digests")
    places: dict[int, Place] = {rank: sent[rank] for rank in sorted(sent)}
    if len({place.options for place in places.values()}) > 1:
        raise UsageError("the options are not the same on all ranks")
    catalogues = {key[0]: mine}
    structures = _first_of({rank: place.key[0] for rank, place in places.items()})
    if len(structures) > 1:
        sent = channel.share(lambda: mine, structures.values(), "catalogues")
        catalogues = {structure: sent[rank] for structure, rank in structures.items()}
    owners, blobs = _first_of({rank: place.key for rank, place in places.items()}), {key: _joined(found)}
    if len(owners) > 1:
        sent = channel.share(lambda: _joined(_agreed(taken, found, catalogues)), owners.values(), "tensors")
        blobs = {key: sent[rank] for key, rank in owners.items()}
    return Holdings(places, {of: Holding(catalogues[of[0]], blob) for of, blob in blobs.items()}, channel.whole)


def digests_of(tensors: Sequence[Tensor], algorithm: str | None = None) -> list[tuple[str, bytes]]:
    """Return algorithm and digest of each tensor; nothing of those whose bytes cannot be had."""
    found = iter(digest_all([t.data.source for t in tensors if isinstance(t.data, Held)], algorithm))

    def digest_of(data: Any) -> tuple[str, bytes]:
        if isinstance(data, Held):
            return next(found)
        return data.digest(algorithm) if isinstance(data, Stored) else ("", b"")

    return [digest_of(tensor.data) for tensor in tensors]


def _joined(digests: Sequence[tuple[str, bytes]]) -> bytes:
    return b"".join(digest for _, digest in digests)


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
    """Return the digests of a catalogue's rows, none where a row has no algorithm."""
    found, at = [], 0
    for row in catalogue.rows:
        end = at + (WIDTH if row.algorithm else 0)
        found.append(blob[at:end])
        at = end
    return found
