"""Time the launchers of the trainer on two simulated nodes, beside a single process."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.nodes import two_nodes
from train.bench.cases import BY_HAND, CASES, RUN, TORCHRUN, Case, find_free_port
from train.bench.runs import Row, run_case
from train.bench.table import as_text
from train.errors import UserError
from train.options import build_parser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.nodes import Node

TIMEOUT = 1800.0  # seconds, of a run
JOIN_NODES = ("--nnodes=2", "--node-rank={node}", "--master-addr={address}", "--master-port={port}")
# The words after `python`, with the placeholders of `NodeCase.build_node_commands`.
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "torchrun": (*TORCHRUN, *JOIN_NODES, "{run}"),
    "file": (*BY_HAND, "file://{folder}/rendezvous"),
    "tcp": (*BY_HAND, "tcp://{address}:{port}"),
}


@dataclass(frozen=True)
class NodeCase(Case):
    """A row of the table: half of the processes on each node."""

    nodes = 2

    def count_processes(self, requested: int) -> int:  # noqa: ARG002 - as of Case
        """Return the number of processes on both nodes."""
        return self.least

    def build_node_commands(self, options: Sequence[str], folder: Path, nodes: Sequence[Node]) -> list[list[str]]:
        """Build the command lines, which run at the same time: one for each process, or for each torchrun."""
        words, share = LAUNCHERS[self.launcher], self.least // self.nodes
        port = find_free_port()
        commands = []
        for rank in range(0, self.least, 1 if "{rank}" in words else share):
            node = nodes[rank // share]
            values = {"run": RUN, "rank": rank, "processes": self.least, "node": rank // share, "share": share}
            values |= {"folder": folder, "address": nodes[0].address, "port": port}
            start = [*node.prefix, sys.executable, *(word.format(**values) for word in words)]
            commands.append([*start, "--method", self.method, *options])
        return commands


NODE_CASES = (
    NodeCase("ddp-nodes", "ddp", launcher="torchrun"),
    NodeCase("ddp-nodes-file", "ddp", launcher="file"),
    NodeCase("ddp-nodes-tcp", "ddp", launcher="tcp"),
    NodeCase("ddp-nodes-4", "ddp", launcher="torchrun", least=4),
)


def measure_nodes(options: Sequence[str], rounds: int, threads: int) -> None:
    """Run a single process and all cases in turns, and print their table. Raises UserError without the rights."""
    if torch.cuda.is_available() and build_parser().parse_args(list(options)).gpus != "none":
        raise UserError("two nodes on this machine share its GPUs; add --gpus none after --")
    alone = CASES["single"]
    rows = [Row(alone, 1), *(Row(case, case.least) for case in NODE_CASES)]
    with two_nodes() as nodes, tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for row in rows:
                logs = Path(folder) / f"{number}-{row.case.name}"
                logs.mkdir()
                if isinstance(row.case, NodeCase):
                    commands = row.case.build_node_commands(options, logs, nodes)
                else:
                    commands = row.case.build_commands(1, options, logs)
                if not row.problem:
                    run_case(row, commands, logs, threads, TIMEOUT)
    machine = {"cpu": "two network namespaces", "cores": 1, "gpus": [], "torch": torch.__version__}
    machine |= {"threads": threads, "rounds": rounds, "options": list(options)}
    sys.stdout.write(as_text(rows, machine))
