"""Exchange the manifests of the ranks' tensors and values, and the digests of the tensors, between ranks."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.errors import CheckpointError, RankFailed, UsageError
from syncheck.layout.copies import name_of_copied
from syncheck.live.digest import COMMON, KERNEL, Stream, digest_all, hash_digests
from syncheck.live.digest.finiteness import find_not_finite
from syncheck.live.digest.host import default_algorithm
from syncheck.live.exchange.attributes import exchange_attributes, hash_attributes
from syncheck.live.exchange.contents import ContentKey, GroupContents, RankInfo, make_manifest
from syncheck.live.memory import FORMAT
from syncheck.live.memory.tensor_bytes import TensorBytes
from syncheck.snapshots import Metadata
from syncheck.tensors.blocks import ranges
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.finiteness import FiniteScan
from syncheck.tensors.names import normalize
from syncheck.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import TypeVar

    from syncheck.api import Options
    from syncheck.live.channel import Channel
    from syncheck.live.exchange.contents import Manifest
    from syncheck.snapshots import Snapshot, Tensor
    from syncheck.tensors.blocks import Files

    K = TypeVar("K")


def exchange_contents(channel: Channel, local: Snapshot, options: Options) -> GroupContents:
    """Exchange manifests and digests, and return the contents of all ranks. Equal contents are sent once.

    To be called within `channel.run_together` on all ranks. Raises UsageError if the options differ between ranks.
    """
    digests = compute_digests(list(local.tensors.values()))
    manifest = make_manifest(local, [algorithm for algorithm, _ in digests])
    key = ContentKey(manifest.hash_structure(), hash_digests(digests))
    gathered = channel.gather(_describe_rank(channel, local, options, key), "digests")
    rank_infos: dict[int, RankInfo] = dict(sorted(gathered.items()))
    if len({info.options for info in rank_infos.values()}) > 1:
        raise UsageError("the options differ between ranks; pass the same options on every rank")

    structures = {rank: info.key.structure for rank, info in rank_infos.items()}
    manifests: dict[bytes, Manifest] = _share_distinct(channel, structures, lambda: manifest, "manifests")

    def join_digests() -> bytes:
        # Equal ranks have used the same algorithms.
        are_equal = len({info.key for info in rank_infos.values()}) == 1
        agreed = digests if are_equal else _agree_on_algorithms(local, digests, manifests)
        return b"".join(digest for _, digest in agreed)

    keys = {rank: info.key for rank, info in rank_infos.items()}
    complete_manifests: dict[ContentKey, Manifest] = {}
    for content_key, joined_digests in _share_distinct(channel, keys, join_digests, "tensors").items():
        complete_manifests[content_key] = replace(manifests[content_key.structure], digests=joined_digests)

    hashes = {rank: info.attributes for rank, info in rank_infos.items()}
    attributes = exchange_attributes(channel, local.attributes, hashes)
    return GroupContents(
        rank_infos=rank_infos,
        by_key=complete_manifests,
        is_world=channel.is_world,
        attributes=attributes,
    )


def _describe_rank(channel: Channel, local: Snapshot, options: Options, key: ContentKey) -> RankInfo:
    """Return the first message of this rank. Resets the reason for digests without the kernel."""
    host = os.uname().nodename
    metadata = local.metadata or Metadata()
    fallback = one_line(KERNEL.fallback)[:200]
    KERNEL.fallback = ""
    return RankInfo(
        key,
        options=hashlib.sha256(repr(options).encode()).digest()[:16],
        path=f"{local.path} on {host}" if local.format == FORMAT else local.path,
        size=local.bytes,
        host=metadata.host or host,  # the file may have moved to another host since
        mesh=tuple(metadata.mesh.items()),
        fallback=fallback,
        attributes=hash_attributes(local.attributes),
        not_finite=_find_not_finite(channel, local),
        no_sync=metadata.no_sync,
    )


def _share_distinct(channel: Channel, keys: Mapping[int, K], make: Callable[[], Any], kind: str) -> dict[K, Any]:
    """Return the message of each key. Ranks with equal keys have equal messages, and only the first of them sends.

    A collective call if the keys differ.

    keys: by rank.
    make: a function that returns this rank's message.
    """
    first_ranks: dict[K, int] = {}
    for rank, key in keys.items():
        first_ranks.setdefault(key, rank)

    if len(first_ranks) == 1:
        return dict.fromkeys(first_ranks, make())

    messages = channel.share(make, first_ranks.values(), kind)
    return {key: messages[rank] for key, rank in first_ranks.items()}


def _find_not_finite(channel: Channel, local: Snapshot) -> tuple[str, ...]:
    """Return the names of tensors with NaN or infinity, in this rank's share of the tensors.

    Equal tensors need to be searched on one rank only, and differences of unequal tensors are measured anyway.
    """
    position = sorted(channel.ranks).index(channel.rank)
    tensors = list(local.tensors.values())
    searched: dict[int, Tensor] = {}
    numbers: list[int] = []
    for number, tensor in enumerate(tensors):
        # Files were searched when their digests were computed.
        if isinstance(tensor.data, FileBytes):
            if tensor.data.not_finite:
                numbers.append(number)
            continue

        # Ranks hold different shards.
        if number % len(channel.ranks) == position or tensor.sharding is not None:
            searched[number] = tensor

    numbers += find_not_finite(searched)
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
    # Tensors in memory are hashed together, which is faster.
    sources = [tensor.data.source for tensor in tensors if isinstance(tensor.data, TensorBytes)]
    digests_in_memory = iter(digest_all(sources, algorithm))
    digests: list[tuple[str, bytes]] = []
    for tensor in tensors:
        if isinstance(tensor.data, TensorBytes):
            digests.append(next(digests_in_memory))
        elif isinstance(tensor.data, FileBytes):
            digests.append(tensor.data.digest(algorithm))
        else:
            digests.append(("", b""))

    return digests


def _agree_on_algorithms(
    local: Snapshot, digests: Sequence[tuple[str, bytes]], manifests: Mapping[bytes, Manifest]
) -> list[tuple[str, bytes]]:
    """Return the digests, with COMMON for tensors whose algorithms differ between ranks."""
    tied = local.metadata.tied if local.metadata is not None else {}
    algorithms = _list_algorithms(manifests.values(), tied)
    tensors = list(local.tensors.values())
    to_redo: list[int] = []
    for number, name in enumerate(normalize(local.tensors).values()):
        # A tensor without bytes has no algorithm.
        if len(algorithms[name_of_copied(name, tied)]) > 1:
            to_redo.append(number)

    agreed = list(digests)
    new_digests = compute_digests([tensors[number] for number in to_redo], COMMON)
    for number, digest in zip(to_redo, new_digests, strict=True):
        agreed[number] = digest

    return agreed


def _list_algorithms(manifests: Iterable[Manifest], tied: Mapping[str, str]) -> Mapping[str, set[str]]:
    """Return the algorithms of the digests of each tensor, by the name of which tied tensors are copies."""
    algorithms: dict[str, set[str]] = defaultdict(set)
    for manifest in manifests:
        for row in manifest.rows:
            if row.algorithm:
                algorithms[name_of_copied(manifest.normalized_names[row.name], tied)].add(row.algorithm)

    return algorithms
