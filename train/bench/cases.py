"""What the bench can run: each case is a method, what changes it, and how its processes are started."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RUN = Path(__file__).resolve().parents[1] / "run.py"


def _alone(_: int) -> list[str]:
    return [sys.executable, str(RUN)]


def _spawn(processes: int) -> list[str]:
    return [sys.executable, str(RUN), "--spawn", str(processes)]


def _torchrun(processes: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", str(RUN)]


def _launch(processes: int) -> list[str]:
    # The older name of torchrun; it says so in a warning.
    return [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.launch"),
        *("--standalone", f"--nproc-per-node={processes}", str(RUN)),
    ]


# The beginning of a command line that starts so many processes.
LAUNCHERS: dict[str, Callable[[int], list[str]]] = {
    "python": _alone,
    "spawn": _spawn,
    "torchrun": _torchrun,
    "launch": _launch,
}


@dataclass(frozen=True)
class Case:
    """One row of the table.

    options: of run.py, beside --method. launcher: a key of LAUNCHERS. replicas: copies of the model that one process
    holds, as dp's. least: processes without which it makes no sense.
    """

    name: str
    method: str
    options: tuple[str, ...] = ()
    launcher: str = "spawn"
    replicas: bool = False
    least: int = 2

    def processes(self, wanted: int) -> int:
        """Say how many processes are started where `wanted` are asked for."""
        return 1 if self.launcher == "python" else max(wanted, self.least)

    def command(self, wanted: int, options: Sequence[str]) -> list[str]:
        """Write the whole command line. options: of run.py, the same for all cases."""
        command = [*LAUNCHERS[self.launcher](self.processes(wanted)), "--method", self.method, *self.options, *options]
        return [*command, "--replicas", str(wanted)] if self.replicas else command


# Without --join, which writes no metrics to read.
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
_ALONE = ("amp-bf16", "channels-last", "compile", "workers-1")  # that make sense without other ranks, and are compared

_LISTED = (
    Case("single", "single", launcher="python"),
    *(Case(f"single-{name}", "single", _MODIFIERS[name], launcher="python") for name in _ALONE),
    Case("dp", "dp", launcher="python", replicas=True),
    Case("ddp", "ddp"),
    Case("ddp-torchrun", "ddp", launcher="torchrun"),
    Case("ddp-launch", "ddp", launcher="launch"),
    *(Case(f"ddp-{name}", "ddp", options) for name, options in _MODIFIERS.items()),
    Case("zero", "zero"),
    Case("localsgd", "localsgd"),
    Case("fsdp", "fsdp"),
    Case("fsdp-sync-bn", "fsdp", ("--sync-bn",)),
    Case("hsdp", "hsdp", least=4),
)
CASES = {case.name: case for case in _LISTED}
REFERENCE = "single"  # speed-ups are over its throughput


def chosen(names: Sequence[str]) -> list[Case]:
    """Pick cases by name, `single` first, for all others are compared with it. Raises UserError for an unknown one."""
    for name in names:
        if name not in CASES:
            raise UserError(f"no case {name}; there are {', '.join(CASES)}")
    return [case for case in CASES.values() if case.name == REFERENCE or case.name in names]
