"""Search each target with atheris in its own process, and print a table of the results.

`python -m fuzz diff` compares random pairs of models instead (fuzz/diff.py).
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from fuzz.targets import TARGETS, Target

# Limits of libFuzzer: seconds per input, and MiB of the whole process.
_TIMEOUT, _MEMORY = 60, 2048
_STARTED = re.compile(r"^#\d+\s+INITED cov: (\d+)", re.MULTILINE)
_COVERAGE = re.compile(r"^#\d+\s+\w+\s+cov: (\d+)", re.MULTILINE)
_EXECUTED = re.compile(r"^stat::number_of_executed_units:\s*(\d+)", re.MULTILINE)
_ROW = "{:<12} {:>8} {:>11} {:>9} {:>13} {:>9}  {}"
_ROOT = Path(__file__).resolve().parents[1]
_WORDS = _ROOT / "fuzz" / "words"


class Result(NamedTuple):
    """The result for one target, as printed. covered: edges of syncheck. stopped: the reason for an early end."""

    target: str
    seconds: int
    executions: int
    covered: int
    new_coverage: int
    findings: int
    stopped: str


def main() -> int:
    """Parse the options, fuzz and print. Returns 0 for no finding, 1 for findings, 2 without atheris."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=int, default=60, metavar="N", help="for each target (default: 60)")
    parser.add_argument("--runs", type=int, default=-1, metavar="N", help="maximum for each target (default: no limit)")
    parser.add_argument(
        "--targets", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="NAME", help=" ".join(TARGETS)
    )
    parser.add_argument("--seed", type=int, help="random seed (default: a random one, which is printed)")
    parser.add_argument("--findings", type=Path, metavar="FOLDER", help="for failing inputs (default: a new folder)")
    parser.add_argument("--corpus", type=Path, metavar="FOLDER", help="keep new inputs here, to continue in later runs")
    options = parser.parse_args()
    try:
        import atheris  # noqa: F401 - used by the processes of `fuzz.search`
    except ImportError:
        print(
            "fuzz: needs atheris, which has wheels for CPython up to 3.13 on Linux x86_64: pip install -e '.[fuzz]'",
            file=sys.stderr,
        )
        return 2
    seed = random.randrange(1, 1 << 31) if options.seed is None else options.seed
    findings: Path = options.findings or Path(tempfile.mkdtemp(prefix="syncheck-findings-"))
    findings.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, findings in {findings}")
    print(_ROW.format("target", "seconds", "executions", "covered", "new coverage", "findings", ""), flush=True)
    failed = False
    for name in options.targets:
        with tempfile.TemporaryDirectory(prefix="syncheck-corpus-") as fresh:
            corpus = (options.corpus or Path(fresh)) / name
            result = fuzz(TARGETS[name], options.seconds, options.runs, seed, findings.resolve(), corpus)
        print(_ROW.format(*result), flush=True)
        for text in sorted(findings.glob(f"{name}-*.txt")):
            print(f"  {text.stem}: {text.read_text(encoding='utf-8')[:300].strip()}", flush=True)
        failed = failed or bool(result.findings or result.stopped)
    return int(failed)


def fuzz(target: Target, seconds: int, runs: int, seed: int, findings: Path, corpus: Path) -> Result:
    """Search one target. runs: maximum number of executions, or -1. corpus: a folder; seeds are added to it.

    With a seed, and a number of runs that is reached in time, each search has the same inputs.
    """
    corpus.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(target.seeds()):
        (corpus / f"seed-{i}").write_bytes(data)
    memory = "/dev/shm"  # each input is written to a file, which is faster in memory
    earlier = set(findings.iterdir())
    with tempfile.TemporaryDirectory(dir=memory if os.path.isdir(memory) else None) as scratch:
        words = Path(scratch, "words")
        words.write_bytes(b"".join((_WORDS / f"{name}.dict").read_bytes() for name in target.words))
        copies = Path(scratch, "copies")
        copies.mkdir()
        command = [
            sys.executable, "-m", "fuzz.search", target.name, str(findings), str(copies), f"-max_total_time={seconds}",
            f"-seed={seed}", f"-runs={runs}", f"-max_len={target.most}", f"-dict={words}", f"-timeout={_TIMEOUT}",
            f"-rss_limit_mb={_MEMORY}", f"-artifact_prefix={findings}/{target.name}-", "-print_final_stats=1",
            f"-report_slow_units={_TIMEOUT}", str(corpus),
        ]  # fmt: skip
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            check=False, timeout=seconds + 10 * _TIMEOUT, env=os.environ | {"PYTHONHASHSEED": "0"},
        )  # fmt: skip
    elapsed = round(time.monotonic() - began)
    started, executed = _STARTED.search(done.stdout), _EXECUTED.search(done.stdout)
    stopped = ""
    if done.returncode or executed is None or started is None:
        (findings / f"{target.name}.log").write_text(done.stdout)
        stopped = f"exit code {done.returncode}, see {target.name}.log"
    covered = max(map(int, _COVERAGE.findall(done.stdout)), default=0)
    new = covered - int(started[1]) if started else 0
    failing = [path for path in set(findings.iterdir()) - earlier if path.suffix not in (".txt", ".log")]
    return Result(target.name, elapsed, int(executed[1]) if executed else 0, covered, new, len(failing), stopped)


if __name__ == "__main__":
    if sys.argv[1:2] == ["diff"]:
        from fuzz import diff

        sys.exit(diff.main(sys.argv[2:]))
    sys.exit(main())
