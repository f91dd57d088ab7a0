"""The cases of the benchmark: combinations of a method, its modifiers and a launcher."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from train.errors import UserError
from train.methods import METHODS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from train.bench.nodes import Node

RUN = Path(__file__).resolve().parents[1] / "run.py"


@dataclass(frozen=True)
class Launcher:
    """The command lines that start the processes of a run.

    before, after: words before and after run.py, with placeholders for the fields of `Case.build_commands`. nodes:
    number of nodes. by_hand: one command line for each process; otherwise one for each node.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    nodes: int = 1
    by_hand: bool = False


_TORCHRUN = ("-m", "torch.distributed.run")
_RANK = ("--rank", "{rank}", "--world-size", "{processes}", "--init-method")
_FILE, _TCP = (*_RANK, "file://{folder}/rendezvous"), (*_RANK, "tcp://{address}:{port}")
_NODES = ("--nnodes=2", "--node-rank={node}", "--nproc-per-node={share}", "--master-addr={address}")
# torch.distributed.launch is the deprecated predecessor of torchrun; -W ignore hides its warning.
LAUNCHERS = {
    "python": Launcher(),
    "spawn": Launcher(after=("--spawn", "{processes}")),
    "torchrun": Launcher((*_TORCHRUN, "--standalone", "--nproc-per-node={processes}")),
    "launch": Launcher(
        ("-W", "ignore", "-m", "torch.distributed.launch", "--standalone", "--nproc-per-node={processes}")
    ),
    "file": Launcher(after=_FILE, by_hand=True),
    "tcp": Launcher(after=_TCP, by_hand=True),
    "nodes": Launcher((*_TORCHRUN, *_NODES, "--master-port={port}"), nodes=2),
    "nodes-file": Launcher(after=_FILE, nodes=2, by_hand=True),
    "nodes-tcp": Launcher(after=_TCP, nodes=2, by_hand=True),
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

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return LAUNCHERS[self.launcher].nodes

    def count_processes(self, requested: int) -> int:
        """Return the number of processes of this case, given the value of --processes: equal on all nodes."""
        return 1 if self.launcher == "python" else -(-max(requested, self.least) // self.nodes) * self.nodes

    def build_commands(
        self, requested: int, options: Sequence[str], folder: Path, nodes: Sequence[Node] = ()
    ) -> list[list[str]]:
        """Build the command lines, which run at the same time.

        requested: value of --processes. options: options of run.py for all cases. folder: of this run. nodes: for the
        launchers with two nodes.
        """
        launcher, processes = LAUNCHERS[self.launcher], self.count_processes(requested)
        share = processes // launcher.nodes
        address, port = (nodes[0].address, 29500) if launcher.nodes > 1 else ("127.0.0.1", _find_free_port())
        common = {"processes": processes, "share": share, "folder": folder, "address": address, "port": port}
        replicas = ("--replicas", str(requested)) if self.replicas else ()
        commands = []
        for rank in range(processes) if launcher.by_hand else range(0, processes, share):
            node = rank // share
            before, after = (
                [word.format(rank=rank, node=node, **common) for word in words]
                for words in (launcher.before, launcher.after)
            )
            prefix = nodes[node].prefix if launcher.nodes > 1 else []
            run = [sys.executable, *before, str(RUN), *after, "--method", self.method, *self.options]
            commands.append([*prefix, *run, *options, *replicas])
        return commands


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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

_CASES = (
    Case("single", "single", launcher="python"),
    *(Case(f"single-{name}", "single", _MODIFIERS[name], launcher="python") for name in _SINGLE),
    Case("dp", "dp", launcher="python", replicas=True),
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
    *(Case(name, name, least=LEAST.get(name, 2)) for name in METHODS if name not in ("single", "dp", "ddp")),
    Case("fsdp-sync-bn", "fsdp", ("--sync-bn",)),
)
CASES = {case.name: case for case in _CASES}
REFERENCE = "single"  # speed-ups are relative to its throughput


def select_cases(names: Sequence[str]) -> list[Case]:
    """Return the cases of these names, always including the reference. Raises UserError for unknown names."""
    lists = {"all": tuple(CASES), "methods": tuple(METHODS)}
    selected = {REFERENCE, *(case for name in names for case in lists.get(name, (name,)))}
    for name in names:
        if name not in CASES and name not in lists:
            raise UserError(f"unknown case {name}; supported: {', '.join([*CASES, *lists])}")
    return [case for case in CASES.values() if case.name in selected]
