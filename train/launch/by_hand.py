"""One process per shell, started by hand: --rank, --world-size, and where they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from train.errors import RankError, UserError
from train.launch import slurm
from train.launch.place import Place, tcp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from train.launch.options import LaunchOptions

MEET = "--init-method file:///PATH, or --ip ADDRESS --port PORT"


def recognizes(environment: Mapping[str, str], options: LaunchOptions) -> bool:
    """Tell whether any of the options was typed."""
    if options.typed("rank", "world_size", "init_method"):
        return True
    # Alone, --ip and --port may correct where SLURM says to meet; anywhere else `place` asks for the others.
    return bool(options.typed("ip", "port", "local_rank")) and not slurm.recognizes(environment, options)


def several(environment: Mapping[str, str], options: LaunchOptions) -> bool:  # noqa: ARG001  # the shared shape
    """Tell that a group was asked for, if only of one."""
    return True


def place(environment: Mapping[str, str], options: LaunchOptions) -> Place:  # noqa: ARG001  # the shared shape
    """Put together what was typed."""
    rank, world_size = options.rank, options.world_size
    if rank is None or world_size is None:
        given = options.typed("rank", "world_size", "init_method", "ip", "port", "local_rank")[0]
        missing = "--rank" if rank is None else "--world-size"
        raise UserError(f"{given} without {missing}: by hand, each process needs --rank R --world-size N and {MEET}")
    if world_size < 1:
        raise UserError(f"--world-size {world_size}: needs 1 or more")
    if not 0 <= rank < world_size:
        raise RankError(f"--rank {rank} with --world-size {world_size}: needs 0 to {world_size - 1}")
    if options.local_rank is not None and not 0 <= options.local_rank <= rank:
        raise RankError(f"--local-rank {options.local_rank} with --rank {rank}: needs 0 to {rank}")
    return Place(rank, world_size, options.local_rank, options.local_world_size, 0, meeting_point(options))


def meeting_point(options: LaunchOptions) -> str:
    """Find the one place at which the processes meet. Raises UserError where there is none, or two."""
    if options.init_method is None:
        if options.ip is None or options.port is None:
            raise UserError(f"--rank {options.rank} needs to know where the processes meet: {MEET}")
        return tcp(options.ip, options.port)
    if options.typed("ip", "port"):
        raise UserError(f"--init-method and {options.typed('ip', 'port')[0]} both say where to meet: drop one")
    url = options.init_method
    try:
        parts = urlsplit(url)
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None and parts.path in ("", "/"):
            return tcp(parts.hostname, parts.port)
    except ValueError as error:  # a port out of range, half an IPv6 address
        raise UserError(f"--init-method {url}: {error}") from error
    if parts.scheme == "file" and parts.path.startswith("/") and url == f"file://{parts.path}" != "file:///":
        return url
    raise UserError(f"--init-method {url}: needs file:///PATH, with three slashes, or tcp://ADDRESS:PORT")
