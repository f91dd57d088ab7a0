"""Compare random pairs of models with `syncheck diff`, and judge each exit code: `python -m fuzz diff`.

A mutation of one of two equal models makes each pair, so the right exit codes are known. Prints a table of mutations
and exit codes. Exit code 1 if a pair was wrongly in sync, crashed or hung; other wrong codes are listed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import shlex
import shutil
import tempfile
import threading
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# At the top, so that a new process imports torch before the time limit of its first pair begins.
from fuzz.damages import Worker
from fuzz.expected_codes import list_right_codes
from fuzz.pairs import KINDS, make_pair
from syncheck import cli
from syncheck.options import DiffOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from fuzz.pairs import Pair

PAIRS = 5_000
HANG = 30.0  # seconds for one pair, including the time to make it
# Memory for a comparison, in addition to the libraries that make the pair.
_ADDRESS_SPACE = 2 << 30
_COLUMNS = ("pairs", "exit 0", "exit 1", "exit 2", "wrong 0", "wrong 1/2", "crash", "hang")
_ROW = "{:<30} {:>7} {:>7} {:>7} {:>7} {:>9} {:>11} {:>7} {:>6}"
_LONGEST_TEXT = 4_000
_MEMORY = "/dev/shm"
_limited: list[bool] = []


@dataclass(frozen=True)
class Trial:
    """The answer for one pair.

    kind: the mutation.
    facts: the record of the pair, in JSON types.
    code: the exit code, or None if the process died or hung.
    right: the right exit codes.
    died: `hang`, or the exit of the process.
    text: the end of stderr.
    seconds: the time of the comparison.
    """

    seed: int
    number: int
    kind: str
    facts: dict[str, Any]
    code: int | None
    right: tuple[int, ...]
    died: str
    text: str
    seconds: float

    @property
    def fault(self) -> str:
        """The column of a wrong answer; empty for a right answer."""
        if self.died == "hang":
            return "hang"
        if self.died or self.code not in (0, 1, 2):
            return "crash"
        if self.code in self.right:
            return ""
        return "wrong 0" if self.code == 0 else "wrong 1/2"

    @property
    def group(self) -> str:
        """The description of a wrong answer, equal for answers that probably have one cause."""
        facts = self.facts
        right = " or ".join([str(code) for code in self.right])
        circumstances = f"names {facts.get('relation')}, {facts.get('style')}; {facts.get('options') or 'no option'}"
        answer = self.died or f"exit {self.code}"
        return f"{self.fault}: {self.kind} ({circumstances}): {answer}, right: {right}"


def answer_pair(seed: str, number: str, folder: str) -> dict[str, Any]:
    """Make a pair in an empty folder, compare it, and return exit code, stderr and time."""
    with warnings.catch_warnings():
        # torch.distributed.checkpoint warns about the missing process group.
        warnings.simplefilter("ignore")
        pair = make_pair(int(seed), int(number), Path(folder), flags=list_flags())
    record = {"kind": pair.kind, "facts": describe_pair(pair), "right": sorted(list_right_codes(pair))}
    # Written before the comparison, which may end the process.
    Path(folder, "pair.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    _limit_memory()
    began = time.perf_counter()
    code, text = _run(pair.arguments)
    return {"code": code, "text": text[-_LONGEST_TEXT:], "seconds": time.perf_counter() - began}


def describe_pair(pair: Pair) -> dict[str, Any]:
    """Return the record of a pair in JSON types, and its options as one text."""
    facts = asdict(pair)
    # The sets of codes and flags are in the options and the code, and JSON has no sets.
    del facts["effect"], facts["options"]
    options = pair.options.list_arguments(f"({pair.options.map})")
    return facts | {"options": " ".join(options)}


def _run(arguments: Sequence[str]) -> tuple[int, str]:
    """Run the command line in this process; return its exit code and stderr."""
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            code = cli.main(list(arguments))
        except SystemExit as stopped:  # argparse
            # Usage errors of argparse.
            code = int(str(stopped.code))
    return code, errors.getvalue()


def list_flags() -> frozenset[str]:
    """Return the flags of this version that a pair may have."""
    flags = {"--only-params", "--subset"}
    if "accept_inferred" in DiffOptions.__dataclass_fields__:
        flags.add("--accept-inferred")
    return frozenset(flags)


def _limit_memory() -> None:
    """Limit the memory of this process, once."""
    if _limited:
        return
    _limited.append(True)
    status = Path("/proc/self/statm")
    if status.exists():
        pages = int(status.read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + _ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def run_pairs(seed: int, numbers: Iterable[int], findings: Path, jobs: int = 1) -> list[Trial]:
    """Answer the pairs in `jobs` processes, and keep the files of each wrong answer in a folder below `findings`."""
    trials: list[Trial] = []
    waiting = iter(numbers)
    lock = threading.Lock()
    threads = []
    # A thread for each process, which waits for its answers.
    for _ in range(jobs):
        threads.append(threading.Thread(target=_serve, args=(seed, waiting, lock, findings, trials)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return sorted(trials, key=lambda trial: trial.number)


def _serve(seed: int, waiting: Iterator[int], lock: threading.Lock, findings: Path, trials: list[Trial]) -> None:
    """Answer pairs in one process until none is waiting."""
    # The files are small, and writing them to memory is faster.
    scratch = None
    if os.path.isdir(_MEMORY):
        scratch = _MEMORY
    with Worker(answer_pair) as worker:
        while True:
            with lock:
                number = next(waiting, None)
            if number is None:
                return
            with tempfile.TemporaryDirectory(dir=scratch, prefix="pair-") as name:
                folder = Path(name)
                trial = _try(seed, number, folder, worker)
                trials.append(trial)
                if trial.fault:
                    keep(trial, folder, findings)


def _try(seed: int, number: int, folder: Path, worker: Worker) -> Trial:
    """Answer one pair, and report a process that hangs or dies."""
    worker.send(str(seed), str(number), str(folder))
    answer = worker.receive(HANG)
    record: dict[str, Any] = {"kind": "unknown", "facts": {}, "right": []}
    path = folder / "pair.json"
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
    return Trial(
        seed,
        number,
        record["kind"],
        record["facts"],
        answer.get("code"),
        tuple(record["right"]),
        answer.get("died", ""),
        answer.get("text", ""),
        answer.get("seconds", HANG),
    )


def keep(trial: Trial, folder: Path, findings: Path) -> None:
    """Copy the files of a pair with a wrong answer, and describe how to repeat it."""
    target = findings / f"{trial.seed}_{trial.number}"
    shutil.copytree(folder, target, dirs_exist_ok=True)
    command = shlex.join(["syncheck", *trial.facts.get("arguments", ())])
    # The pair was compared in a folder that is removed.
    command = command.replace(str(folder), str(target))
    lines = [
        trial.group,
        f"repeat: python -m fuzz diff --seed {trial.seed} --only {trial.number}",
        f"command: {command}",
        json.dumps(trial.facts, indent=1),
        trial.text,
    ]
    (target / "finding.txt").write_text("\n".join(lines), encoding="utf-8", errors="backslashreplace")


def summarize(trials: Sequence[Trial], kinds: Sequence[str]) -> str:
    """Return a table of mutations and exit codes, and every group of wrong answers with a pair to repeat."""
    by_kind: dict[str, list[Trial]] = {}
    for trial in trials:
        by_kind.setdefault(trial.kind, []).append(trial)
    lines = [_ROW.format("mutation", *_COLUMNS)]
    for kind in (*kinds, "unknown"):
        trials_of_kind = by_kind.get(kind, [])
        if trials_of_kind:
            lines.append(_format_row(kind, trials_of_kind))
    lines.append(_format_row("all", trials))
    groups: dict[str, list[int]] = {}
    for trial in trials:
        if trial.fault:
            groups.setdefault(trial.group, []).append(trial.number)
    # The most frequent groups first.
    frequent = sorted(groups, key=lambda name: -len(groups[name]))
    lines += [f"{len(groups[group]):>4} x {group}; --only {groups[group][0]}" for group in frequent]
    slowest = max(trials, key=lambda trial: trial.seconds)
    lines.append(f"slowest: {slowest.seconds:.2f} s, --only {slowest.number}")
    return "\n".join(lines)


def _format_row(name: str, trials: Sequence[Trial]) -> str:
    """Return one row of the table."""
    counts: Counter[str] = Counter()
    for trial in trials:
        counts.update(("pairs", f"exit {trial.code}", trial.fault))
    return _ROW.format(name, *[counts[column] for column in _COLUMNS])


def main(arguments: Sequence[str]) -> int:
    """Parse the options, run the pairs and print the table. Returns 1 for a wrong 0, a crash or a hang."""
    parser = argparse.ArgumentParser(prog="python -m fuzz diff", description=__doc__, allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help="number of pairs (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="random seed (default: a random one, which is printed)")
    parser.add_argument("--only", type=int, metavar="I", help="repeat one pair of this seed")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--findings", type=Path, metavar="FOLDER", help="for wrong answers (default: a new folder)")
    options = parser.parse_args(arguments)
    seed = options.seed
    if seed is None:
        seed = random.randrange(1, 1 << 31)
    findings: Path = options.findings or Path(tempfile.mkdtemp(prefix="syncheck-findings-"))
    findings.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, findings in {findings}", flush=True)
    numbers = range(options.pairs) if options.only is None else [options.only]
    began = time.monotonic()
    trials = run_pairs(seed, numbers, findings, options.jobs)
    print(summarize(trials, KINDS))
    print(f"{len(trials)} pairs in {time.monotonic() - began:.0f} s")
    return int(any(trial.fault in ("wrong 0", "crash", "hang") for trial in trials))
