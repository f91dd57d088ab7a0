"""1,024 small replicas, with `ulimit -n 256`, and 50,000 small tensors of 4 ranks: time by tensor and rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.files import GIB, folder, layers, ranks, write
from benchmarks.timing import SYNCHECK, bar, median, section, table, take_turns

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = 3
MOST = 20e-6  # seconds a tensor and rank
# (title, ranks, tensors, elements per tensor, noise)
CASES = (
    ("1,024 replicas of 20 tensors", 1024, 20, 256, 0.0),
    ("1,024 replicas of 80 tensors", 1024, 80, 256, 0.0),
    ("4 ranks of 12,500 tensors", 4, 12_500, 256, 0.0),
    ("4 ranks of 50,000 tensors", 4, 50_000, 256, 0.0),
)


def _files(where: Path, name: str, count: int, tensors: int, elements: int, noise: float) -> list[str]:
    """Write the ranks of one case in a separate folder and return the command."""
    own = where / name
    own.mkdir()
    write(ranks(own, count), layers(tensors, elements), noise)
    return ["sh", "-c", f"ulimit -n 256 && exec {SYNCHECK} compare -q {own}/*.safetensors"]


def run(rounds: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md and whether all limits are met."""
    with folder(GIB) as where:
        commands = {what: _files(where, f"case{i}", *case) for i, (what, *case) in enumerate(CASES)}
        commands["syncheck --version"] = [SYNCHECK, "--version"]
        times = take_turns(commands, rounds)
    of = median(times)
    start = of["syncheck --version"]
    bars = []
    for what, count, tensors, elements, _ in CASES:
        # Subtract the time for reading the bytes at 1 GB/s.
        each = (of[what] - start - count * tensors * elements * 4 / 1e9) / (count * tensors)
        bars.append(bar(f"{what}, microseconds a tensor and rank", each * 1e6, MOST * 1e6))
    return section(
        "Small tensors of 1 kB, whole processes with `ulimit -n 256`, less what `syncheck --version` takes and the "
        "bytes at 1 GB/s.",
        table(times),
        bars,
    )
