"""Digests of tensors on the CPU against reading their bytes once, and against SHA-1, in one process."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

from benchmarks.timing import bar, median, section, table, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 7
SETS = {"1 x 1 GiB": (1, 1 << 30), "500 x 100 kB": (500, 100_000), "5,000 x 1 kB": (5000, 1000)}


def run(rounds: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md and whether all limits are met."""
    times: dict[str, list[float]] = {}
    for name, (count, size) in SETS.items():
        for what, found in take_turns(programs(count, size), rounds, measure=time_call).items():
            times[f"{name}: {what}"] = found
    of = median(times)
    bars = [
        bar(f"{name}: digests, {threads} / reading each once", of[f"{name}: {threads}"] / of[f"{name}: read"], 3.0)
        for name in SETS
        for threads in ("1 thread", "2 threads")
    ]
    each = of["5,000 x 1 kB: 1 thread"] / 5000 * 1e6
    return section(
        "Tensors of float32 in memory, seconds within one process. To read them is to take `numpy.sum` of the words of "
        "64 bits of each; SHA-1 of each is what Megatron computes.",
        table(times),
        [*bars, bar("5,000 x 1 kB: microseconds a tensor", each, 5.0)],
    )


def programs(count: int, size: int) -> dict[str, Callable[[], object]]:
    """Return the measured functions for `count` tensors of `size` bytes each."""
    import numpy as np
    import torch

    from syncheck.live.digest import digest_all

    tensors = [torch.randn(size // 4) for _ in range(count)]
    words = [tensor.numpy().view(np.uint64) for tensor in tensors]
    return {
        "read": lambda: [row.sum() for row in words],
        "1 thread": lambda: digest_all(tensors, threads=1),
        "2 threads": lambda: digest_all(tensors, threads=2),
        "SHA-1": lambda: [hashlib.sha1(row).digest() for row in words],
    }


def time_call(work: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
