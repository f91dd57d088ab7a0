"""Eight ranks of resnet50, against a script with torch.load and torch.allclose."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.compare import NAIVE
from benchmarks.files import GIB, RESNET, folder
from benchmarks.timing import SYNCHECK, bar, median, section, table, take_turns

ROUNDS = 5


def run(rounds: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md and whether all limits are met."""
    with folder(GIB) as where:
        subprocess.run([sys.executable, "-c", RESNET, str(where), "resnet50", "8"], check=True)
        files = sorted(str(path) for path in where.glob("*.pth"))
        times = take_turns(
            {
                "syncheck compare": [SYNCHECK, "compare", *files],
                "torch.load + torch.allclose": [sys.executable, "-c", NAIVE, *files],
            },
            rounds,
        )
    of = median(times)
    ratio = of["syncheck compare"] / of["torch.load + torch.allclose"]
    return section(
        "Eight ranks of torchvision's resnet50 (320 tensors, 106 different, 102 MB a file), whole processes, files in "
        "the page cache, torch with one thread.",
        table(times),
        [bar("`syncheck compare` / `torch.load + torch.allclose`", ratio, 0.1)],
    )
