"""The options of run.py that say which processes take part, and where each of them computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True)
class LaunchOptions:
    """What was typed about launching, None where nothing was.

    local_world_size has no option of its own: --spawn, which starts the processes of a machine, knows it.
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
    def of(cls, args: argparse.Namespace | None) -> LaunchOptions:
        """Pick them out of parsed arguments; what is not there counts as not typed."""
        return cls(**{name: getattr(args, name, None) for name in cls.__dataclass_fields__})

    def typed(self, *names: str) -> list[str]:
        """List those of the named options that were typed, as the user writes them."""
        return ["--" + name.replace("_", "-") for name in names if getattr(self, name) is not None]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser, in two groups of their own."""
    launch = parser.add_argument_group(
        "processes", "without these: those that torchrun or srun started, else this one alone"
    )
    launch.add_argument(
        "--spawn",
        type=int,
        metavar="N",
        help="start N processes on this machine; implied (2, or one per GPU) by torchrun with one process "
        "and --save-per-rank, without --method",
    )
    launch.add_argument("--rank", type=int, metavar="R", help="by hand, in a shell per process: its number, from 0")
    launch.add_argument("--world-size", type=int, metavar="N", help="by hand: the number of processes")
    launch.add_argument(
        "--local-rank",
        type=int,
        metavar="L",
        help="by hand: its number on this machine, which picks the GPU (default: the rank modulo the GPUs)",
    )
    launch.add_argument(
        "--init-method",
        metavar="URL",
        help="by hand: where the processes meet, tcp://ADDRESS:PORT of rank 0, or file:///PATH, new for each run",
    )
    launch.add_argument("--ip", metavar="ADDRESS", help="with --port: short for --init-method tcp://ADDRESS:PORT")
    launch.add_argument("--port", type=int, metavar="PORT", help="a free port of rank 0's machine, the same everywhere")

    device = parser.add_argument_group("devices")
    device.add_argument(
        "--gpus",
        metavar="LIST",
        help="GPUs of this machine, as 0,1, or none for the CPU: each process takes one, dp all (default: all, "
        "or the CPU where there are fewer GPUs than processes)",
    )
    device.add_argument(
        "--backend", choices=("gloo", "nccl"), help="of the process group (default: nccl on GPUs, gloo)"
    )
    parser.set_defaults(local_world_size=None)
