"""Run one case in processes of its own, and read what it has recorded."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from train.bench.cases import Case

Record = dict[str, Any]

MARK = "TRAIN_BENCH_RUN"  # environment variable that all processes of a run inherit


@dataclass(frozen=True)
class Timing:
    """One run of one case.

    start_time: seconds from the command until the run was ready to train. epochs: seconds of training in each epoch
    that counts: not the first, which warms caches up, nor a last one that --max-steps cut short, where there are
    others. steps, samples: of one such epoch. accuracy: on the test set, at the end. memory: bytes, the most that any
    rank held, of the GPU where there is one.
    """

    start_time: float
    epochs: tuple[float, ...]
    steps: int
    samples: int
    accuracy: float
    memory: int

    @property
    def epoch_time(self) -> float:
        """Median seconds of an epoch's training."""
        return statistics.median(self.epochs)

    @property
    def throughput(self) -> float:
        """Samples per second, over all ranks."""
        return self.samples / self.epoch_time


@dataclass
class Row:
    """All runs of one case. problem: why there are none, or no more, in one line."""

    case: Case
    processes: int
    timings: list[Timing] = field(default_factory=list)
    refused: bool = False
    problem: str = ""

    def middle(self, number: Callable[[Timing], float]) -> float:
        """Take the median of one number over the runs."""
        return statistics.median(map(number, self.timings))


def measure(row: Row, command: Sequence[str], folder: Path, threads: int, timeout: float) -> None:
    """Run a case once more, and add what it recorded to its row, or the reason why there is nothing.

    folder: empty, for the run's logs. threads: of each process. timeout: seconds after which all its processes are
    ended.
    """
    mark = str(uuid.uuid4())  # by which all processes of this run are known
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR", MARK: mark}
    began = time.time()
    process = subprocess.Popen(
        [*command, "--log-dir", str(folder), "--progress", "none"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that all of them can be ended together
    )
    try:
        _, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        row.problem = f"not done after {timeout:g} s"
        return
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        end_marked(mark)
        process.communicate()
    if process.returncode:
        # torchrun ends with 1 whatever its processes end with, and says that in its report. What was measured before
        # was not refused then.
        mistaken = process.returncode == 2 or re.search(r"exitcode\s*: 2\b", errors) is not None
        row.refused = mistaken and not row.timings
        told = [line for line in errors.splitlines() if line.startswith("run.py: ")] or errors.splitlines()
        row.problem = told[0].removeprefix("run.py: error: ") if told else f"ended with code {process.returncode}"
        return
    try:
        (path,) = folder.glob("*/metrics.jsonl")
        row.timings.append(timing([json.loads(line) for line in path.read_text().splitlines()], began))
    except (OSError, ValueError, LookupError, TypeError) as error:  # as where the disk is full
        row.problem = f"its metrics are not complete: {error}"


def end_marked(mark: str) -> None:
    """End what is left of a run: torchrun starts its processes in sessions of their own, out of reach of a killpg."""
    sought = f"{MARK}={mark}".encode()
    for _ in range(1000):  # 10 s
        left = []
        for path in Path("/proc").glob("[0-9]*/environ"):  # where there is no /proc, the group has to do
            with suppress(OSError):
                if sought in path.read_bytes().split(b"\0"):
                    left.append(int(path.parent.name))
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # what is dying has its environment for a moment more


def timing(records: Sequence[Record], began: float) -> Timing:
    """Read one run's metrics. began: unix time of the command."""
    (ready,) = (record for record in records if record["event"] == "start")
    epochs = [record for record in records if record["event"] == "epoch"]
    steps = epochs[0]["step"]  # of every epoch, but for one that was cut short
    later = epochs[1:] or epochs
    whole = [record for record in later if record["step"] == record["epoch"] * steps]
    if not whole:
        steps = later[-1]["step"] % steps
    counted = whole or later
    return Timing(
        start_time=ready["time"] - began,
        epochs=tuple(record["epoch_time_s"] for record in counted),
        steps=steps,
        samples=counted[-1]["samples"],
        accuracy=epochs[-1]["test_accuracy"],
        memory=max(record["peak_memory_bytes"] for record in epochs),
    )
