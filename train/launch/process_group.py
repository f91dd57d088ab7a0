"""Open and close the process group: connect to torch's store, wait for all ranks, and name ranks lost later.

dist.init_process_group could do the rendezvous alone, but its errors name no rank. Here every rank first adds a key of
its own to the store, and a missing key is a missing rank. The liveness check after a failed collective works alike.
(dist.monitored_barrier names ranks that hang, but for a killed rank it raises gloo's error, which has an address only.)
"""

from __future__ import annotations

import ctypes
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
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # no __all__

from train.errors import RankError, Stopped, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from train.launch.environment import RankContext

T = TypeVar("T")

LIVENESS_SECONDS = 5.0  # for every rank to notice a failed collective
CONNECT_SLACK = 5.0  # seconds beyond the timeout for a server to answer after it has accepted
FILE_STORE_START = b"\x09\0\0\0refcount/"  # FileStore writes this first: the length of a key, and the key
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
        torch.backends.cudnn.deterministic = True  # two runs with one seed must be bitwise equal
    if ctx.world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun does; otherwise the ranks of a node compete for its cores
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
    """Wait for all ranks and initialize torch.distributed; return the store. Raises UserError or RankError."""
    store = open_store(ctx, timeout)
    try:
        store.add("users", 1)
        run = wait_for_all_ranks(ctx, store, timeout)
        dist.init_process_group(
            ctx.backend,
            store=PrefixStore(run, store),
            rank=ctx.rank,
            world_size=ctx.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=ctx.device if ctx.backend == "nccl" else None,
        )
    except UserError:
        leave_store(ctx, store)
        raise
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {ctx.rank} of {ctx.world_size} lost the other ranks at {ctx.init_method}: {_first_line(error)}; see "
            "their messages, and on several machines set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the network to use"
        ) from error
    return store


def open_store(ctx: RankContext, timeout: float) -> Store:
    """Open the store at ctx.init_method: a file, or a TCP server in rank 0 or torchrun's agent. Raises RankError."""
    store: Store
    try:
        if ctx.init_method.startswith("file:"):
            path = store_path(ctx)
            check_store_file(path)
            store = FileStore(str(path))
            store.set_timeout(timedelta(seconds=timeout))
            # Never released: ~FileStore counts itself out in the file, and would create it again if the last rank
            # removes it at the same moment.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
        else:
            serve = ctx.rank == 0 and not uses_agent_store()
            # Rank 0 connects to its own server, by whatever address the other ranks reach it.
            host = "localhost" if serve else wait_for_server(ctx, timeout)
            port, wait = urlsplit(ctx.init_method).port or 0, timedelta(seconds=timeout)
            store = call_with_deadline(
                lambda: TCPStore(host, port, None, serve, wait, wait_for_workers=False), timeout + CONNECT_SLACK
            )
    except (RuntimeError, TimeoutError) as error:
        reason = _first_line(error) or "the server is not a torch store"
        advice = "choose another file, or a free port with --port or torchrun's --master-port"
        raise RankError(f"rank {ctx.rank} cannot use {ctx.init_method}: {reason}; {advice}") from error
    return PrefixStore("train", store)


def uses_agent_store() -> bool:
    """Return whether torchrun's agent holds the keys."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def wait_for_server(ctx: RankContext, timeout: float) -> str:
    """Wait until rank 0 listens; return its host. TCPStore would log a C++ stack trace for each failed attempt."""
    address = urlsplit(ctx.init_method)
    host, port, deadline = address.hostname or "", address.port or 0, time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), max(deadline - time.monotonic(), 0.1)).close()
            return host
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline or isinstance(error, socket.gaierror | UnicodeError):
                reason = getattr(error, "strerror", None) or "no answer"
                advice = "start rank 0, or see its message; check the address (--ip or MASTER_ADDR) and the firewall"
                message = f"rank {ctx.rank} cannot connect to rank 0 at {ctx.init_method} ({reason}); {advice}"
                raise RankError(message) from error
            time.sleep(0.1)


def store_path(ctx: RankContext) -> Path:
    """Return the path in a file:///PATH address."""
    return Path(unquote(urlsplit(ctx.init_method).path))


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


def wait_for_all_ranks(ctx: RankContext, store: Store, timeout: float) -> str:
    """Wait until all ranks have joined the run announced by rank 0 in the store; return the id of the run.

    The last rank deletes the keys, so that the next run can use the same file, or torchrun's store after a restart: the
    agents of torchrun may count restarts differently, so keys with TORCHELASTIC_RESTART_COUNT would not match.
    Raises RankError if this rank contradicts another rank, UserError if ranks are missing.
    """
    who, settings = f"rank {ctx.rank} of {ctx.world_size}", f"{ctx.world_size} ranks on {ctx.backend}"
    deadline = time.monotonic() + timeout
    missing = []
    if ctx.rank == 0:
        store.set("run", f"{uuid.uuid4().hex} {settings}")
    else:
        missing = find_missing_ranks(store, "joined", [0], timeout)
    if not missing:
        run, _, expected = store.get("run").decode().partition(" ")
        if settings != expected:
            raise RankError(
                f"{who} was started for {settings}, rank 0 at {ctx.init_method} for {expected}: give all ranks the "
                "same --world-size, and the same --backend or --gpus"
            )
        if store.add(f"joined/{ctx.rank}", 1) > 1 and not uses_agent_store():
            raise RankError(
                f"{who} has already joined at {ctx.init_method}: give each process a rank of its own; if an earlier "
                "run was killed there, use a new file or another port"
            )
        missing = find_missing_ranks(store, "joined", range(ctx.world_size), deadline - time.monotonic())
    if missing:
        # If the ranks share a terminal, only rank 0 prints a UserError; without rank 0 each rank prints its own.
        raise (RankError if 0 in missing else UserError)(
            f"{who} waited {timeout:g} s at {ctx.init_method}: {format_ranks(missing)} did not join; start every rank, "
            "or see its own message"
        )
    if store.add(f"{run}/joined", 1) == ctx.world_size:
        for rank in range(ctx.world_size):
            store.delete_key(f"joined/{rank}")
            store.delete_key(f"failed/{rank}")
    return run


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


def leave_store(ctx: RankContext, store: Store) -> None:
    """Remove the file of the store after its last user."""
    if ctx.init_method.startswith("file:"):
        with suppress(OSError, RuntimeError):  # a leftover file is no reason to fail
            if store.add("users", -1) == 0:
                store_path(ctx).resolve().unlink(missing_ok=True)  # not just a link to it


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
