"""Options of run.py for the processes of a run and their devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True)
class LaunchOptions:
    """The options for launching; None if not given.

    local_world_size is no option: --spawn sets it, because it starts all ranks of the machine.
    """

    spawn: int | None = None
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    init_method: str | None = None
    ip: str | None = None
    port: int | None = None
    gpus: str | None = None
    backend: str | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace | None) -> LaunchOptions:
        """Select the launch options from parsed arguments, which may lack some of them."""
        return cls(**{name: getattr(args, name, None) for name in cls.__dataclass_fields__})

    def given(self, *names: str) -> list[str]:
        """List the named options that were given, as they are typed."""
        return ["--" + name.replace("_", "-") for name in names if getattr(self, name) is not None]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the launch options to a parser, in two groups."""
    group = parser.add_argument_group("processes", "default: the ranks of torchrun or srun, else this process alone")
    group.add_argument(
        "--spawn",
        type=int,
        metavar="N",
        help="start N processes on this machine; implied (2, or one per GPU) by torchrun with one process "
        "and --save-per-rank, without --method",
    )
    group.add_argument("--rank", type=int, metavar="R", help="by hand, in a shell per process: its number, from 0")
    group.add_argument("--world-size", type=int, metavar="N", help="by hand: the number of processes")
    group.add_argument(
        "--local-rank",
        type=int,
        metavar="L",
        help="by hand: its number on this machine, which selects the GPU (default: the rank modulo the GPUs)",
    )
    group.add_argument(
        "--init-method",
        metavar="URL",
        help="by hand: rendezvous at tcp://ADDRESS:PORT of rank 0, or in file:///PATH, a new file for each run",
    )
    group.add_argument("--ip", metavar="ADDRESS", help="with --port: short for --init-method tcp://ADDRESS:PORT")
    group.add_argument("--port", type=int, metavar="PORT", help="a free port of rank 0's machine, the same everywhere")

    group = parser.add_argument_group("devices")
    group.add_argument(
        "--gpus",
        metavar="LIST",
        help="GPUs of this machine, as 0,1, or none for the CPU: each process uses one, dp all (default: all, "
        "or the CPU if there are fewer GPUs than processes)",
    )
    group.add_argument(
        "--backend", choices=("gloo", "nccl"), help="of the process group (default: nccl on GPUs, gloo on CPUs)"
    )
    parser.set_defaults(local_world_size=None)
