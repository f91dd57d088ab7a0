"""Runs a case in separate processes, and reads its metrics."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import textwrap
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from train.errors import UserError
from train.methods import METHODS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


Record = dict[str, Any]

# Runs its arguments at the same time, and exits with the code of the first failed argument.
PARALLEL = 'for words; do eval "$words" & pids+=" $!"; done; for pid in $pids; do wait $pid || exit; done'
MARK = "TRAIN_BENCH_RUN"  # environment variable that all processes of a run inherit


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
    mark = str(uuid.uuid4())  # identifies all processes of this run
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
        time.sleep(0.01)  # a killed process keeps its environment for a moment


def read_timing(records: Sequence[Record], began: float, total: float = 0.0) -> Timing:
    """Compute the timing of a run from its metrics. began: Unix time of the command. total: its seconds."""
    (start,) = (record for record in records if record["event"] == "start")
    epochs = [record for record in records if record["event"] == "epoch"]
    steps = epochs[0]["step"]  # of every complete epoch
    later = epochs[1:] or epochs
    complete = [record for record in later if record["step"] == record["epoch"] * steps]
    if not complete:
        steps = later[-1]["step"] % steps
    included = complete or later
    return Timing(
        start["time"] - began,
        tuple(record["epoch_time_s"] for record in included),
        steps,
        min(start["samples"], steps * start["batch_size"]),  # the epochs of a text count bytes
        epochs[-1]["test_accuracy"],
        max(record["peak_memory_bytes"] for record in epochs),
        total,
        tuple(map(statistics.mean, zip(*(r["gpu_utilization_by_rank"] for r in included), strict=False))),
    )


RUN = Path(__file__).resolve().parents[1] / "run.py"

_BY_HAND = ("{run}", "--rank", "{rank}", "--world-size", "{processes}", "--init-method")
_FILE, _TCP = (*_BY_HAND, "file://{folder}/rendezvous"), (*_BY_HAND, "tcp://{address}:{port}")
_NODES = ("--nnodes=2", "--node-rank={node}", "--master-addr={address}", "--master-port={port}")
_TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node={share}")
# The words after `python` by launcher, with the placeholders of `Case.build_commands`. With {rank}, each process has a
# command line of its own. torch.distributed.launch is the deprecated predecessor of torchrun; -W ignore hides its
# warning.
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "python": ("{run}",),
    "spawn": ("{run}", "--spawn", "{processes}"),
    "torchrun": (*_TORCHRUN, "--standalone", "{run}"),
    "launch": ("-W", "ignore", "-m", "torch.distributed.launch", *_TORCHRUN[2:], "--standalone", "{run}"),
    "file": _FILE,
    "tcp": _TCP,
    "nodes": (*_TORCHRUN, *_NODES, "{run}"),
    "nodes-file": _FILE,
    "nodes-tcp": _TCP,
}


@dataclass(frozen=True)
class Case:
    """A row of the table.

    options: options of run.py in addition to --method; they replace the options for all cases. launcher: a key of
    LAUNCHERS. least: minimum number of processes.
    """

    name: str
    method: str
    options: tuple[str, ...] = ()
    launcher: str = "spawn"
    least: int = 2

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return 2 if self.launcher.startswith("nodes") else 1

    def count_processes(self, requested: int) -> int:
        """Return the number of processes of this case, given the value of --processes: equal on all nodes."""
        return 1 if self.launcher == "python" else -(-max(requested, self.least) // self.nodes) * self.nodes

    def build_commands(
        self, requested: int, options: Sequence[str], folder: Path, nodes: Sequence[Node] = ()
    ) -> list[list[str]]:
        """Build the command lines, which run at the same time.

        requested: value of --processes. options: for all cases. folder: of this run. nodes: two, if the case has two.
        """
        words, processes = LAUNCHERS[self.launcher], self.count_processes(requested)
        share = processes // self.nodes
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address, port = probe.getsockname()
        if self.nodes > 1:
            address = nodes[0].address
        commands = []
        for rank in range(0, processes, 1 if "{rank}" in words else share):
            values = {"run": RUN, "rank": rank, "processes": processes, "node": rank // share, "share": share}
            values |= {"folder": folder, "address": address, "port": port}
            prefix = nodes[rank // share].prefix if self.nodes > 1 else []
            start = [*prefix, sys.executable, *(word.format(**values) for word in words)]
            replicas = ["--replicas", str(requested)] if self.method == "dp" else []
            commands.append([*start, "--method", self.method, *options, *self.options, *replicas])
        return commands


# The minimum number of processes of each method; 2 for methods that are missing here.
LEAST = {"hsdp": 4, "ddp_tp": 4, "fsdp_tp": 4, "pp_fsdp": 4, "hsdp_tp": 8}

# --join is missing, because it writes no metrics.
_MODIFIERS = {
    "no-buffer-sync": ("--no-buffer-sync",),
    "sync-bn": ("--sync-bn",),
    "amp-bf16": ("--amp", "bf16"),
    "accumulate-2": ("--accumulate", "2"),
    "grad-clip": ("--grad-clip", "1"),
    "find-unused": ("--find-unused",),
    "ema": ("--ema", "0.999"),
    "channels-last": ("--channels-last",),
    "compile": ("--compile",),
    "comm-hook-fp16": ("--comm-hook", "fp16"),
    "comm-hook-bf16": ("--comm-hook", "bf16"),
    "comm-hook-powersgd": ("--comm-hook", "powersgd"),
    "workers-1": ("--workers", "1"),
    "monitor-10": ("--monitor", "10"),
}
_SINGLE = ("amp-bf16", "channels-last", "compile", "workers-1")  # modifiers for a single process

_MOE = ("--model", "gpt-tiny-moe")
_MODELS = {"ep": _MOE}  # the only model with experts
_DONE = ("single", "dp", "ddp")

_CASES = (
    Case("single", "single", launcher="python"),
    *(Case(f"single-{name}", "single", _MODIFIERS[name], launcher="python") for name in _SINGLE),
    Case("single-moe", "single", _MOE, launcher="python"),
    Case("dp", "dp", launcher="python"),
    Case("ddp", "ddp"),
    Case("ddp-torchrun", "ddp", launcher="torchrun"),
    Case("ddp-launch", "ddp", launcher="launch"),
    Case("ddp-file", "ddp", launcher="file"),
    Case("ddp-tcp", "ddp", launcher="tcp"),
    Case("ddp-4", "ddp", least=4),
    Case("ddp-nodes", "ddp", launcher="nodes"),
    Case("ddp-nodes-file", "ddp", launcher="nodes-file"),
    Case("ddp-nodes-tcp", "ddp", launcher="nodes-tcp"),
    Case("ddp-nodes-4", "ddp", launcher="nodes", least=4),
    *(Case(f"ddp-{name}", "ddp", options) for name, options in _MODIFIERS.items()),
    *(Case(name, name, _MODELS.get(name, ()), least=LEAST.get(name, 2)) for name in METHODS if name not in _DONE),
    Case("fsdp-sync-bn", "fsdp", ("--sync-bn",)),
)
CASES = {case.name: case for case in _CASES}
REFERENCES = ("single", "single-moe")  # speed-ups are relative to the throughput of the case with the same model


def select_cases(names: Sequence[str]) -> list[Case]:
    """Return the cases of these names, always including the reference. Raises UserError for unknown names."""
    lists = {"all": tuple(CASES), "methods": (*METHODS, "single-moe")}
    selected = {"single", *(case for name in names for case in lists.get(name, (name,)))}
    for name in names:
        if name not in CASES and name not in lists:
            raise UserError(f"unknown case {name}; supported: {', '.join([*CASES, *lists])}")
    return [case for case in CASES.values() if case.name in selected]


def ip(*words: str) -> None:
    """Configure the network. Raises UserError with the output of ip."""
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"'ip {' '.join(words)}' failed: {done.stderr.strip()}")


class Node(NamedTuple):
    """A namespace, its network device, and its address."""

    name: str
    device: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """The start of a command in this namespace. gloo needs the device: the host name has no address here."""
        return ["ip", "netns", "exec", self.name, "env", f"GLOO_SOCKET_IFNAME={self.device}"]


@contextmanager
def two_nodes() -> Iterator[list[Node]]:
    """Yield two nodes in one network and remove them at the end. Raises UserError if they cannot be created."""
    if shutil.which("ip") is None:
        raise UserError("there is no program ip to create network namespaces")
    mark = uuid.uuid4().hex[:8]
    nodes = a, b = [Node(f"train-{mark}-{i}", f"v{i}{mark}", f"10.77.0.{i}") for i in (1, 2)]
    try:
        for node in nodes:
            ip("netns", "add", node.name)
        ip("link", "add", a.device, "netns", a.name, "type", "veth", "peer", "name", b.device, "netns", b.name)
        for node in nodes:
            ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", node.device)
            for device in ("lo", node.device):
                ip("-n", node.name, "link", "set", device, "up")
        yield nodes
    finally:
        for node in nodes:  # this removes both ends of the cable
            subprocess.run(["ip", "netns", "delete", node.name], check=False, capture_output=True)


PIPE_WIDTH = 200  # columns, if stdout is not a terminal
SCHEMA = 1  # of the JSON document; removing a field increases it
TEXTS = 4  # columns of text, aligned to the left
HEAD = (
    *("case", "launcher", "model", "data", "processes", "start s", "total s", "epoch s", "steps", "step ms"),
    *("samples/s", "speed-up", "test %", "memory MB", "GPU %"),
)
NOTES = (
    "Medians over the rounds, without the first epoch of each run. start: time from the command to the first step. "
    "total: whole command, with start, all epochs and evaluation. steps: timed steps of all rounds. "
    "speed-up: samples/s divided by that of single with the same model in the same round. test %: accuracy at the end. "
    "memory: peak of a process, on its GPU if it has one. GPU %: utilization of each rank's GPU in the last round."
)


def compute_speed_up(row: Row, rows: Sequence[Row]) -> float | None:
    """Return the median over the rounds of the throughput relative to `single`; None if not measured."""
    bases = [other for other in rows if other.case.name in REFERENCES and other.timings and other.model == row.model]
    if not bases or not row.timings:
        return None
    # Both runs of a round are affected by the same load on the machine; a case that fails is not repeated.
    pairs = zip(row.timings, bases[0].timings, strict=False)
    return statistics.median(own.samples_per_second / base.samples_per_second for own, base in pairs)


def format_row(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """Format the cells of a measured row."""
    speed_up = compute_speed_up(row, rows)
    return (
        row.case.name,
        row.case.launcher,
        row.model,
        row.data,
        str(row.processes),
        f"{row.compute_median('start_s'):.1f}",
        f"{row.compute_median('total_s'):.1f}",
        f"{row.compute_median('epoch_time_s'):.2f}",
        str(sum(timing.steps * len(timing.epoch_times_s) for timing in row.timings)),
        f"{1000 * row.compute_median('epoch_time_s') / row.timings[0].steps:.1f}",
        f"{row.compute_median('samples_per_second'):.1f}",
        "-" if speed_up is None else f"{speed_up:.2f}",
        f"{row.timings[-1].test_accuracy * 100:.1f}",
        f"{row.compute_median('peak_memory_bytes') / 1e6:.0f}",
        "/".join(f"{percent:.0f}" for percent in row.timings[-1].gpu_utilization) or "-",
    )


def as_text(rows: Sequence[Row], machine: dict[str, Any], width: int | None = None) -> str:
    """Format the table and, below the table, the problems. width: columns; None uses the width of the terminal."""
    # On a narrow terminal the table has several parts, and each part begins with the names of the cases.
    width = width or (shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH)
    lines = [HEAD, *(format_row(row, rows) for row in rows if row.timings)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    parts = [[0]]
    for i in range(1, len(HEAD)):
        if sum(widths[j] + 2 for j in parts[-1]) + widths[i] > width:
            parts.append([0])
        parts[-1].append(i)
    paragraphs = [textwrap.fill(format_machine(machine), width, break_on_hyphens=False)]
    for part in parts:
        cells = ([f"{line[i]:{'<' if i < TEXTS else '>'}{widths[i]}}" for i in part] for line in lines)
        paragraphs.append("\n".join("  ".join(line).rstrip() for line in cells))
    notes = [*(f"{row.case.name}: {row.problem}" for row in rows if row.problem), textwrap.fill(NOTES, width)]
    return "\n\n".join([*paragraphs, "\n".join(notes)]) + "\n"


def as_markdown(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """Format the table for a README or a pull request."""
    rule = "---|" * TEXTS + "---:|" * (len(HEAD) - TEXTS)
    lines = [format_machine(machine), "", f"| {' | '.join(HEAD)} |", f"|{rule}"]
    lines += [f"| {' | '.join(format_row(row, rows))} |" for row in rows if row.timings]
    problems = [f"- `{row.case.name}`: {row.problem}" for row in rows if row.problem]
    return "\n".join([*lines, "", *problems, *([""] if problems else []), NOTES]) + "\n"


def as_json(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    """Format all numbers without rounding: seconds, bytes, and fractions."""
    document = {"schema": SCHEMA, "machine": machine, "cases": [_row_as_dict(row, rows) for row in rows]}
    return json.dumps(document, indent=1) + "\n"


def _row_as_dict(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "case": row.case.name,
        "method": row.case.method,
        "options": list(row.case.options),
        "launcher": row.case.launcher,
        "nodes": row.case.nodes,
        "model": row.model or None,
        "data": row.data or None,
        "processes": row.processes,
        "problem": row.problem or None,
        "runs": [asdict(timing) for timing in row.timings],
    }
    if row.timings:
        fields |= {
            "total_s": row.compute_median("total_s"),
            "epoch_time_s": row.compute_median("epoch_time_s"),
            "batch_time_s": row.compute_median("epoch_time_s") / row.timings[0].steps,
            "samples_per_second": row.compute_median("samples_per_second"),
            "speed_up": compute_speed_up(row, rows),
        }
    return fields


def format_machine(machine: dict[str, Any]) -> str:
    """Format hardware, versions and options in a line."""
    devices = ", ".join(machine["gpus"]) or f"{machine['cpu']}, {machine['cores']} cores"
    workload = " ".join(machine["options"])
    return (
        f"{devices}; torch {machine['torch']}, {machine['threads']} thread(s) per process, "
        f"{machine['rounds']} round(s); {workload}"
    )
