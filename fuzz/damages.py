"""Damage checkpoints of every format at random, and judge syncheck's answers: `python -m fuzz.damages`.

Each damaged checkpoint is compared with its intact twin. The expected answer is derived from the data that
torch and safetensors read from the same bytes. Prints a table of outcomes; exit code 1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from fuzz.guard import preload
from fuzz.judge import RANKS, Verdict, compare_guarded, judge_comparison
from fuzz.mutations import KINDS, damage_checkpoint, damaged_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from fuzz.checkpoints import Subject

DAMAGES = 1_000
HANG = 60.0  # seconds of real time; the guard limits processor time
OUTCOMES = ("out of sync", "exit 2", "undecided", "in sync", "crash")
# Every n-th comparison is repeated in a new process of the command line.
_COMMAND_LINE_EVERY = 25
_ROOT = Path(__file__).resolve().parents[1]
_ADDRESS_SPACE = 3 << 30
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Trial:
    """One damage and the verdict on syncheck's answer. labels: of the damaged fields."""

    seed: int
    number: int
    format: str
    kind: str
    labels: set[str]
    verdict: Verdict
    seconds: float
    memory: int

    def __str__(self) -> str:
        """Return the options that repeat this trial, and a description."""
        labels = ", ".join(sorted(self.labels)[:4])
        return f"--seed {self.seed} --only {self.number} ({self.format}, {self.kind}: {labels}; {self.verdict.outcome})"


class Worker:
    """A process with limited memory, whose crash, hang or exit ends only this process.

    It is started for the first call, and again after it died. function: of all calls, `judge.compare_guarded`, which
    runs syncheck, or `oracle.load`, which runs the libraries.
    """

    def __init__(self, function: Callable[..., dict[str, Any]]) -> None:
        self.function = function
        self.process: Any = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill the process if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None

    def send(self, *arguments: str) -> None:
        """Start a call."""
        if self.process is None:
            self.pipe, theirs = _CONTEXT.Pipe()
            self.process = _CONTEXT.Process(target=_serve, args=(theirs, self.function), daemon=True)
            self.process.start()
            theirs.close()
            self.pipe.recv()  # imports are complete
        self.pipe.send(arguments)

    def receive(self, seconds: float) -> dict[str, Any]:
        """Return the result of the call. If the process ended, `died` is `hang` or its exit code."""
        if not self.pipe.poll(seconds):
            self.stop()
            return {"died": "hang"}
        try:
            result: dict[str, Any] = self.pipe.recv()
        except EOFError:
            self.process.join()
            result = {"died": f"exit {self.process.exitcode}"}
            self.stop()
        return result


def _serve(connection: Connection[Any, Any], function: Callable[..., dict[str, Any]]) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)  # output of the libraries
    os.dup2(null, 2)
    if function is compare_guarded:
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
        preload()
    connection.send(None)
    while True:
        connection.send(function(*connection.recv()))


def run_trials(
    seed: int, numbers: Sequence[int], folder: Path, formats: Sequence[str] = (), keep: Path | None = None
) -> Iterator[Trial]:
    """Run trials, evenly distributed over kinds and formats (default: all).

    Each number has its own random stream, so any trial can be repeated alone. folder: a working folder. keep: a
    folder for checkpoints with a wrong answer.
    """
    from fuzz.checkpoints import MAKERS, make_subject  # imports torch, for which Worker processes lack memory
    from fuzz.oracle import load

    cells = [(name, kind) for kind in KINDS for name in formats or MAKERS]
    pairs: dict[str, _Pair] = {}
    with Worker(compare_guarded) as syncheck, Worker(load) as oracle:
        for number in numbers:
            name, kind = cells[number % len(cells)]
            if name not in pairs:
                pairs[name] = _Pair(make_subject(name), folder / name, oracle)
            trial = pairs[name].run(seed, number, kind, syncheck, oracle)
            if keep is not None and trial.verdict.faults:
                shutil.copytree(folder / name, keep / f"{seed}_{number}", symlinks=True, dirs_exist_ok=True)
            yield trial


