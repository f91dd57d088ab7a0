"""The contents of ranks without the bytes of their tensors: messages between ranks, and the replicas they describe.

Two records describe what a rank holds. A `Snapshot` has the bytes of its tensors, or knows where they are. Its
`Manifest` is the message about it to other ranks: it has digests in place of the bytes, and ranks with the same model
have equal manifests. `RankInfo` has the rest, which differs between ranks by design. From both, every rank makes the
snapshots of all ranks.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.frozen import record
from syncheck.layout.alignment import align
from syncheck.layout.groups import find_last_step
from syncheck.live.digest import WIDTH
from syncheck.live.memory import agree_on_buffers
from syncheck.snapshots import Digest, Sharding, Snapshot, Tensor, contiguous_strides, get_metadata
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.names import normalize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.layout.alignment import Alignment
    from syncheck.messages import Message
    from syncheck.snapshots import Metadata, NoSync


class Row(NamedTuple):
    """One tensor, without its bytes.

    algorithm: of its digest; empty without a digest.
    sharding: index in the manifest's list, or -1.
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

    def make_tensor(self, sharding: Sharding | None, digest: bytes) -> Tensor:
        """Return the tensor as all ranks see it."""
        record = None
        if self.crc32:
            record = (self.crc32, 0, math.prod(self.shape) * DTYPES[self.dtype].size)

        return Tensor(
            name=self.name,
            dtype=self.dtype,
            shape=self.shape,
            strides=contiguous_strides(self.shape),
            path="",
            offset=0,
            refused=self.refused,
            data=b"",
            parameter=self.parameter,
            sharding=sharding,
            same=digest,
            crc32=self.crc32,
            record=record,
        )


