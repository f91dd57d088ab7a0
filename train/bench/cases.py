"""The cases of the benchmark: combinations of a method, its modifiers and a launcher."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from train.errors import UserError
from train.methods import METHODS

if TYPE_CHECKING:
    from collections.abc import Sequence

RUN = Path(__file__).resolve().parents[1] / "run.py"

BY_HAND = ("{run}", "--rank", "{rank}", "--world-size", "{processes}", "--init-method")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node={share}")
# The words after `python` by launcher, with the placeholders of `Case.build_commands`. With {rank}, each process has a
# command line of its own. torch.distributed.launch is the deprecated predecessor of torchrun; -W ignore hides its
# warning.
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "python": ("{run}",),
    "spawn": ("{run}", "--spawn", "{processes}"),
    "torchrun": (*TORCHRUN, "--standalone", "{run}"),
    "launch": ("-W", "ignore", "-m", "torch.distributed.launch", *TORCHRUN[2:], "--standalone", "{run}"),
    "file": (*BY_HAND, "file://{folder}/rendezvous"),
    "tcp": (*BY_HAND, "tcp://127.0.0.1:{port}"),
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

    nodes: ClassVar[int] = 1

    def count_processes(self, requested: int) -> int:
        """Return the number of processes of this case, given the value of --processes."""
        return 1 if self.launcher == "python" else max(requested, self.least)

    def build_commands(self, requested: int, options: Sequence[str], folder: Path) -> list[list[str]]:
        """Build the command lines, which run at the same time.

        requested: value of --processes. options: for all cases. folder: of this run.
        """
        words, processes = LAUNCHERS[self.launcher], self.count_processes(requested)
        port = find_free_port()
        # By hand, each process has a command line of its own; any other launcher starts all processes.
        commands = []
        for rank in range(processes if "{rank}" in words else 1):
            values = {"run": RUN, "rank": rank, "processes": processes, "share": processes}
            values |= {"folder": folder, "port": port}
            start = [sys.executable, *(word.format(**values) for word in words)]
            replicas = ["--replicas", str(requested)] if self.method == "dp" else []
            commands.append([*start, "--method", self.method, *options, *self.options, *replicas])
        return commands


def find_free_port() -> int:
    """Return a port of this machine that no program uses at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


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
    *(Case(f"ddp-{name}", "ddp", options) for name, options in _MODIFIERS.items()),
    *(Case(name, name, _MODELS.get(name, ()), least=LEAST.get(name, 2)) for name in METHODS if name not in _DONE),
    Case("fsdp-sync-bn", "fsdp", ("--sync-bn",)),
)
CASES = {case.name: case for case in _CASES}
# Speed-ups are relative to the throughput of the case with the same model.
REFERENCES = ("single", "single-moe")


def select_cases(names: Sequence[str]) -> list[Case]:
    """Return the cases of these names, always including the reference. Raises UserError for unknown names."""
    lists = {"all": tuple(CASES), "methods": (*METHODS, "single-moe")}
    supported = [*CASES, *lists]
    selected = {"single"}
    for name in names:
        if name not in supported:
            raise UserError(f"unknown case {name}; supported: {', '.join(supported)}")
        selected.update(lists.get(name, (name,)))
    return [case for case in CASES.values() if case.name in selected]
