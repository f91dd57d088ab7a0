"""Measure syncheck against common alternatives, as ratios within one run, and write RESULTS.md.

    python -m benchmarks                       # all benchmarks; exit code 1 if a limit is missed
    python -m benchmarks compare --rounds 3    # a single benchmark, quicker and noisier

Times are medians of the wall time of whole processes, unless a section states otherwise. All benchmarks take an hour
and a half, including an hour for the rank tests, and 11 GiB of disk in `TMPDIR`. The page cache must hold the same
amount; otherwise, the benchmarks measure the disk.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

from benchmarks import (
    compare,
    conversion,
    diff,
    digest,
    distributed_tests,
    equivalence,
    large,
    last_element,
    live,
    many_ranks,
    many_small,
    memory,
    parity,
    rank_tests,
    scale,
    sparse,
    watch,
)
from benchmarks.trials import command as trials

RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
BENCHMARKS = {
    "compare": compare,
    "many_ranks": many_ranks,
    "large": large,
    "last_element": last_element,
    "memory": memory,
    "many_small": many_small,
    "sparse": sparse,
    "diff": diff,
    "conversion": conversion,
    "distributed_tests": distributed_tests,
    "rank_tests": rank_tests,
    "digest": digest,
    "live": live,
    "scale": scale,
    "equivalence": equivalence,
    "parity": parity,
    "watch": watch,
}


def machine(rounds: int) -> str:
    """Return the versions and the machine of a measurement on one line."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("syncheck", "numpy", "torch"))
    python = platform.python_version()
    times = f"{rounds} round{'s' * (rounds > 1)}"
    return f"{times}, Python {python}, {versions}, {os.cpu_count()} cores, {platform.machine()}."


def main() -> int:
    """Measure, print and write RESULTS.md, with old sections of other benchmarks; return 1 if a limit is missed."""
    if sys.argv[1:2] == ["trials"]:
        # It measures diagnoses instead of times, and has options of its own.
        return trials.main(sys.argv[2:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--rounds", type=int, help="timed runs of each command")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - BENCHMARKS.keys():
        parser.error(f"no benchmark {', '.join(sorted(unknown))}")
    old = RESULTS.read_text(encoding="utf-8").split("\n## ")[1:] if RESULTS.exists() else []
    sections = {section.partition("\n")[0]: section for section in old}
    met = True
    for name in arguments.names or BENCHMARKS:
        rounds = arguments.rounds or BENCHMARKS[name].ROUNDS
        text, all_met = BENCHMARKS[name].run(rounds)
        sections[name] = f"{name}\n\n{machine(rounds)}\n\n{text}"
        print(sections[name])
        met &= all_met
    ordered = "".join(f"\n## {sections[name]}" for name in BENCHMARKS if name in sections)
    RESULTS.write_text(f"# Results\n\nWritten by `python -m benchmarks`.\n{ordered}", encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
