"""What every launcher finds out, and how it reads numbers from the environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from train.errors import RankError, UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from train.launch.options import LaunchOptions

TORCHRUN = "torchrun --nproc-per-node 2 train/run.py"
HIGHEST_PORT = 65_535


@dataclass(frozen=True)
class Place:
    """Where a launcher has put this process.

    local_rank, local_world_size: None where the launcher does not know which processes share a machine.
    init_method: where the processes meet, or empty where nothing says. own_gpus: whether the process sees
    its own GPUs only, so that two processes of a machine may both call theirs number 0.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node: int
    init_method: str
    own_gpus: bool = False


class Launcher(Protocol):
    """The shape of torchrun.py, by_hand.py and slurm.py."""

    def recognizes(self, environment: Mapping[str, str], options: LaunchOptions) -> bool:
        """Tell whether this launcher is the one that started the process."""
        ...

    def several(self, environment: Mapping[str, str], options: LaunchOptions) -> bool:
        """Tell, where it is, whether a group of processes was asked for, rather than one that runs alone."""
        ...

    def place(self, environment: Mapping[str, str], options: LaunchOptions) -> Place:
        """Read the place. Raises UserError for what does not fit together, RankError if on this rank only."""
        ...


def tcp(host: str, port: int) -> str:
    """Write an address as torch does, IPv6 in brackets. Raises UserError for a port that cannot be."""
    if not 1 <= port <= HIGHEST_PORT:
        raise UserError(f"port {port}: needs 1 to {HIGHEST_PORT}; see --port and MASTER_PORT")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def number(environment: Mapping[str, str], name: str, advice: str) -> int:
    """Read a variable that holds a number from 0. Raises RankError, which ends in the advice."""
    text = environment.get(name)
    if text is None or not (text.isascii() and text.isdigit()):
        found = "is not set" if text is None else f"is {text!r}, not a number"
        raise RankError(f"the environment variable {name} {found}: {advice}")
    return int(text)


def rank_of(environment: Mapping[str, str], rank: str, size: str, advice: str) -> tuple[int, int]:
    """Read a rank and the number of ranks that it is one of. Raises RankError."""
    place = number(environment, rank, advice), number(environment, size, advice)
    if not place[0] < place[1]:
        raise RankError(f"{rank}={place[0]} with {size}={place[1]}: it needs to be below; {advice}")
    return place
