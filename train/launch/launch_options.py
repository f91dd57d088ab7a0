"""The options for launching, declared once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.option import option

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True)
class LaunchOptions:
    """The options for launching; None if not given.

    local_world_size is no option: --spawn sets it, because it starts all ranks of the machine.
    """

    spawn: int | None = option(
        None,
        "start N processes on this machine; implied (2, or one per GPU) by torchrun with one process and "
        "--save-per-rank, without --method",
        group="processes",
    )
    rank: int | None = option(None, "by hand, in a shell per process: its number, from 0", metavar="R")
    world_size: int | None = option(None, "by hand: the number of processes")
    local_rank: int | None = option(
        None,
        "by hand: its number on this machine, which selects the GPU (default: the rank modulo the GPUs)",
        metavar="L",
    )
    local_world_size: int | None = None
    init_method: str | None = option(
        None,
        "by hand: rendezvous at tcp://ADDRESS:PORT of rank 0, or in file:///PATH, a new file for each run",
        metavar="URL",
    )
    ip: str | None = option(
        None,
        "with --port: short for --init-method tcp://ADDRESS:PORT; with --spawn instead of a temporary file",
        metavar="ADDRESS",
    )
    port: int | None = option(None, "a free port of rank 0's machine, the same everywhere", metavar="PORT")
    gpus: str | None = option(
        None,
        "GPUs of this machine, as 0,1, or none for the CPU: each process uses one, dp all (default: all, or the CPU if "
        "there are fewer GPUs than processes)",
        metavar="LIST",
        group="devices",
    )
    backend: str | None = option(
        None, "of the process group (default: nccl on GPUs, gloo on CPUs)", choices=("gloo", "nccl")
    )

    @classmethod
    def from_args(cls, args: argparse.Namespace | None) -> LaunchOptions:
        """Select the launch options from parsed arguments, which may lack some of them."""
        return cls(**{name: getattr(args, name, None) for name in cls.__dataclass_fields__})

    def given(self, *names: str) -> list[str]:
        """List the named options that were given, as they are typed."""
        return [_spell(name) for name in names if getattr(self, name) is not None]

    def missing(self, *names: str) -> list[str]:
        """List the named options that were not given."""
        return [_spell(name) for name in names if getattr(self, name) is None]


def _spell(name: str) -> str:
    return "--" + name.replace("_", "-")


NO_OPTIONS = LaunchOptions()
