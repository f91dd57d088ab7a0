"""`syncheck compare` on two ranks of resnet18, against importing torch and a script with torch.load."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.files import RESNET
from benchmarks.timing import SYNCHECK, bar, median, section, table, take_turns

ROUNDS = 9
NAIVE = """
import sys, torch
first, *others = (torch.load(path, map_location="cpu") for path in sys.argv[1:])
bad = {name for other in others for name in first if not torch.allclose(first[name], other[name])}
print(len(bad), "tensors differ")
sys.exit(bool(bad))
"""
# Limits of ratios: (command, baseline, maximum).
BARS = (("syncheck compare", "import torch", 0.25), ("syncheck compare", "torch.load + torch.allclose", 0.1))


def run(rounds: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md and whether all limits are met."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", RESNET, folder, "resnet18", "2"], check=True)
        files = sorted(str(path) for path in Path(folder).glob("*.pth"))
        times = take_turns(
            {
                "python -c pass": [sys.executable, "-c", "pass"],
                "syncheck --help": [SYNCHECK, "--help"],
                "syncheck compare": [SYNCHECK, "compare", *files],
                "import torch": [sys.executable, "-c", "import torch"],
                "torch.load + torch.allclose": [sys.executable, "-c", NAIVE, *files],
            },
            rounds,
        )
    of = median(times)
    bars = [bar(f"`{name}` / `{against}`", of[name] / of[against], most) for name, against, most in BARS]
    bars.append(bar("`syncheck --help` - `python -c pass`, s", of["syncheck --help"] - of["python -c pass"], 0.1))
    return section(
        "Two ranks of torchvision's resnet18 (122 tensors, 40 different), whole processes, files in the page cache.",
        table(times),
        bars,
    )
