"""Manifests of the ranks' tensors and values, without the bytes, and their exchange between ranks."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.errors import CheckpointError, RankFailed, UsageError
from syncheck.layout.alignment import align
from syncheck.layout.copies import name_of_copied
from syncheck.live.digest import COMMON, KERNEL, WIDTH, Stream, digest_all, hash_digests
from syncheck.live.digest.finiteness import find_not_finite
from syncheck.live.digest.host import default_algorithm
from syncheck.live.exchange.attributes import exchange_attributes, hash_attributes
from syncheck.live.memory import FORMAT, agree_on_buffers
from syncheck.live.memory.tensor_bytes import TensorBytes
from syncheck.snapshots import Digest, Metadata, Sharding, Snapshot, Tensor, contiguous_strides
from syncheck.tensors.blocks import ranges
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.finiteness import FiniteScan
from syncheck.tensors.names import normalize
from syncheck.text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.api import Options
    from syncheck.layout.alignment import Alignment
    from syncheck.live.channel import Channel
    from syncheck.snapshots import NoSync
    from syncheck.tensors.blocks import Files

    Key = tuple[bytes, bytes]
    from syncheck.messages import Message


class Row(NamedTuple):
    """One tensor. algorithm: of its digest; empty without a digest. sharding: index in the manifest's list, or -1.

    crc32: the checksum that torch.save stored for its bytes, if it is in a file.
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
    """The tensors of one rank in order, and its plain values. Small, and equal on ranks with the same model.

    shardings: the distinct shardings of DTensors. snapshot: of the rank, without tensors, path and all fields that
    differ between ranks by design.
    """

    rows: tuple[Row, ...]
    shardings: tuple[Sharding, ...]
    snapshot: Snapshot

    def hash_layout(self) -> bytes:
        """Return 16 bytes that are equal if everything but the values is equal; only their names count."""
        rest = replace(self.snapshot, values=dict.fromkeys(self.snapshot.values))
        return _hash(_hash_rows(self.rows, self.shardings), repr(rest))

    def digest(self) -> bytes:
        """Return 16 bytes that are equal for equal manifests."""
        return _hash(self.hash_layout(), repr(self.snapshot.values))

    def normalized_names(self) -> dict[str, str]:
        """Return each tensor's name without wrapper prefixes, by name. Ranks are compared by normalized names."""
        return normalize(row.name for row in self.rows)

    def make_tensors(self, digests: Sequence[bytes]) -> dict[str, Tensor]:
        """Return the tensors as all ranks see them, with digests and without bytes."""
        return {
            row.name: Tensor(
                row.name,
                row.dtype,
                row.shape,
                contiguous_strides(row.shape),
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
    """Hash the descriptions of the tensors. Cached, because formatting them takes long and they rarely change."""
    return _hash(b"", repr((rows, shardings)))


def make_manifest(local: Snapshot, algorithms: Sequence[str]) -> Manifest:
    """Return the manifest of a rank's snapshot. algorithms: of the tensors' digests."""
    shardings: dict[Sharding, int] = {}
    rows = []
    for tensor, algorithm in zip(local.tensors.values(), algorithms, strict=True):
        index = -1
        if tensor.sharding is not None:
            # Without the coordinate, which follows from the rank, ranks have equal manifests.
            index = shardings.setdefault(replace(tensor.sharding, coordinate=()), len(shardings))
        rows.append(
            Row(
                tensor.name,
                tensor.dtype,
                tensor.shape,
                tensor.refused,
                tensor.parameter,
                algorithm,
                index,
                tensor.crc32,
            )
        )
    metadata = local.metadata and replace(local.metadata, rank=None, host=None, mesh={}, no_sync="")
    shared = Snapshot("", local.format, 0, {}, dict(local.values), local.stubs, metadata, local.notes, local.ties)
    return Manifest(tuple(rows), tuple(shardings), shared)


def with_digest_only(tensor: Tensor) -> Tensor:
    """Return a tensor without bytes and with its digest; the ranks have agreed on the algorithm."""
    return replace(tensor, data=None, digest=Digest("agreed", tensor.same.hex()), same=b"")


@dataclass(frozen=True)
class RankInfo:
    """The first message of a rank. key: equal on ranks with equal contents. mesh: its coordinate by dimension.

    path, size: of its replica in reports. host: of the training. fallback: why its digests were computed without the
    fused GPU kernel, else empty. attributes: hash of the plain attributes of its modules. not_finite: names of its
    tensors with NaN or infinity. no_sync: as in `snapshots.Metadata`.
    """

    key: Key
    options: bytes
    path: str
    size: int
    host: str
    mesh: tuple[tuple[str, int], ...]
    fallback: str = ""
    attributes: bytes = b""
    not_finite: tuple[str, ...] = ()
    no_sync: NoSync = ""


@dataclass
class Content:
    """The equal contents of some ranks. blob: the digests of the manifest's tensors, in order."""

    manifest: Manifest
    blob: bytes

    @property
    def metadata(self) -> Metadata:
        """The metadata, empty if the ranks have none."""
        return self.manifest.snapshot.metadata or Metadata()

    @cached_property
    def normalized_names(self) -> Mapping[str, str]:
        """Names without wrapper prefixes, by name."""
        return self.manifest.normalized_names()

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors without bytes, by name. Created on demand, because ranks in sync do not need them."""
        return self.manifest.make_tensors(_split_digests(self.manifest, self.blob))

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Content:
        """Return the same content with other tensors, for example with readable tensors."""
        content = Content(self.manifest, self.blob)
        content.tensors = tensors
        return content


@dataclass(frozen=True)
class GroupContents:
    """The contents of a group's ranks.

    rank_infos: by rank, in order. is_world: the group includes all ranks. attributes: plain attributes that differ
    between ranks, by rank; None for a rank without modules.
    """

    rank_infos: Mapping[int, RankInfo]
    by_key: Mapping[Key, Content]
    is_world: bool
    attributes: Mapping[int, Mapping[str, Any] | None] = field(default_factory=dict)

    def of_rank(self, rank: int) -> Content:
        """Return the content of a rank."""
        return self.by_key[self.rank_infos[rank].key]

    @cached_property
    def alignment(self) -> Alignment:
        """The tensors of all ranks by common names. Created on demand, because ranks in sync do not need it."""
        return align(self.snapshots())

    def common_names(self, content: Content) -> Mapping[str, str]:
        """Return the names under which tensors are compared, by name in one of the contents."""
        names = content.normalized_names
        if not any(each_content.metadata.tied for each_content in self.by_key.values()):
            return names
        copies = self.alignment.copies
        return {name: copies.get(normalized, normalized) for name, normalized in names.items()}

    def fetched_names(self, content: Content) -> Mapping[str, str]:
        """Return the names under which ranks exchange bytes: one name for all copies of a tensor."""
        find_source = self.alignment.find_source
        return {name: find_source(normalized) for name, normalized in content.normalized_names.items()}

    @property
    def not_finite(self) -> list[str]:
        """The tensors with NaN or infinity on any rank, in the order of the model."""
        held = {name for info in self.rank_infos.values() for name in info.not_finite}
        listed: dict[str, None] = {}
        for content in self.by_key.values() if held else ():
            names = self.common_names(content)
            listed |= dict.fromkeys(names[row.name] for row in content.manifest.rows if row.name in held)
        return list(listed)

    @property
    def step(self) -> int | None:
        """The last step in the metadata of the files."""
        steps = (content.metadata.step for content in self.by_key.values())
        return max((step for step in steps if step is not None), default=None)

    @property
    def are_equal(self) -> bool:
        """Whether all ranks have equal contents, hold full replicas, and none is missing.

        Plain attributes are no part of the contents, because many of them differ by design.
        """
        worlds = {content.metadata.world_size for content in self.by_key.values()}
        if not worlds <= {None, len(self.rank_infos)}:
            return False
        sharded = any(content.manifest.shardings for content in self.by_key.values())
        return len(self.by_key) == 1 and not sharded and not any(info.mesh for info in self.rank_infos.values())

    def snapshots(self, ranks: Sequence[int] = ()) -> dict[int, Snapshot]:
        """Return the replicas as all ranks see them, by default of all ranks. Equal contents share tensors."""
        snapshots: dict[int, Snapshot] = {}
        for rank in ranks or self.rank_infos:
            info, content = self.rank_infos[rank], self.of_rank(rank)
            # In a subgroup, ranks outside are not missing; ranks that saved a file and are absent are.
            present = len(self.rank_infos) if self.is_world else None
            world_size = None if ranks else content.metadata.world_size or present
            metadata = replace(
                content.metadata,
                rank=rank,
                world_size=world_size,
                host=info.host,
                mesh=dict(info.mesh),
                no_sync=info.no_sync,
            )
            shared = content.manifest.snapshot
            snapshots[rank] = replace(
                shared,
                path=info.path,
                bytes=info.size,
                tensors=content.tensors,
                metadata=metadata,
                attributes=self.attributes.get(rank),
            )
        return dict(zip(snapshots, agree_on_buffers(snapshots.values()), strict=True))


def exchange_manifests(channel: Channel, local: Snapshot, options: Options) -> GroupContents:
    """Exchange manifests and digests, and return the contents of all ranks. Equal contents are sent once.

    To be called within `channel.run_together` on all ranks. Raises UsageError if the options differ between ranks.
    """
    digests = compute_digests(list(local.tensors.values()))
    own = make_manifest(local, [algorithm for algorithm, _ in digests])
    host = os.uname().nodename
    path = f"{local.path} on {host}" if local.format == FORMAT else local.path
    metadata = local.metadata or Metadata()
    host = metadata.host or host  # the file may have moved to another host since
    mesh = tuple(metadata.mesh.items())
    key = own.digest(), hash_digests(digests)
    options_hash = hashlib.sha256(repr(options).encode()).digest()[:16]
    fallback, KERNEL.fallback = one_line(KERNEL.fallback)[:200], ""
    hashed, not_finite = hash_attributes(local.attributes), _find_not_finite(channel, local)
    own_info = RankInfo(
        key, options_hash, path, local.bytes, host, mesh, fallback, hashed, not_finite, metadata.no_sync
    )
    sent = channel.gather(own_info, "digests")
    rank_infos: dict[int, RankInfo] = {rank: sent[rank] for rank in sorted(sent)}
    if len({info.options for info in rank_infos.values()}) > 1:
        raise UsageError("the options differ between ranks; pass the same options on every rank")
    manifests = {key[0]: own}
    owners: dict[Key, int] = {}  # the first rank of each content
    structures: dict[bytes, int] = {}  # and of each structure
    for rank, info in rank_infos.items():
        owners.setdefault(info.key, rank)
        structures.setdefault(info.key[0], rank)
    if len(structures) > 1:
        sent = channel.share(lambda: own, structures.values(), "manifests")
        manifests = {structure: sent[rank] for structure, rank in structures.items()}
    blobs = {key: _join_digests(digests)}
    if len(owners) > 1:
        sent = channel.share(
            lambda: _join_digests(_agree_on_algorithms(local, digests, manifests)), owners.values(), "tensors"
        )
        blobs = {key: sent[rank] for key, rank in owners.items()}
    hashes = {rank: info.attributes for rank, info in rank_infos.items()}
    attributes = exchange_attributes(channel, local.attributes, hashes)
    contents = {key: Content(manifests[key[0]], blob) for key, blob in blobs.items()}
    return GroupContents(rank_infos, contents, channel.is_world, attributes)


def _find_not_finite(channel: Channel, local: Snapshot) -> tuple[str, ...]:
    """Return the names of tensors with NaN or infinity, in this rank's share of the tensors.

    Equal tensors need to be searched on one rank only, and differences of unequal tensors are measured anyway.
    """
    position = sorted(channel.ranks).index(channel.rank)
    tensors = list(local.tensors.values())
    share = set(range(position, len(tensors), len(channel.ranks)))
    # Ranks hold different shards.
    share |= {number for number, tensor in enumerate(tensors) if tensor.sharding is not None}
    numbers = set(find_not_finite({number: tensors[number] for number in share}))
    for number, tensor in enumerate(tensors):
        if isinstance(tensor.data, FileBytes) and tensor.data.not_finite:
            numbers.add(number)
    return tuple(tensors[number].name for number in sorted(numbers))


class FileBytes:
    """The bytes of a tensor in a file, in C order and little-endian, read part by part."""

    __slots__ = ("_files", "_tensor", "not_finite")

    def __init__(self, tensor: Tensor, files: Files) -> None:
        self._tensor, self._files = tensor, files
        self.not_finite = False
        """Whether NaN or infinity was read for the digest."""

    def __getitem__(self, part: Any) -> bytes:
        size = DTYPES[self._tensor.dtype].size
        try:
            return bytes(self._files.read(self._tensor, part.start // size, (part.stop - part.start) // size, 0))
        except CheckpointError as error:
            # The comparing rank would treat a CheckpointError as one unreadable file among several, and continue.
            raise RankFailed(str(error)) from error

    def digest(self, algorithm: str | None) -> tuple[str, bytes]:
        """Return algorithm and digest, like `live.digest.digest_all` for a tensor in memory."""
        algorithm = algorithm or default_algorithm()
        stream = Stream(algorithm)
        scan = FiniteScan(self._tensor.dtype, nan_only=not self._tensor.name.startswith("optimizer."))
        for start, count in ranges([self._tensor]):
            block = self._files.read(self._tensor, start, count, 0)
            scan.look(block)
            stream.update(block)
        self.not_finite = scan.found
        return algorithm, stream.digest()


def compute_digests(tensors: Sequence[Tensor], algorithm: str | None = None) -> list[tuple[str, bytes]]:
    """Return algorithm and digest of each tensor, empty for tensors whose bytes are unavailable."""
    digests = iter(digest_all([t.data.source for t in tensors if isinstance(t.data, TensorBytes)], algorithm))

    def get_digest(data: Any) -> tuple[str, bytes]:
        if isinstance(data, TensorBytes):
            return next(digests)
        return data.digest(algorithm) if isinstance(data, FileBytes) else ("", b"")

    return [get_digest(tensor.data) for tensor in tensors]


def _join_digests(digests: Sequence[tuple[str, bytes]]) -> bytes:
    return b"".join(digest for _, digest in digests)


def _agree_on_algorithms(
    local: Snapshot, digests: list[tuple[str, bytes]], manifests: Mapping[bytes, Manifest]
) -> list[tuple[str, bytes]]:
    """Return the digests, with COMMON for tensors whose algorithms differ between ranks."""
    used: dict[str, set[str]] = {}
    tied = local.metadata.tied if local.metadata is not None else {}
    for manifest in manifests.values():
        normalized = manifest.normalized_names()
        for row in manifest.rows:
            if row.algorithm:
                used.setdefault(name_of_copied(normalized[row.name], tied), set()).add(row.algorithm)
    common = [name_of_copied(name, tied) for name in normalize(local.tensors).values()]
    to_redo = [i for i, name in enumerate(common) if len(used.get(name, ())) > 1]
    tensors, agreed = list(local.tensors.values()), list(digests)
    for i, digest in zip(to_redo, compute_digests([tensors[i] for i in to_redo], COMMON), strict=True):
        agreed[i] = digest
    return agreed


def _split_digests(manifest: Manifest, blob: bytes) -> list[bytes]:
    """Return the digests of a manifest's rows, empty for rows without an algorithm."""
    digests, start = [], 0
    for row in manifest.rows:
        end = start + (WIDTH if row.algorithm else 0)
        digests.append(blob[start:end])
        start = end
    return digests
