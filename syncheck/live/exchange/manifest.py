"""What the ranks of a process group hold: exchanged in as few bytes as will do, and known to all of them."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.dtypes import DTYPES
from syncheck.errors import UsageError, one_line
from syncheck.live.digest import COMMON, WIDTH, digest_all, hash_digests
from syncheck.live.digest.lanes import KERNEL
from syncheck.live.exchange.stored import FileBytes
from syncheck.live.memory import FORMAT, agree_on_buffers
from syncheck.live.memory.tensor_bytes import TensorBytes
from syncheck.names import normalize
from syncheck.snapshots import Digest, Metadata, Sharding, Snapshot, Tensor, in_c_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.api import Options
    from syncheck.live.channel import Channel

    Key = tuple[bytes, bytes]
    from syncheck.messages import Message


class Row(NamedTuple):
    """One tensor. algorithm: of its digest; empty where it has none. sharding: position among the manifest's, or -1.

    crc32: what torch.save stored for its bytes, of a file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    refused: Message | None
    parameter: bool
    algorithm: str
    sharding: int
    crc32: int | None


@dataclass(frozen=True)
class Manifest:
    """The tensors of one rank in their order, and its plain values. shardings: those of DTensors, each once.

    ties: names that are one tensor, in a file that tells it.
    """

    format: str
    rows: tuple[Row, ...]
    shardings: tuple[Sharding, ...]
    values: Mapping[str, Any]
    stubs: tuple[str, ...]
    metadata: Metadata | None
    notes: tuple[Message, ...]
    ties: tuple[tuple[str, ...], ...]

    def layout(self) -> bytes:
        """Return 16 bytes that are the same where all is equal but the values, of which only the names count."""
        names = tuple(self.values)
        rest = repr((self.format, names, self.stubs, self.metadata, self.notes, self.ties))
        return _hash(_hash_rows(self.rows, self.shardings), rest)

    def digest(self) -> bytes:
        """Return 16 bytes that are the same for equal manifests."""
        return _hash(self.layout(), repr(self.values))

    def short(self) -> dict[str, str]:
        """Return each tensor's name without wrappers' prefixes: the one by which ranks are compared."""
        return normalize(row.name for row in self.rows)

    def tensors(self, digests: Sequence[bytes]) -> dict[str, Tensor]:
        """Return the tensors as all ranks see them: of known digests, and without bytes."""
        return {
            row.name: Tensor(
                row.name,
                row.dtype,
                row.shape,
                in_c_order(row.shape),
                "",
                0,
                refused=row.refused,
                data=b"",
                parameter=row.parameter,
                sharding=self.shardings[row.sharding] if row.sharding >= 0 else None,
                same=digest,
                crc32=row.crc32,
                record=(row.crc32, 0, math.prod(row.shape) * DTYPES[row.dtype].size) if row.crc32 else None,
            )
            for row, digest in zip(self.rows, digests, strict=True)
        }


def _hash(first: bytes, rest: str) -> bytes:
    return hashlib.sha256(first + rest.encode("utf-8", "backslashreplace")).digest()[:16]


@lru_cache(maxsize=8)
def _hash_rows(rows: tuple[Row, ...], shardings: tuple[Sharding, ...]) -> bytes:
    """Hash the tensors' descriptions, which are the same at each check; to write them out takes long."""
    return _hash(b"", repr((rows, shardings)))


def make_manifest(taken: Snapshot, algorithms: Sequence[str]) -> Manifest:
    """Return what is to be known of a rank's snapshot by the others. algorithms: of its tensors' digests."""
    known: dict[Sharding, int] = {}
    rows = []
    for tensor, algorithm in zip(taken.tensors.values(), algorithms, strict=True):
        at = -1
        if tensor.sharding is not None:
            # Where a rank stands follows from its number; without that, ranks have the same manifest.
            at = known.setdefault(replace(tensor.sharding, coordinate=()), len(known))
        rows.append(
            Row(
                tensor.name,
                tensor.dtype,
                tensor.shape,
                tensor.refused,
                tensor.parameter,
                algorithm,
                at,
                tensor.crc32,
            )
        )
    return Manifest(
        taken.format,
        tuple(rows),
        tuple(known),
        dict(taken.values),
        taken.stubs,
        taken.metadata,
        taken.notes,
        taken.ties,
    )


