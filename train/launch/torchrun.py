"""torchrun, torch.distributed.launch, and whatever else sets their environment variables.

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT:
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.errors import RankError, UserError
from train.launch.place import TORCHRUN, Place, number, rank_of, tcp

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from train.launch.options import LaunchOptions

# Set by torchrun for a process, besides TORCHELASTIC_*.
VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)
ADVICE = f"start with '{TORCHRUN}'"


def recognizes(environment: Mapping[str, str], options: LaunchOptions) -> bool:  # noqa: ARG001  # the shared shape
    """Tell whether the variables are set."""
    return "RANK" in environment or "WORLD_SIZE" in environment


def started_one(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun itself started a single process on a single node, as it does by default."""
    return "TORCHELASTIC_RUN_ID" in environment and environment.get("WORLD_SIZE") == "1"


def forget(environment: MutableMapping[str, str]) -> None:
    """Remove the variables, which must not reach the rendezvous of spawned ranks."""
    for name in [name for name in environment if name in VARIABLES or name.startswith("TORCHELASTIC_")]:
        del environment[name]


def several(environment: Mapping[str, str], options: LaunchOptions) -> bool:  # noqa: ARG001  # the shared shape
    """Tell that a group was asked for: even one process of torchrun's is a group of one."""
    return True


def place(environment: Mapping[str, str], options: LaunchOptions) -> Place:
    """Read the variables."""
    wrong = options.typed("spawn", "rank", "world_size", "init_method", "ip", "port")
    if wrong:
        raise UserError(f"{wrong[0]} under a launcher, which has set RANK or WORLD_SIZE: drop it, or unset these")
    rank, world_size = rank_of(environment, "RANK", "WORLD_SIZE", ADVICE)
    local = rank, world_size  # variables set by hand may lack these two: then all ranks are taken to be here
    if "LOCAL_RANK" in environment or "LOCAL_WORLD_SIZE" in environment:
        local = rank_of(environment, "LOCAL_RANK", "LOCAL_WORLD_SIZE", ADVICE)
    # torch.distributed.launch passes the option too.
    if options.local_rank is not None and options.local_rank != local[0]:
        raise RankError(f"--local-rank {options.local_rank} with LOCAL_RANK={local[0]}: drop the option")
    where = ""
    if "MASTER_ADDR" in environment:
        tcp(environment["MASTER_ADDR"], number(environment, "MASTER_PORT", ADVICE))  # refuses a port that cannot be
        where = "env://"
    node = number(environment, "GROUP_RANK", ADVICE) if "GROUP_RANK" in environment else 0
    return Place(rank, world_size, *local, node=node, init_method=where)
