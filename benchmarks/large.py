"""Four ranks of 1 GiB: identical, against a blocked memcmp; all different, against torch.allclose. Without start-up."""

from __future__ import annotations

import sys

from benchmarks.files import GIB, folder, layers, ranks, write
from benchmarks.timing import floor, median, read_printed_time, section, table, take_turns

ROUNDS = 5
JOBS = (1, 2)
# Each script prints the seconds of the comparison alone. A first comparison imports all modules.
SYNCHECK = """
import sys, time, syncheck
jobs, small, *files = sys.argv[1:]
options = syncheck.Options(jobs=int(jobs))
syncheck.compare(small, options=options)
start = time.perf_counter()
counts = syncheck.compare(*files, options=options).counts
took = time.perf_counter() - start
assert counts.tensors == 16 and (counts.identical or counts.different) == 16, counts
print(took)
"""
MEMCMP = """
import ctypes, mmap, sys, threading, time
import numpy as np
jobs, block = int(sys.argv[1]), 1 << 20
files = [open(path, "rb") for path in sys.argv[2:]]
memcmp = ctypes.CDLL(None).memcmp
memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

def compare(share):
    for at in share:
        for other in others:
            assert not memcmp(first + at, other + at, min(block, size - at))

start = time.perf_counter()
maps = [mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) for file in files]
first, *others = (np.frombuffer(found, np.uint8).ctypes.data for found in maps)
size = len(maps[0])
shares = [range(block * job, size, block * jobs) for job in range(jobs)]
threads = [threading.Thread(target=compare, args=(share,)) for share in shares]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(time.perf_counter() - start)
"""
ALLCLOSE = """
import sys, time, torch
from safetensors.torch import load_file
torch.set_num_threads(int(sys.argv[1]))
# Copied, so that no page has to be mapped while it is timed.
first, *others = ({k: v.clone() for k, v in load_file(path).items()} for path in sys.argv[2:])
start = time.perf_counter()
for other in others:
    for name in first:
        torch.allclose(first[name], other[name])
print(time.perf_counter() - start)
"""


def _measure(noise: float, rounds: int, name: str, script: str, small: str) -> dict[str, list[float]]:
    """Time syncheck and another script on the same four files, with each number of threads."""
    with folder(4 * GIB) as where:
        files = write(ranks(where, 4), layers(16, 4096, 4096), noise)
        commands = {}
        for jobs in JOBS:
            commands[f"syncheck, {jobs} threads"] = [sys.executable, "-c", SYNCHECK, str(jobs), small, *files]
            commands[f"{name}, {jobs} threads"] = [sys.executable, "-c", script, str(jobs), *files]
        return take_turns(commands, rounds, measure=read_printed_time)


def run(rounds: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md and whether all limits are met."""
    with folder(GIB // 1024) as where:
        write(ranks(where, 4), layers(2, 64), 1e-3)  # a difference, so the first comparison imports numpy
        same = _measure(0.0, rounds, "memcmp", MEMCMP, str(where))
        different = _measure(1e-3, rounds, "torch.allclose", ALLCLOSE, str(where))
    a, b = median(same), median(different)
    speed = [
        floor(
            f"identical: bytes/s of memcmp, {n} threads", a[f"memcmp, {n} threads"] / a[f"syncheck, {n} threads"], 0.7
        )
        for n in JOBS
    ]
    times = [
        floor(
            f"different: times as fast as torch.allclose, {n} threads",
            b[f"torch.allclose, {n} threads"] / b[f"syncheck, {n} threads"],
            4,
        )
        for n in JOBS
    ]
    return section(
        "Four ranks of 1 GiB (16 tensors of float32) in the page cache, start-up excluded. Identical, against memcmp "
        "of mapped files in blocks of 1 MiB, each with the first:",
        table(same),
        "Different in every element, with every number of the JSON, against torch.allclose of each with the first over "
        "tensors in memory:",
        table(different),
        speed + times,
    )
