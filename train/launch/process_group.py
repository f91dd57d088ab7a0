"""Open and close the process group: torch connects the ranks, and a check after a failed collective names lost ranks.

torch waits for the ranks (`init_process_group`), and reports a timeout in its own words. During the run gloo and NCCL
name an address at best, so after a failure each rank reports in torch's store that it is alive.
(dist.monitored_barrier names ranks that hang, but for a killed rank it raises gloo's error, which has an address only.)
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import uuid
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]  # no __all__

from train.errors import RankError, Stopped, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from train.launch.environment import RankContext

T = TypeVar("T")

# For every rank to notice a failed collective.
LIVENESS_SECONDS = 5.0
# Seconds beyond the timeout for a server to answer after it has accepted.
CONNECT_SLACK = 5.0
# Between two looks at the other ranks' keys before the run.
HELLO_SECONDS = 0.02
# For the other ranks to leave the store at the end.
LEAVE_SECONDS = 1.0
# FileStore writes this first: the length of a key, and the key.
FILE_STORE_START = b"\x09\0\0\0refcount/"
# RuntimeErrors of gloo and NCCL contain these texts when a peer has ended or hangs.
PEER_ERRORS = (
    *("Connection closed by peer", "Connection reset by peer", "Socket closed", "Broken pipe"),
    *("Timed out waiting", "Application timeout caused pair closure", "ncclRemoteError"),
)


class PeerLost(Exception):
    """Another rank ended, or did not respond within the timeout, during a collective."""


@contextmanager
def process_group(ctx: RankContext, timeout: float) -> Iterator[None]:
    """Keep the process group open for the block.

    timeout: seconds to wait for the other ranks, at the rendezvous and in each collective; torch's default of 30
    minutes looks like a hang. Raises UserError or RankError if the ranks cannot connect, PeerLost if a rank is
    lost during the block.
    """
    if ctx.device.type == "cuda":
        torch.cuda.set_device(ctx.device)
        # Two runs with one seed must be bitwise equal.
        torch.backends.cudnn.deterministic = True
    if ctx.world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        # As torchrun does; otherwise the ranks of a node compete for its cores.
        torch.set_num_threads(1)
    if ctx.backend is None:
        yield
        return
    store = join_process_group(ctx, timeout)
    try:
        yield
    except (UserError, Stopped):
        dist.destroy_process_group()
        leave_store(ctx, store)
        raise
    except RuntimeError as error:
        if any(text in str(error) for text in PEER_ERRORS):
            raise PeerLost(describe_lost_ranks(ctx, store, error)) from error
        raise
    # After any other exception the group stays open: the peers may be inside a collective, and closing the group could
    # wait for them. The process is about to end anyway.
    dist.destroy_process_group()
    leave_store(ctx, store)


def join_process_group(ctx: RankContext, timeout: float) -> Store:
    """Wait for all ranks and initialize torch.distributed; return the store. Raises RankError."""
    wait = timedelta(seconds=timeout)
    store: Store
    try:
        check_address(ctx)
        # torch waits without end for a server that accepts and does not answer, such as another program at the port.
        store, _, _ = call_with_deadline(
            lambda: next(rendezvous(unquote(ctx.init_method), ctx.rank, ctx.world_size, timeout=wait)),
            timeout + CONNECT_SLACK,
        )
        store.set_timeout(wait)
        store = PrefixStore(agree_on_attempt(ctx, store, timeout), store)
        dist.init_process_group(
            ctx.backend,
            store=PrefixStore("default_pg", store),  # as init_process_group(init_method=...) does
            rank=ctx.rank,
            world_size=ctx.world_size,
            timeout=wait,
            device_id=ctx.device if ctx.backend == "nccl" else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise RankError(
            f"rank {ctx.rank} of {ctx.world_size} could not join the other ranks at {ctx.init_method}: "
            f"{_first_line(error) or 'the server is not a torch store'}; start every rank with this address, or see "
            "its message; on several machines set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the network to use"
        ) from error
    return PrefixStore("train", store)


def agree_on_attempt(ctx: RankContext, store: Store, timeout: float) -> str:
    """Return a name that all ranks of this start share, and no earlier start in the same store has used.

    torchrun keeps its store over restarts, and a killed run leaves its file, so any key may be of an earlier start: its
    gloo addresses would be refused. TORCHELASTIC_RESTART_COUNT does not tell them apart, because agents count their own
    restarts. Therefore every rank says hello with a new number, and follows the attempt of rank 0 that answers it.
    Raises TimeoutError.
    """
    deadline = time.monotonic() + timeout
    number = uuid.uuid4().hex
    if ctx.rank > 0:
        store.set(f"hello/{ctx.rank}", number)
        while number not in (answer := _get_text(store, "attempt")):
            _wait_a_little(deadline, f"rank 0 did not join, or another process is rank {ctx.rank} too")
        attempt = answer.split()[0]
        store.set(f"{attempt}/joined/{ctx.rank}", "")
        # torch counts the groups of a process, also those that fail, and ranks with other counts never meet. So no rank
        # makes the group before all ranks have joined.
        while not store.check([f"{attempt}/complete"]):
            _wait_a_little(deadline, "another rank did not join")
        return attempt

    missing = list(range(1, ctx.world_size))
    while missing:
        numbers = [_get_text(store, f"hello/{rank}") for rank in range(1, ctx.world_size)]
        store.set("attempt", " ".join([number, *numbers]))
        _wait_a_little(deadline, f"{format_ranks(missing)} did not join")
        missing = [rank for rank in missing if not store.check([f"{number}/joined/{rank}"])]
    store.set(f"{number}/complete", "")
    return number


def _get_text(store: Store, key: str) -> str:
    # Store.get() would wait for a missing key.
    return store.get(key).decode() if store.check([key]) else ""


def _wait_a_little(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(problem)
    time.sleep(HELLO_SECONDS)


def leave_store(ctx: RankContext, store: Store) -> None:
    """Remove the rendezvous file after the last rank: torch would do so only if the process freed all its objects."""
    address = urlsplit(ctx.init_method)
    if address.scheme == "file":
        with suppress(OSError, RuntimeError):  # a leftover file is no reason to fail
            path = Path(unquote(address.path)).resolve()  # not just a link to it
            if store.add("finished", 1) == ctx.world_size:
                path.unlink(missing_ok=True)
            # The destructor of a store that still finds the file opens it twice, and so creates it again if the last
            # rank removes it in between.
            deadline = time.monotonic() + LEAVE_SECONDS
            while path.exists() and time.monotonic() < deadline:
                time.sleep(HELLO_SECONDS)


def uses_agent_store() -> bool:
    """Return whether torchrun's agent holds the keys."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def check_address(ctx: RankContext) -> None:
    """Check what torch does not: it would append to any file, and retry an unknown host until the timeout.

    Raises RankError, or ValueError or OSError for an unknown host.
    """
    address = urlsplit(ctx.init_method)
    if address.scheme == "file":
        check_store_file(Path(unquote(address.path)))
    else:
        socket.getaddrinfo(address.hostname, address.port)


