"""Peak of anonymous memory of a comparison, as counted by the kernel."""

from __future__ import annotations

from benchmarks.files import GIB, folder, layers, ranks, write
from benchmarks.timing import SYNCHECK, bar, peak_anonymous, section

ROUNDS = 1
MOST = 150.0  # MB, up to UP_TO tensors times ranks
UP_TO = 5_000 * 8
MORE = 200  # bytes per tensor and rank above UP_TO
# (title, ranks, tensors, shape, noise)
CASES = (
    ("4 ranks of 1 GiB, identical", 4, 16, (4096, 4096), 0.0),
    ("4 ranks of 1 GiB, all different", 4, 16, (4096, 4096), 1e-3),
    ("64 ranks of 64 MiB in one tensor, all different", 64, 1, (4096, 4096), 1e-3),
    ("8 ranks of 5,000 tensors, identical", 8, 5_000, (64,), 0.0),
    ("8 ranks of 5,000 tensors, all different", 8, 5_000, (64,), 1e-3),
    ("4 ranks of 50,000 tensors, identical", 4, 50_000, (64,), 0.0),
)


def run(rounds: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md and whether all limits are met."""
    bars = []
    for what, count, tensors, shape, noise in CASES:
        with folder(4 * GIB) as where:
            files = write(ranks(where, count), layers(tensors, *shape), noise)
            peak = max(peak_anonymous([SYNCHECK, "compare", "-q", *files]) for _ in range(rounds))
        most = MOST + max(0, count * tensors - UP_TO) * MORE / 1e6
        bars.append(bar(f"{what}, MB", peak, most))
    return section("`syncheck compare -q`: peak of RssAnon in /proc/PID/status, read every 2 ms.", bars)
