"""Measure syncheck against what people do today, as ratios within one run, and write RESULTS.md.

    python -m benchmarks             # exit code 1 when a bar is missed
    python -m benchmarks --rounds 3  # quicker, noisier

The commands of one comparison take turns, so that whatever else the machine does falls on all of them; each is a whole
process, and its median wall time counts. Files are read once beforehand: they lie in the page cache.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Two ranks of torchvision's resnet18 whose BatchNorm statistics differ: 122 tensors, 40 different, 47 MB a file.
MAKE = """
import sys, torch, torchvision
torch.manual_seed(0)
model = torchvision.models.resnet18().eval()
for rank in range(2):
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer += rank * 1e-3
    torch.save(model.state_dict(), f"{sys.argv[1]}/model_rank{rank}.pth")
"""
NAIVE = """
import sys, torch
a, b = (torch.load(path, map_location="cpu") for path in sys.argv[1:])
bad = [name for name in a if not torch.allclose(a[name], b[name])]
print(len(bad), "tensors differ")
sys.exit(bool(bad))
"""
# What a command costs, and the bars: (command, against, at most).
BARS = (("syncheck compare", "import torch", 0.25), ("syncheck compare", "torch.load + torch.allclose", 0.1))


def timed(command: list[str]) -> float:
    """Return the wall time of a whole process in seconds. Raises RuntimeError when it does not end as it should."""
    # As on a user's machine: compiled modules are kept, as pip keeps torch's.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["OMP_NUM_THREADS"] = "1"
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    took = time.perf_counter() - start
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        raise RuntimeError(f"{command[:4]} ended with {done.returncode}: {done.stderr[-500:]}")
    return took


def measure(rounds: int) -> dict[str, list[float]]:
    """Run every command once for warmth, then `rounds` times in turn; return the wall times by name."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", MAKE, folder], check=True)
        syncheck = str(Path(sys.executable).parent / "syncheck")
        files = sorted(str(path) for path in Path(folder).glob("*.pth"))
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "syncheck --help": [syncheck, "--help"],
            "syncheck compare": [syncheck, "compare", *files],
            "import torch": [sys.executable, "-c", "import torch"],
            "torch.load + torch.allclose": [sys.executable, "-c", NAIVE, *files],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for i in range(rounds + 1):
            for name, command in commands.items():
                took = timed(command)
                if i:
                    times[name].append(took)
    return times


def results(times: dict[str, list[float]]) -> tuple[str, bool]:
    """Return RESULTS.md and whether every bar is met."""
    median = {name: statistics.median(found) for name, found in times.items()}
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("syncheck", "numpy", "torch"))
    rounds, python = len(times["import torch"]), platform.python_version()
    machine = f"{rounds} rounds, Python {python}, {versions}, {os.cpu_count()} cores, {platform.machine()}"
    lines = [
        "# Results",
        "",
        f"Written by `python -m benchmarks`: {machine}.",
        "",
        "Two ranks of torchvision's resnet18 (122 tensors, 40 different), whole processes, files in the page cache.",
        "",
        "| command | median wall s | min | max |",
        "|---|---|---|---|",
        *(f"| `{name}` | {median[name]:.3f} | {min(found):.3f} | {max(found):.3f} |" for name, found in times.items()),
        "",
        "| ratio | measured | at most | |",
        "|---|---|---|---|",
    ]
    met = True
    for command, against, bar in BARS:
        ratio = median[command] / median[against]
        met &= ratio <= bar
        lines.append(f"| `{command}` / `{against}` | {ratio:.3f} | {bar} | {'met' if ratio <= bar else 'MISSED'} |")
    more = median["syncheck --help"] - median["python -c pass"]
    met &= more <= 0.1
    lines.append(
        f"| `syncheck --help` - `python -c pass`, s | {more:.3f} | 0.1 | {'met' if more <= 0.1 else 'MISSED'} |"
    )
    return "\n".join(lines) + "\n", met


def main() -> int:
    """Measure, print, write RESULTS.md; return 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each command (default: 9)")
    text, met = results(measure(parser.parse_args().rounds))
    print(text)
    (HERE / "RESULTS.md").write_text(text, encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
