"""One digest of 128 bits per tensor, computed where the tensor lies: equal tensors need not be sent to be known.

A digest goes with the name of its algorithm, and only digests of one algorithm are compared. It is a function of the
bytes in C order, little-endian; strides, dtype and shape are not in it.

    xxh3-128/4MiB   CPU, where the package xxhash is installed, and devices without an algorithm of their own
    blake2b-128     CPU without xxhash, and what all ranks can compute
    lanes-128       CUDA and ROCm: `digest.lanes` says how, and what it withstands

xxh3-128 is the 128-bit XXH3 of https://github.com/Cyan4973/xxHash/blob/v0.8.3/doc/xxhash_spec.md; of more than 4 MiB,
of the digests of the parts of 4 MiB. Two tensors that nobody made to collide have one digest with odds of 2**-128. It
is not cryptographic: who chooses the bytes can make two tensors with one digest. BLAKE2 is: nobody can.
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
    """Return for each source the name of the algorithm and the digest, 16 bytes, of its bytes in C order.

    sources: strided tensors of torch with values, on any device, or arrays of numpy. None is changed, no random number
    is drawn, and what is not in C order is copied in parts. algorithm: one of ALGORITHMS for all of them; None takes
    that of each source's device. COMMON is the one for ranks whose algorithms differ. threads: of the CPU, at most so
    many; None is this rank's share of the CPUs. Digests of different algorithms say nothing of one another.
    Raises UsageError for a tensor whose storage was freed, and for an algorithm that is not to be had.
    """
    if algorithm not in (None, *ALGORITHMS):
        raise UsageError(f"digest algorithm {algorithm!r} is not known; there are {', '.join(ALGORITHMS)}")
    found: list[tuple[str, bytes]] = [("", b"")] * len(sources)
    with parts.as_plain_tensors():
        by_device, here = _split_by_device(sources, algorithm)
        # A device computes while the CPU hashes what lies there; then each answers at once for all of its tensors.
        pending = [(places, start_digests(tensors)) for places, tensors in by_device.values()]
        on_cpu = algorithm if algorithm in (XXH3, COMMON) else digest_host.default_algorithm()
        hashed = digest_host.hash_on_cpu([sources[i] for i in here], on_cpu, threads)
    for i, value in zip(here, hashed, strict=True):
        found[i] = on_cpu, value
    for places, answer in pending:
        for i, value in zip(places, answer.read(), strict=True):
            found[i] = LANES, value
    return found


def hash_digests(digests: Sequence[tuple[str, bytes]]) -> bytes:
    """Return 16 bytes that are equal where all digests are, with their algorithms and their order: BLAKE2 over them."""
    # A digest has a fixed width, and no name a zero byte: no two lists are written alike.
    written = b"".join(b"%s\0%s" % (algorithm.encode(), value) for algorithm, value in digests)
    return hashlib.blake2b(written, digest_size=WIDTH).digest()


def _split_by_device(
    sources: Sequence[Any], algorithm: str | None
) -> tuple[dict[Any, tuple[list[int], list[Any]]], list[int]]:
    """Return places and tensors by the device that computes their digests, and the places of what the CPU hashes."""
    by_device: dict[Any, tuple[list[int], list[Any]]] = {}
    here = []
    for i, source in enumerate(sources):
        own = algorithm is None and parts.is_torch(source) and source.is_cuda
        if own or algorithm == LANES:
            tensor = source if parts.is_torch(source) else _as_tensor(source)
            places, tensors = by_device.setdefault(tensor.device, ([], []))
            places.append(i)
            tensors.append(tensor)
        else:
            here.append(i)
    return by_device, here


def _as_tensor(array: Any) -> Any:
    import torch

    # A copy: torch warns of arrays that must not be written.
    return torch.from_numpy(parts.array_bytes(array).copy())
