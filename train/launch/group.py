"""The process group: the ranks meet (the rendezvous), torch connects them, and at the end the group is closed."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch.distributed has no __all__

from train.errors import RankError, Stopped, UserError
from train.launch.file_store import open_file_store, path_of, remove_when_done
from train.launch.meeting import Meeting, announce
from train.launch.roll_call import who_is_missing
from train.launch.tcp_store import address_of, open_tcp_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from train.launch.context import RankContext

# What gloo and NCCL say when another rank has gone or stands still.
LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Socket closed", "Broken pipe"),
    *("Timed out waiting", "Application timeout caused pair closure", "ncclRemoteError"),
)


class PeerLost(Exception):
    """Another rank went away, or stood still for too long, during a collective: no mistake of this one's."""


@contextmanager
def process_group(ctx: RankContext, timeout: float) -> Iterator[None]:
    """Hold the process group open for the block.

    timeout: seconds after which a rank stops waiting for its peers; torch's default of 30 minutes is a hang
    to whoever watches. Raises UserError or RankError when the ranks do not find each other, PeerLost when one
    of them goes away during the block.
    """
    if ctx.device.type == "cuda":
        torch.cuda.set_device(ctx.device)
        torch.backends.cudnn.deterministic = True  # two runs with one seed shall give the same bits
    if ctx.world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # torchrun sets this; otherwise the ranks of a node would fight for its cores
    if ctx.backend is None:
        yield
        return
    meeting = join(ctx, timeout)
    try:
        yield
    except (UserError, Stopped):
        close(ctx, meeting.store, timeout)
        raise
    except RuntimeError as error:
        if any(text in str(error) for text in LOST):
            raise PeerLost(lost(ctx, meeting, error)) from error
        raise
    # After any other exception the group is left alone: the peers may be inside a collective, and closing it
    # could wait for them. The process is about to end anyway.
    close(ctx, meeting.store, timeout)


def join(ctx: RankContext, timeout: float) -> Meeting:
    """Meet the other ranks and let torch connect them; returns the meeting, which outlives it."""
    who = f"rank {ctx.rank} of {ctx.world_size}"
    meeting = meet(ctx, who, timeout)
    try:
        dist.init_process_group(
            ctx.backend,
            store=PrefixStore("group", meeting.store),
            rank=ctx.rank,
            world_size=ctx.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=ctx.device if ctx.backend == "nccl" else None,
        )
    except (RuntimeError, ValueError) as error:
        hint = "on several machines, GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the network to use"
        raise RankError(
            f"{who} has met the others at {meeting.where} but cannot connect: {_first_line(error)}; {hint}"
        ) from error
    return meeting


def meet(ctx: RankContext, who: str, timeout: float) -> Meeting:
    """Meet the other ranks; returns the meeting, with the store. Raises UserError or RankError."""
    in_file = ctx.init_method.startswith("file:")
    if in_file:
        path = path_of(ctx.init_method)
        store, where = open_file_store(path, timeout), f"the file {path}"
        mend = "remove it or name another with --init-method"
    else:
        store = open_tcp_store(ctx.init_method, ctx.rank, timeout)
        host, port = address_of(ctx.init_method)
        where, mend = f"tcp://{host}:{port}", "choose another port with --port, or torchrun's --master-port"
    meeting = Meeting(store, announce(ctx.rank, ctx.world_size, ctx.backend), where, mend)
    try:
        meeting.meet(timeout)
    except UserError:
        if in_file and meeting.in_vain:
            with suppress(OSError):
                path.resolve().unlink(missing_ok=True)  # nobody has met there, so the next try can
        raise
    except RuntimeError as error:
        # The store has gone: with rank 0, which serves it, or because somebody removed the file.
        lost = f"cannot read {where}" if in_file else f"lost rank 0 at {where}: see its own message"
        raise RankError(f"{who} {lost} ({_first_line(error)})") from error
    return meeting


def lost(ctx: RankContext, meeting: Meeting, error: BaseException) -> str:
    """Say which rank this one has lost, as far as that can be known."""
    reason = _first_line(error)
    missing = who_is_missing(meeting)
    return f"rank {ctx.rank} lost {missing} ({reason})" if missing else f"rank {ctx.rank} lost another rank: {reason}"


def close(ctx: RankContext, store: Store, timeout: float) -> None:
    """End the group, and remove the file that the ranks met in, which the next run could not use."""
    dist.destroy_process_group()
    if ctx.init_method.startswith("file:"):
        remove_when_done(path_of(ctx.init_method), store, ctx.rank, ctx.world_size, min(timeout, 10.0))


def _first_line(error: BaseException) -> str:
    # gloo adds advice to its first line, and begins it with the place in its sources.
    line = str(error).strip().partition("\n")[0].partition(" This is typically")[0]
    return re.sub(r"^\[[^\]]*\.(?:cc|h|cpp):\d+\] ", "", line)
