"""Run the targets one after the other, each in a process of its own, and print a table of what came of it."""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fuzz.targets import TARGETS, Target

# libFuzzer's: seconds without an answer, and MiB of the whole process, after which it stops.
_TIMEOUT, _MEMORY = 60, 2048
_STARTED = re.compile(r"^#\d+\s+INITED cov: (\d+)", re.MULTILINE)
_COVERAGE = re.compile(r"^#\d+\s+\w+\s+cov: (\d+)", re.MULTILINE)
_EXECUTED = re.compile(r"^stat::number_of_executed_units:\s*(\d+)", re.MULTILINE)
_ROW = "{:<12} {:>8} {:>11} {:>9} {:>13} {:>9}"


@dataclass(frozen=True)
class Outcome:
    """What a run of one target did. covered: edges by the seeds, and in the end. stopped: why before its time."""

    seconds: float
    executions: int
    covered: tuple[int, int]
    findings: int
    stopped: str = ""


def main() -> int:
    """Parse, fuzz and print. Returns 0 for no finding, 1 for some, 2 where it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, metavar="N", help="for each target (default: 60)")
    parser.add_argument("--runs", type=int, default=-1, metavar="N", help="for each at most (default: any number)")
    parser.add_argument(
        "--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="NAME", help=" ".join(TARGETS)
    )
    parser.add_argument("--seed", type=int, help="of the random numbers; printed where none is given")
    parser.add_argument("--findings", type=Path, metavar="FOLDER", help="where inputs go (default: a new folder)")
    parser.add_argument("--corpus", type=Path, metavar="FOLDER", help="kept between runs, which go on from there")
    options = parser.parse_args()
    if not installed("atheris"):
        print(
            "fuzz: needs atheris, which has wheels for CPython up to 3.13 on Linux x86_64: pip install -e '.[fuzz]'",
            file=sys.stderr,
        )
        return 2
    seed = random.randrange(1, 1 << 31) if options.seed is None else options.seed
    findings: Path = options.findings or Path(tempfile.mkdtemp(prefix="syncheck-findings-"))
    findings.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, findings in {findings}")
    print(_ROW.format("target", "seconds", "executions", "covered", "new coverage", "findings"), flush=True)
    found = 0
    for name in options.targets:
        with tempfile.TemporaryDirectory(prefix="syncheck-corpus-") as fresh:
            corpus = (options.corpus or Path(fresh)) / name
            outcome = fuzz(TARGETS[name], (options.seconds, options.runs), seed, findings.resolve(), corpus)
        before, after = outcome.covered
        cells = (name, f"{outcome.seconds:.0f}", outcome.executions, after, after - before, outcome.findings)
        print(_ROW.format(*cells) + (f"  {outcome.stopped}" if outcome.stopped else ""), flush=True)
        found += outcome.findings + bool(outcome.stopped)
    return 1 if found else 0


def installed(name: str) -> bool:
    """Whether a module is there to be imported."""
    try:
        return find_spec(name) is not None
    except ValueError:  # it was imported, and taken away
        return False


def fuzz(target: Target, most: tuple[int, int], seed: int, findings: Path, corpus: Path) -> Outcome:
    """Run one target. most: seconds, and executions or -1. corpus: a folder, which the seeds are put into.

    With a seed and a number of executions that is reached in the time every run is the same.
    """
    seconds, runs = most
    corpus.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(target.seeds()):
        (corpus / f"seed-{i}").write_bytes(data)
    memory = "/dev/shm"  # a file system in memory, where there is one: each input is written
    earlier = set(findings.iterdir())
    with tempfile.TemporaryDirectory(dir=memory if os.path.isdir(memory) else None) as scratch:
        words = Path(scratch, "words")
        words.write_text("".join(f'"{quoted(word)}"\n' for word in target.words))
        copies = Path(scratch, "copies")
        copies.mkdir()
        command = [
            sys.executable, "-m", "fuzz.child", target.name, str(findings), str(copies), f"-max_total_time={seconds}",
            f"-seed={seed}", f"-runs={runs}", f"-max_len={target.most}", f"-dict={words}", f"-timeout={_TIMEOUT}",
            f"-rss_limit_mb={_MEMORY}", f"-artifact_prefix={findings}/{target.name}-", "-print_final_stats=1",
            f"-report_slow_units={_TIMEOUT}", str(corpus),
        ]  # fmt: skip
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=Path(__file__).resolve().parents[1], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", check=False, timeout=seconds + 10 * _TIMEOUT,
            env=os.environ | {"PYTHONHASHSEED": "0"},
        )  # fmt: skip
    elapsed = time.monotonic() - began
    covered = [int(number) for number in _COVERAGE.findall(done.stdout)]
    start, executed = _STARTED.search(done.stdout), _EXECUTED.search(done.stdout)
    stopped = ""
    if done.returncode or executed is None or start is None:
        (findings / f"{target.name}.log").write_text(done.stdout)
        stopped = f"exit code {done.returncode}, see {target.name}.log"
    new = {path for path in set(findings.iterdir()) - earlier if path.suffix not in (".txt", ".log")}
    return Outcome(
        elapsed,
        int(executed[1]) if executed else 0,
        (int(start[1]) if start else 0, max(covered, default=0)),
        len(new),
        stopped,
    )


def quoted(word: bytes) -> str:
    r"""Write a word as libFuzzer's dictionaries have it: \xNN for what is no plain character."""
    return "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\x{b:02x}" for b in word)


if __name__ == "__main__":
    sys.exit(main())
