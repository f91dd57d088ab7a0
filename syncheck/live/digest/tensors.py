"""Compute one 128-bit digest per tensor, on the device of the tensor: ranks exchange digests instead of bytes.

A digest comes with the name of its algorithm, and only digests of the same algorithm are compared. Digests depend on
the bytes in C order, little-endian, and not on strides, dtype or shape.

    xxh3-128/4MiB   CPU with the package xxhash, and devices without an algorithm of their own
    blake2b-128     CPU without xxhash; every rank can compute it
    lanes-128       CUDA and ROCm; definition and limits are in `digest.lanes`

xxh3-128 is the 128-bit XXH3 of https://github.com/Cyan4973/xxHash/blob/v0.8.3/doc/xxhash_spec.md; for more than 4 MiB,
the XXH3 of the digests of all 4 MiB chunks. Accidental collisions have a probability of 2**-128. XXH3 is not
cryptographic: whoever chooses the bytes can construct collisions. With BLAKE2 this is infeasible.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.live.digest import host as digest_host
from syncheck.live.digest import parts
from syncheck.live.digest.host import COMMON, WIDTH, XXH3, Stream
from syncheck.live.digest.lanes import LANES, start_digests

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMMON", "LANES", "WIDTH", "XXH3", "Stream", "digest_all", "hash_digests"]

ALGORITHMS = (XXH3, COMMON, LANES)


def digest_all(
    sources: Sequence[Any], algorithm: str | None = None, threads: int | None = None
) -> list[tuple[str, bytes]]:
    """Return the algorithm and the 16-byte digest of each source's bytes in C order.

    sources: strided torch tensors with values, on any device, or numpy arrays. They do not change, no random number is
    drawn, and sources in another memory order are copied part by part. algorithm: one of ALGORITHMS for all sources;
    None selects by device. Use COMMON if the algorithms of the ranks differ. threads: maximum number of CPU threads;
    None for this rank's share of the CPUs. Raises UsageError for a tensor whose storage was freed and for an
    unavailable algorithm.
    """
    if algorithm not in (None, *ALGORITHMS):
        raise UsageError(f"digest algorithm {algorithm!r} is unknown; choose from {', '.join(ALGORITHMS)}")
    digests: list[tuple[str, bytes]] = [("", b"")] * len(sources)
    with parts.as_plain_tensors():
        by_device, cpu_indices = _split_by_device(sources, algorithm)
        # Devices compute while the CPU hashes. Then each device returns all of its digests at once.
        pending = [(indices, start_digests(tensors)) for indices, tensors in by_device.values()]
        on_cpu = algorithm if algorithm in (XXH3, COMMON) else digest_host.default_algorithm()
        hashed = digest_host.hash_on_cpu([sources[i] for i in cpu_indices], on_cpu, threads)
    for i, value in zip(cpu_indices, hashed, strict=True):
        digests[i] = on_cpu, value
    for indices, result in pending:
        for i, value in zip(indices, result.read(), strict=True):
            digests[i] = LANES, value
    return digests


def hash_digests(digests: Sequence[tuple[str, bytes]]) -> bytes:
    """Return 16 bytes that are equal if all digests, their algorithms and their order are equal (BLAKE2)."""
    # Digests have a fixed width and names contain no zero byte, so the encoding is unique.
    encoded = b"".join(b"%s\0%s" % (algorithm.encode(), value) for algorithm, value in digests)
    return hashlib.blake2b(encoded, digest_size=WIDTH).digest()


def _split_by_device(
    sources: Sequence[Any], algorithm: str | None
) -> tuple[dict[Any, tuple[list[int], list[Any]]], list[int]]:
    """Return (indices, tensors) by the device that hashes them, and the indices of sources hashed on the CPU."""
    by_device: dict[Any, tuple[list[int], list[Any]]] = {}
    cpu_indices = []
    for i, source in enumerate(sources):
        own = algorithm is None and parts.is_torch(source) and source.is_cuda
        if own or algorithm == LANES:
            tensor = source if parts.is_torch(source) else _as_tensor(source)
            indices, tensors = by_device.setdefault(tensor.device, ([], []))
            indices.append(i)
            tensors.append(tensor)
        else:
            cpu_indices.append(i)
    return by_device, cpu_indices


def _as_tensor(array: Any) -> Any:
    import torch

    # Copied, because torch warns about read-only arrays.
    return torch.from_numpy(parts.array_bytes(array).copy())
