"""Runs a case in separate processes, and reads its metrics."""

from __future__ import annotations

import json
import os
import re
import shlex
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
    from collections.abc import Sequence

    from train.bench.cases import Case

Record = dict[str, Any]

# Runs its arguments at the same time, and exits with the code of the first failed argument.
PARALLEL = 'for words; do eval "$words" & pids+=" $!"; done; for pid in $pids; do wait $pid || exit; done'
# Environment variable that all processes of a run inherit.
MARK = "TRAIN_BENCH_RUN"


@dataclass(frozen=True)
class Timing:
    """A run of a case, with the names of the JSON document.

    start_s: seconds from the command to the first step. epoch_times_s: seconds of training per included epoch; the
    first epoch (warm-up) and a last epoch cut short by --max-steps are excluded unless no other epoch exists. steps,
    samples: of an included epoch. test_accuracy: at the end. peak_memory_bytes: maximum over ranks, on the GPU if there
    is a GPU. total_s: seconds from the command to its end. gpu_utilization: mean percent of each rank's GPU in the
    included epochs; empty without GPUs.
    """

    start_s: float
    epoch_times_s: tuple[float, ...]
    steps: int
    samples: int
    test_accuracy: float
    peak_memory_bytes: int
    total_s: float = 0.0
    gpu_utilization: tuple[float, ...] = ()

    @property
    def epoch_time_s(self) -> float:
        """Median seconds of an epoch's training."""
        return statistics.median(self.epoch_times_s)

    @property
    def samples_per_second(self) -> float:
        """Samples per second, over all ranks."""
        return self.samples / self.epoch_time_s


@dataclass
class Row:
    """All runs of a case. problem: a line with the reason if the case was not run or not repeated.

    model, data: of its last run.
    """

    case: Case
    processes: int
    model: str = ""
    data: str = ""
    timings: list[Timing] = field(default_factory=list)
    refused: bool = False
    problem: str = ""

    def compute_median(self, name: str) -> float:
        """Return the median over the runs of a number of `Timing`."""
        return float(statistics.median(getattr(timing, name) for timing in self.timings))


def run_case(row: Row, commands: Sequence[Sequence[str]], folder: Path, threads: int, timeout: float) -> None:
    """Run the commands of a case at the same time, and add the timing to the row, or the reason of a failure.

    folder: an empty folder for logs. threads: CPU threads per process. timeout: time limit in seconds, after which all
    processes of the run are killed.
    """
    # Identifies all processes of this run.
    mark = str(uuid.uuid4())
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR", MARK: mark}
    options = ("--log-dir", str(folder), "--progress", "none")
    began = time.time()
    process = subprocess.Popen(
        ["bash", "-c", PARALLEL, "bash", *(shlex.join([*command, *options]) for command in commands)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # the processes are killed as a group
    )
    try:
        _, errors = process.communicate(timeout=timeout)
        total = time.time() - began
    except subprocess.TimeoutExpired:
        row.problem = f"not finished after {timeout:g} s"
        return
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        kill_marked_processes(mark)
        process.communicate()
    if process.returncode:
        # torchrun exits with code 1 for any failure, and its report contains the exit code of the processes. A case
        # with earlier timings was not refused.
        is_refusal = process.returncode == 2 or re.search(r"exitcode\s*: 2\b", errors) is not None
        row.refused = is_refusal and not row.timings
        lines = [line for line in errors.splitlines() if line.startswith("run.py: ")] or errors.splitlines()
        row.problem = lines[0].removeprefix("run.py: error: ") if lines else f"exited with code {process.returncode}"
        return
    try:
        (path,) = folder.glob("*/metrics.jsonl")
        records = [json.loads(line) for line in path.read_text().splitlines()]
        row.timings.append(read_timing(records, began, total))
        row.model, row.data = records[0]["model"], records[0]["data"]
    except (OSError, ValueError, LookupError, TypeError) as error:  # for example after a full disk
        row.problem = f"its metrics are incomplete: {error}"


def kill_marked_processes(mark: str) -> None:
    """Kill the remaining processes of a run: torchrun starts processes in new sessions, which killpg does not reach."""
    entry = f"{MARK}={mark}".encode()
    for _ in range(1000):  # 10 s
        remaining = []
        for path in Path("/proc").glob("[0-9]*/environ"):  # empty on systems without /proc
            with suppress(OSError):
                if entry in path.read_bytes().split(b"\0"):
                    remaining.append(int(path.parent.name))
        if not remaining:
            return
        for pid in remaining:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # A killed process keeps its environment for a moment.
        time.sleep(0.01)


def read_timing(records: Sequence[Record], began: float, total: float = 0.0) -> Timing:
    """Compute the timing of a run from its metrics. began: Unix time of the command. total: its seconds."""
    (start,) = [record for record in records if record["event"] == "start"]
    epochs = [record for record in records if record["event"] == "epoch"]
    # Steps of every complete epoch.
    steps = epochs[0]["step"]
    # The first epoch is warm-up, unless it is the only one.
    later = epochs[1:] or epochs
    included = [record for record in later if record["step"] == record["epoch"] * steps]
    if not included:
        steps = later[-1]["step"] % steps
        included = later
    utilization_by_rank = zip(*[record["gpu_utilization_by_rank"] for record in included], strict=False)
    return Timing(
        start_s=start["time"] - began,
        epoch_times_s=tuple([record["epoch_time_s"] for record in included]),
        steps=steps,
        # The epochs of a text count bytes.
        samples=min(start["samples"], steps * start["batch_size"]),
        test_accuracy=epochs[-1]["test_accuracy"],
        peak_memory_bytes=max(record["peak_memory_bytes"] for record in epochs),
        total_s=total,
        gpu_utilization=tuple([statistics.mean(percents) for percents in utilization_by_rank]),
    )