def with_digest_only(tensor: Tensor) -> Tensor:
    """Return a tensor of which only the digest is known, and stays so; the ranks have agreed on its algorithm."""
    return replace(tensor, data=None, digest=Digest("agreed", tensor.same.hex()), same=b"")


@dataclass(frozen=True)
class RankInfo:
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
class Content:
    """What some ranks hold, all the same. blob: the digests of the manifest's tensors, in their order."""

    manifest: Manifest
    blob: bytes

    @cached_property
    def short(self) -> Mapping[str, str]:
        """Names without wrappers' prefixes, by name."""
        return self.manifest.short()

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors without bytes, by name; made when somebody asks for them, for where all is well nobody does."""
        return self.manifest.tensors(_split_digests(self.manifest, self.blob))

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Content:
        """Return the same with other tensors, such as some that can be read."""
        made = Content(self.manifest, self.blob)
        made.tensors = tensors
        return made


@dataclass(frozen=True)
class GroupContents:
    """What all ranks hold. places: by rank, in their order; by_key: each different holding once.

    whole: no rank of the world is missing.
    """

    places: Mapping[int, RankInfo]
    by_key: Mapping[Key, Content]
    whole: bool

    def of_rank(self, rank: int) -> Content:
        """Return what a rank holds."""
        return self.by_key[self.rank_infos[rank].key]

    @property
    def step(self) -> int | None:
        """The step at which files were saved, as their metadata says; of several the last one."""
        known = (content.manifest.metadata for content in self.by_key.values())
        return max((one.step for one in known if one is not None and one.step is not None), default=None)

    @property
    def are_equal(self) -> bool:
        """Whether all ranks hold the same, were to hold the same, and none is missing."""
        worlds = {content.manifest.metadata.world_size for content in self.by_key.values() if content.manifest.metadata}
        if not worlds <= {None, len(self.rank_infos)}:
            return False
        parts = any(content.manifest.shardings for content in self.by_key.values())
        return len(self.by_key) == 1 and not parts and not any(place.mesh for place in self.rank_infos.values())

    def snapshots(self, ranks: Sequence[int] = ()) -> dict[int, Snapshot]:
        """Return replicas as all ranks see them, by default of all ranks. Those that hold the same share tensors."""
        made: dict[int, Snapshot] = {}
        for rank in ranks or self.rank_infos:
            place, content = self.rank_infos[rank], self.of_rank(rank)
            of = content.manifest
            known = of.metadata or Metadata()
            metadata = replace(
                known,
                rank=rank,
                # Ranks outside a smaller group are not missing from it; those that saved a file and are not here are.
                world_size=None if ranks else known.world_size or (len(self.rank_infos) if self.whole else None),
                host=place.host,
                mesh=dict(place.mesh),
            )
            made[rank] = Snapshot(
                place.path, of.format, place.size, content.tensors, of.values, of.stubs, metadata, of.notes, of.ties
            )
        return dict(zip(made, agree_on_buffers(made.values()), strict=True))


def exchange_manifests(channel: Channel, taken: Snapshot, options: Options) -> GroupContents:
    """Tell the other ranks what this one holds, and return what all hold. What is equal is sent once.

    To be run by `channel.run_together` on all ranks. Raises UsageError where they were not asked for the same.
    """
    found = compute_digests(list(taken.tensors.values()))
    mine = make_manifest(taken, [algorithm for algorithm, _ in found])
    mesh: tuple[tuple[str, int], ...] = ()
    host = os.uname().nodename
    path = f"{taken.path} on {host}" if taken.format == FORMAT else taken.path  # a file's path says where it is
    if mine.metadata is not None:
        host = mine.metadata.host or host  # the file may have been taken elsewhere since
        mesh = tuple(mine.metadata.mesh.items())
        own = replace(mine.metadata, rank=None, host=None, mesh={})  # what of it is of this rank alone goes apart
        mine = replace(mine, metadata=own)
    key = mine.digest(), hash_digests(found)
    asked = hashlib.sha256(repr(options).encode()).digest()[:16]
    fallback, KERNEL.fallback = one_line(KERNEL.fallback)[:200], ""
    sent = channel.gather(RankInfo(key, asked, path, taken.bytes, host, mesh, fallback), "digests")
    places: dict[int, RankInfo] = {rank: sent[rank] for rank in sorted(sent)}
    if len({place.options for place in places.values()}) > 1:
        raise UsageError("the options are not the same on all ranks")
    manifests = {key[0]: mine}
    structures = _find_first_ranks({rank: place.key[0] for rank, place in places.items()})
    if len(structures) > 1:
        sent = channel.share(lambda: mine, structures.values(), "manifests")
        manifests = {structure: sent[rank] for structure, rank in structures.items()}
    owners, blobs = _find_first_ranks({rank: place.key for rank, place in places.items()}), {key: _join_digests(found)}
    if len(owners) > 1:
        sent = channel.share(
            lambda: _join_digests(_agree_on_algorithms(taken, found, manifests)), owners.values(), "tensors"
        )
        blobs = {key: sent[rank] for key, rank in owners.items()}
    return GroupContents(places, {of: Content(manifests[of[0]], blob) for of, blob in blobs.items()}, channel.is_world)


def compute_digests(tensors: Sequence[Tensor], algorithm: str | None = None) -> list[tuple[str, bytes]]:
    """Return algorithm and digest of each tensor; nothing of those whose bytes cannot be had."""
    found = iter(digest_all([t.data.source for t in tensors if isinstance(t.data, TensorBytes)], algorithm))

    def digest_of(data: Any) -> tuple[str, bytes]:
        if isinstance(data, TensorBytes):
            return next(found)
        return data.digest(algorithm) if isinstance(data, FileBytes) else ("", b"")

    return [digest_of(tensor.data) for tensor in tensors]


def _join_digests(digests: Sequence[tuple[str, bytes]]) -> bytes:
    return b"".join(digest for _, digest in digests)


def _find_first_ranks(keys: Mapping[int, Any]) -> dict[Any, int]:
    """Return the first rank of each key. keys: by rank, in their order."""
    found: dict[Any, int] = {}
    for rank, key in keys.items():
        found.setdefault(key, rank)
    return found


def _agree_on_algorithms(
    taken: Snapshot, found: list[tuple[str, bytes]], manifests: Mapping[bytes, Manifest]
) -> list[tuple[str, bytes]]:
    """Return the digests by algorithms on which all ranks agree, tensor by tensor: others are never compared."""
    used: dict[str, set[str]] = {}
    for manifest in manifests.values():
        short = manifest.short()
        for row in manifest.rows:
            if row.algorithm:
                used.setdefault(short[row.name], set()).add(row.algorithm)
    short = normalize(taken.tensors)
    again = [i for i, name in enumerate(taken.tensors) if len(used.get(short[name], ())) > 1]
    tensors, agreed = list(taken.tensors.values()), list(found)
    for i, common in zip(again, compute_digests([tensors[i] for i in again], COMMON), strict=True):
        agreed[i] = common
    return agreed


def _split_digests(manifest: Manifest, blob: bytes) -> list[bytes]:
    """Return the digests of a manifest's rows, none where a row has no algorithm."""
    found, at = [], 0
    for row in manifest.rows:
        end = at + (WIDTH if row.algorithm else 0)
        found.append(blob[at:end])
        at = end
    return found