@dataclass(frozen=True)
class Manifest:
    """The tensors of one rank in order, and its plain values. Small, and equal on ranks with the same model.

    shardings: the distinct shardings of DTensors.
    snapshot: of the rank, without tensors, path and all fields that differ between ranks by design.
    digests: of all tensors, joined in order. Ranks send them later and separately, because they differ more often than
        the rest; empty until then.
    """

    rows: tuple[Row, ...]
    shardings: tuple[Sharding, ...]
    snapshot: Snapshot
    digests: bytes = b""

    @property
    def metadata(self) -> Metadata:
        """The metadata, empty if the ranks have none."""
        return get_metadata(self.snapshot)

    def hash_layout(self) -> bytes:
        """Return 16 bytes that are equal if everything but the values is equal; only their names count."""
        without_values = replace(self.snapshot, values=dict.fromkeys(self.snapshot.values))
        return _hash(_hash_rows(self.rows, self.shardings), repr(without_values))

    def hash_structure(self) -> bytes:
        """Return 16 bytes that are equal for equal manifests, whatever their digests."""
        return _hash(self.hash_layout(), repr(self.snapshot.values))

    @cached_property
    def normalized_names(self) -> Mapping[str, str]:
        """Each tensor's name without wrapper prefixes, by name. Ranks are compared by normalized names."""
        return normalize(row.name for row in self.rows)

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors as all ranks see them, by name: with digests, without bytes.

        Created on demand, because ranks in sync do not need them.
        """
        tensors: dict[str, Tensor] = {}
        start = 0
        for row in self.rows:
            sharding = self.shardings[row.sharding] if row.sharding >= 0 else None
            # Rows without an algorithm have no digest.
            end = start + (WIDTH if row.algorithm else 0)
            tensors[row.name] = row.make_tensor(sharding, self.digests[start:end])
            start = end

        return tensors


def _hash(first: bytes, text: str) -> bytes:
    return hashlib.sha256(first + text.encode("utf-8", "backslashreplace")).digest()[:16]


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

        row = Row(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            refused=tensor.refused,
            parameter=tensor.parameter,
            algorithm=algorithm,
            sharding=index,
            crc32=tensor.crc32,
        )
        rows.append(row)

    metadata = local.metadata and replace(
        local.metadata,
        rank=None,
        host=None,
        mesh={},
        no_sync="",
    )
    shared = Snapshot(
        path="",
        format=local.format,
        bytes=0,
        tensors={},
        values=dict(local.values),
        stubs=local.stubs,
        metadata=metadata,
        notes=local.notes,
        ties=local.ties,
    )
    return Manifest(tuple(rows), tuple(shardings), shared)


def with_digest_only(tensor: Tensor) -> Tensor:
    """Return a tensor without bytes and with its digest; the ranks have agreed on the algorithm."""
    return replace(
        tensor,
        data=None,
        digest=Digest("agreed", tensor.same.hex()),
        same=b"",
    )


class ContentKey(NamedTuple):
    """Two hashes that are equal on ranks with equal contents.

    structure: hash of the manifest.
    digests: hash of the digests of all tensors.
    """

    structure: bytes
    digests: bytes


@record
class RankInfo:
    """The first message of a rank.

    key: equal on ranks with equal contents.
    options: hash of the options.
    path, size: of its replica in reports.
    host: of the training.
    mesh: the rank's coordinate by dimension.
    fallback: why its digests were computed without the fused GPU kernel, else empty.
    attributes: hash of the plain attributes of its modules.
    not_finite: names of its tensors with NaN or infinity.
    no_sync: as in `snapshots.Metadata`.
    """

    key: ContentKey
    options: bytes
    path: str
    size: int
    host: str
    mesh: tuple[tuple[str, int], ...]
    fallback: str = ""
    attributes: bytes = b""
    not_finite: tuple[str, ...] = ()
    no_sync: NoSync = ""


@dataclass(frozen=True)
class GroupContents:
    """The contents of a group's ranks.

    rank_infos: by rank, in order.
    by_key: the distinct manifests, with digests.
    is_world: the group includes all ranks.
    attributes: plain attributes that differ between ranks, by rank; None for a rank without modules.
    """

    rank_infos: Mapping[int, RankInfo]
    by_key: Mapping[ContentKey, Manifest]
    is_world: bool
    attributes: Mapping[int, Mapping[str, Any] | None] = field(default_factory=dict)

    def of_rank(self, rank: int) -> Manifest:
        """Return the manifest of a rank."""
        return self.by_key[self.rank_infos[rank].key]

    @cached_property
    def alignment(self) -> Alignment:
        """The tensors of all ranks by common names. Created on demand, because ranks in sync do not need it."""
        return align(self.snapshots())

    def common_names(self, manifest: Manifest) -> Mapping[str, str]:
        """Return the names under which tensors are compared, by name in one of the manifests."""
        names = manifest.normalized_names
        have_copies = any(each_manifest.metadata.tied for each_manifest in self.by_key.values())
        if not have_copies:
            return names

        copies = self.alignment.copies
        return {name: copies.get(normalized, normalized) for name, normalized in names.items()}

    def fetched_names(self, manifest: Manifest) -> Mapping[str, str]:
        """Return the names under which ranks exchange bytes: one name for all copies of a tensor."""
        find_source = self.alignment.find_source
        return {name: find_source(normalized) for name, normalized in manifest.normalized_names.items()}

    @property
    def not_finite(self) -> list[str]:
        """The tensors with NaN or infinity on any rank, in the order of the model."""
        names_of_ranks = set[str]().union(*[info.not_finite for info in self.rank_infos.values()])
        # Almost always, and the names of a large model take long.
        if not names_of_ranks:
            return []

        # The keys of a dictionary, to keep the order.
        common_names: dict[str, None] = {}
        for manifest in self.by_key.values():
            by_name = self.common_names(manifest)
            for row in manifest.rows:
                if row.name in names_of_ranks:
                    common_names[by_name[row.name]] = None

        return list(common_names)

    @property
    def step(self) -> int | None:
        """The last step in the metadata of the files."""
        return find_last_step(manifest.metadata.step for manifest in self.by_key.values())

    @property
    def are_equal(self) -> bool:
        """Whether all ranks have equal contents, hold full replicas, and none is missing.

        Plain attributes are no part of the contents, because many of them differ by design.
        """
        if len(self.by_key) > 1:
            return False

        (manifest,) = self.by_key.values()
        ranks_are_missing = manifest.metadata.world_size not in (None, len(self.rank_infos))
        # Along dimensions of a mesh, ranks may hold different shards.
        have_mesh = any(info.mesh for info in self.rank_infos.values())
        may_be_sharded = have_mesh or len(manifest.shardings) > 0
        return not ranks_are_missing and not may_be_sharded

    def snapshots(self, ranks: Sequence[int] = ()) -> dict[int, Snapshot]:
        """Return the replicas as all ranks see them, by default of all ranks. Equal contents share tensors."""
        # In a subgroup, ranks outside are not missing; ranks that saved a file and are absent are.
        present = len(self.rank_infos) if self.is_world else None
        snapshots: dict[int, Snapshot] = {}
        for rank in ranks or self.rank_infos:
            world_size = self.of_rank(rank).metadata.world_size or present
            # Ranks that are selected from equal ranks are no whole world.
            snapshots[rank] = self._make_snapshot(rank, None if ranks else world_size)

        return dict(zip(snapshots, agree_on_buffers(snapshots.values()), strict=True))

    def _make_snapshot(self, rank: int, world_size: int | None) -> Snapshot:
        """Return the replica of a rank as all ranks see it."""
        info = self.rank_infos[rank]
        manifest = self.of_rank(rank)
        metadata = replace(
            manifest.metadata,
            rank=rank,
            world_size=world_size,
            host=info.host,
            mesh=dict(info.mesh),
            no_sync=info.no_sync,
        )
        return replace(
            manifest.snapshot,
            path=info.path,
            bytes=info.size,
            tensors=manifest.tensors,
            metadata=metadata,
            attributes=self.attributes.get(rank),
        )
