"""The cases of the benchmark: combinations of a method, its modifiers and a launcher."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

RUN = Path(__file__).resolve().parents[1] / "run.py"


# The start of the command line of each launcher, with {} for the number of processes. torch.distributed.launch is the
# deprecated predecessor of torchrun; -W ignore hides its warning.
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "python": (),
    "spawn": ("--spawn", "{}"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node={}"),
    "launch": ("-W", "ignore", "-m", "torch.distributed.launch", "--standalone", "--nproc-per-node={}"),
}


@dataclass(frozen=True)
class Case:
    """A row of the table.

    options: options of run.py in addition to --method. launcher: a key of LAUNCHERS. replicas: whether a single process
    holds all replicas, as in dp. least: minimum number of processes.
    """

    name: str
    method: str
    options: tuple[str, ...] = ()
    launcher: str = "spawn"
    replicas: bool = False
    least: int = 2

    def count_processes(self, requested: int) -> int:
        """Return the number of processes of this case, given the value of --processes."""
        return 1 if self.launcher == "python" else max(requested, self.least)

    def build_command(self, requested: int, options: Sequence[str]) -> list[str]:
        """Build the command line. requested: value of --processes. options: options of run.py for all cases."""
        launcher = [word.format(self.count_processes(requested)) for word in LAUNCHERS[self.launcher]]
        start = [str(RUN), *launcher] if self.launcher == "spawn" else [*launcher, str(RUN)]
        command = [sys.executable, *start, "--method", self.method, *self.options, *options]
        return [*command, "--replicas", str(requested)] if self.replicas else command


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

_CASES = (
    Case("single", "single", launcher="python"),
    *(Case(f"single-{name}", "single", _MODIFIERS[name], launcher="python") for name in _SINGLE),
    Case("dp", "dp", launcher="python", replicas=True),
    Case("ddp", "ddp"),
    Case("ddp-torchrun", "ddp", launcher="torchrun"),
    Case("ddp-launch", "ddp", launcher="launch"),
    *(Case(f"ddp-{name}", "ddp", options) for name, options in _MODIFIERS.items()),
    Case("zero", "zero"),
    Case("localsgd", "localsgd"),
    Case("diloco", "diloco"),
    Case("fsdp", "fsdp"),
    Case("fsdp-sync-bn", "fsdp", ("--sync-bn",)),
    Case("hsdp", "hsdp", least=4),
)
CASES = {case.name: case for case in _CASES}
REFERENCE = "single"  # speed-ups are relative to its throughput


def select_cases(names: Sequence[str]) -> list[Case]:
    """Return the cases of these names, always including the reference. Raises UserError for unknown names."""
    for name in names:
        if name not in CASES:
            raise UserError(f"unknown case {name}; supported: {', '.join(CASES)}")
    return [case for case in CASES.values() if case.name == REFERENCE or case.name in names]