def check_store_file(path: Path) -> None:
    """Create the store's file, or check that FileStore wrote it: FileStore would append to any file, or hang.

    Raises RankError.
    """
    problem = "it is not a rendezvous file"
    try:
        # In this order, because other ranks may create the file at any moment. Opening a pipe would block.
        if not path.exists() or path.is_file():
            with path.open("a+b") as file:
                file.seek(0)
                if FILE_STORE_START.startswith(file.read(len(FILE_STORE_START))):
                    return
    except OSError as error:
        problem = error.strerror or str(error)
    raise RankError(f"cannot use file://{path} for the rendezvous: {problem}; give --init-method a new path")


def find_missing_ranks(store: Store, event: str, ranks: Sequence[int], seconds: float) -> list[int]:
    """Wait until all of `ranks` have set their key of an event; return the ranks whose key is still missing."""
    keys = {rank: f"{event}/{rank}" for rank in ranks}
    with suppress(RuntimeError):  # a timeout; if the store is gone, check raises it again
        store.wait(list(keys.values()), timedelta(seconds=max(seconds, 0.1)))
        return []
    return [rank for rank, key in keys.items() if not store.check([key])]


def describe_lost_ranks(ctx: RankContext, store: Store, error: RuntimeError) -> str:
    """Describe a failed collective and name the ranks without a response.

    gloo and NCCL name an address at best. Takes up to LIVENESS_SECONDS.
    """
    try:
        lost = call_with_deadline(lambda: find_lost_ranks(ctx, store), LIVENESS_SECONDS + CONNECT_SLACK)
    except (RuntimeError, TimeoutError):
        # The store does not respond: rank 0 serves it, rather than a file or torchrun's agent.
        lost = [0] if ctx.init_method.startswith("tcp:") and not uses_agent_store() else []
    return f"rank {ctx.rank} lost {format_ranks(lost) if lost else 'another rank'} ({_first_line(error)})"


def find_lost_ranks(ctx: RankContext, store: Store) -> list[int]:
    """Report a failed collective to the other ranks; return the ranks without such a report."""
    if ctx.backend == "gloo":
        # After a timeout gloo closes all connections of the group, so every rank that waits for this rank notices too.
        # Otherwise only the neighbors of the lost rank would, and their neighbors after them.
        with suppress(RuntimeError):
            dist.irecv(torch.empty(1)).wait(timedelta(milliseconds=1))  # type: ignore[union-attr]
    store.add(f"failed/{ctx.rank}", 1)
    # If rank 0 serves the store, it has to outlive the check of the other ranks.
    return find_missing_ranks(store, "failed", range(ctx.world_size), LIVENESS_SECONDS + (ctx.rank == 0))


def call_with_deadline(function: Callable[[], T], seconds: float) -> T:
    """Call a function in a thread, because a store waits forever for a server that is stopped or of another kind.

    Raises TimeoutError, or what the function raises.
    """
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001  # raised again by the caller
            result.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return result.result(seconds)


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message, at most ten of them: "rank 3", "ranks 1, 2"."""
    more = f" and {len(ranks) - 10} more" if len(ranks) > 10 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:10]))}{more}"


def _first_line(error: BaseException) -> str:
    # gloo prefixes a source location, and appends advice.
    line = str(error).strip().partition("\n")[0].partition(" This is typically")[0]
    return re.sub(r"^\[[^\]]*\.(?:cc|h|cpp):\d+\] ", "", line)