class _Pair:
    """A checkpoint on disk: intact as rank 0, and damaged again and again as rank 1."""

    def __init__(self, subject: Subject, folder: Path, oracle: Worker) -> None:
        self.subject, self.folder = subject, folder
        _write(folder / RANKS[0], subject.twin)
        _write(folder / RANKS[1], subject.files)
        single = "" if subject.is_folder else next(iter(subject.files))
        self.left, self.right = (str(folder / rank / single) for rank in RANKS)
        oracle.send(self.right, subject.format)
        self.intact = oracle.receive(HANG)
        assert "tensors" in self.intact, self.intact

    def run(self, seed: int, number: int, kind: str, syncheck: Worker, oracle: Worker) -> Trial:
        """Damage rank 1 and judge the comparison."""
        subject = self.subject
        files = damage_checkpoint(Random(f"{seed} {number}"), kind, subject.files, subject.other)
        labels = damaged_labels(subject.files, files)
        _write(self.folder / RANKS[1], files)
        syncheck.send(str(self.folder), self.left, self.right)
        oracle.send(self.right, subject.format)
        answer, damaged = syncheck.receive(HANG), oracle.receive(HANG)
        verdict = judge_comparison(subject.format, labels, answer, self.intact, damaged)
        if number % _COMMAND_LINE_EVERY == 0 and "died" not in answer:
            verdict.faults += _command_line_faults(self.left, self.right, answer)
        spent = answer.get("seconds", HANG), answer.get("memory", 0)
        return Trial(seed, number, subject.format, kind, labels, verdict, *spent)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def _command_line_faults(left: str, right: str, answer: dict[str, Any]) -> list[str]:
    """Compare the answer with that of the real command line in a new process."""
    command = [sys.executable, "-m", "syncheck", "compare", left, right, "--format", "json", "--no-config", "-n", "0"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=HANG, check=False)
    if (done.returncode, done.stderr) != (answer["code"], answer["err"]):
        return [f"the command line: exit code {done.returncode}, {done.stderr[-300:]!r}"]
    same = _document(done.stdout) == _document(answer["out"])
    return [] if same else ["the command line prints another document"]


def _document(text: str) -> Any:
    """Return the parts of a JSON document that are equal in each run."""
    document = json.loads(text)
    if not isinstance(document, dict):
        return document
    return {key: document[key] for key in ("verdict", "groups", "unreadable")}


def summarize(trials: list[Trial]) -> str:
    """Return a table of outcomes for each format and kind, and every wrong answer."""
    lines = ["{:<14}".format("") + "".join(f"{outcome:>13}" for outcome in OUTCOMES)]
    for key in ("format", "kind"):
        counts = Counter((getattr(trial, key), trial.verdict.outcome) for trial in trials)
        names = dict.fromkeys(getattr(trial, key) for trial in trials)
        lines += [f"{name:<14}" + "".join(f"{counts[name, outcome]:>13}" for outcome in OUTCOMES) for name in names]
        lines.append("")
    fields = Counter(label for trial in trials if trial.verdict.outcome == "in sync" for label in trial.labels)
    lines.append("in sync after damage to: " + ", ".join(f"{name} {count}" for name, count in fields.most_common()))
    slowest, largest = (max(trials, key=lambda trial: getattr(trial, key)) for key in ("seconds", "memory"))
    lines.append(f"slowest: {slowest.seconds:.2f} s, {slowest}\nmost memory: {largest.memory >> 20} MiB, {largest}")
    wrong = [trial for trial in trials if trial.verdict.faults]
    lines += [f"WRONG {trial}: {'; '.join(trial.verdict.faults)[:600]}" for trial in wrong]
    return "\n".join([*lines, f"{len(wrong)} wrong answers to {len(trials)} damages"])


def main() -> int:
    """Parse the options, run the trials and print the summary."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.damages", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("-n", type=int, default=DAMAGES, metavar="N", help="number of damages (default: %(default)s)")
    parser.add_argument("--formats", nargs="*", default=(), help="formats to damage (default: all)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="repeat one trial of this seed")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep checkpoints with a wrong answer in this folder")
    options = parser.parse_args()
    numbers = range(options.n) if options.only is None else [options.only]
    with tempfile.TemporaryDirectory() as folder:
        trials = list(run_trials(options.seed, numbers, Path(folder), options.formats, options.out))
    print(summarize(trials))
    return int(any(trial.verdict.faults for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
