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
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from syncheck.live.digest import host as digest_host
from syncheck.live.digest import parts
from syncheck.live.digest.host import WIDTH
from syncheck.live.digest.lanes import LANES, add_eagerly, start_digests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.live.digest.lanes import Row


class _Kernel:
    """The fused kernel.

    broken: why it is disabled.
    fallback: why the eager implementation was last used.
    """

    broken = fallback = ""

    def add(self, rows: Sequence[Row], sums: Any) -> None:
        """Add the words of rows to the sums, with the kernel or eagerly; the sums are the same."""
        if self.broken:
            self.fallback = self.fallback or self.broken
        elif self._run(rows, sums):
            return

        add_eagerly(rows, sums)

    def _run(self, rows: Sequence[Row], sums: Any) -> bool:
        """Run the kernel, and return whether it succeeded."""
        try:
            from syncheck.live.digest import triton_kernel

            triton_kernel.add_rows(rows, sums)
        except Exception as error:  # noqa: BLE001 - no Triton, no C compiler, an unsupported device, ...
            self.fallback = f"{type(error).__name__}: {error}"
            # Memory may be free at the next check; other errors are permanent.
            lacks_memory = isinstance(error, MemoryError) or "out of memory" in str(error).lower()
            if not lacks_memory:
                self.broken = self.fallback
            return False

        return True


KERNEL = _Kernel()


def digest_all(
    sources: Sequence[Any], algorithm: str | None = None, threads: int | None = None
) -> list[tuple[str, bytes]]:
    """Return the algorithm and the 16-byte digest of each source's bytes in C order.

    sources: strided torch tensors with values, on any device, or numpy arrays. They do not change, no random number is
        drawn, and sources in another memory order are copied part by part.
    algorithm: XXH3 or COMMON for all sources; None selects by device. Use COMMON if the algorithms of the ranks differ.
    threads: maximum number of CPU threads; None for this rank's share of the CPUs.

    Raises UsageError for a tensor whose storage was freed.
    """
    if algorithm is not None:
        return [(algorithm, digest) for digest in digest_host.hash_on_cpu(sources, algorithm, threads)]

    by_device: dict[Any, list[int]] = defaultdict(list)
    with parts.as_plain_tensors():
        for i, source in enumerate(sources):
            on_gpu = parts.is_torch(source) and source.is_cuda
            by_device[source.device if on_gpu else None].append(i)

    # Devices compute while the CPU hashes. Then each device returns all of its digests at once.
    on_cpu = by_device.pop(None, [])
    pending = []
    for indices in by_device.values():
        pending.append((indices, start_digests([sources[i] for i in indices], KERNEL.add)))

    algorithm = digest_host.default_algorithm()
    digests: list[tuple[str, bytes]] = [("", b"")] * len(sources)
    hashed = digest_host.hash_on_cpu([sources[i] for i in on_cpu], algorithm, threads)
    for i, digest in zip(on_cpu, hashed, strict=True):
        digests[i] = algorithm, digest

    for indices, result in pending:
        for i, digest in zip(indices, result.read(), strict=True):
            digests[i] = LANES, digest

    return digests


def hash_digests(digests: Sequence[tuple[str, bytes]]) -> bytes:
    """Return 16 bytes that are equal if all digests, their algorithms and their order are equal (BLAKE2)."""
    # Digests have a fixed width and names contain no zero byte, so the encoding is unique.
    encoded = [b"%s\0%s" % (algorithm.encode(), digest) for algorithm, digest in digests]
    return hashlib.blake2b(b"".join(encoded), digest_size=WIDTH).digest()
