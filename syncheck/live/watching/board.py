"""The board: ranks post small records in the process group's store, and no rank ever waits for another rank.

A record is appended to one key for each tick of a replica group's clock, and torch's store joins the records of all
ranks in one value. Posting takes a few microseconds and returns at once. Reading happens in threads of their own, with
clones of the store's client: a read on the client of the script would block the script's own calls.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from syncheck.live.channel import world_size
from syncheck.live.watching.wrappers import wrap

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREFIX = "syncheck-watch"
_ADDRESS = f"{_PREFIX}/address"
_JOINED = "joined"
# For the first rank to tell the address of its own store.
_ADDRESS_TIME = timedelta(seconds=5)
# Seconds between two looks at the store.
PAUSE = 0.02


class Unusable(Exception):
    """The store of this process group cannot be used; its text is the reason."""


class Board:
    """A client of the store of the default process group.

    store: the client that posts and reads; a board belongs to one thread.
    owner: the store of the script, kept alive because rank 0 may serve it; None if the board needs it no longer.
    """

    def __init__(self, store: Any, owner: Any) -> None:
        self._store, self._owner = store, owner

    @classmethod
    def open(cls) -> Board:
        """Return a board with a client of its own. Raises Unusable."""
        distributed: Any = sys.modules["torch.distributed"]
        # torch has no public name for it; init_process_group may have created it.
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
        if _is_of_launcher(store):
            return cls(distributed.PrefixStore(_PREFIX, store.clone()), store)
        # A FileStore reads its whole file for each key, and removes it when nobody holds the store any more, so that
        # the next run can use the path. A store that the first rank serves must end with the process group, so that the
        # script can create another group at the same port.
        board = cls(distributed.PrefixStore(_PREFIX, _join_own_store(store)), None)
        board.post(_JOINED, {"rank": distributed.get_rank()})
        return board

    @classmethod
    def open_of_launcher(cls) -> Board | None:
        """Return a board if a launcher serves the store, so that opening it takes no time; None otherwise."""
        if world_size() < 2:
            return None
        distributed: Any = sys.modules["torch.distributed"]
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it
        return cls.open() if _is_of_launcher(store) else None

    def clone(self) -> Board:
        """Return a board for another thread."""
        distributed: Any = sys.modules["torch.distributed"]
        return Board(distributed.PrefixStore(_PREFIX, self._store.underlying_store.clone()), self._owner)

    def post(self, key: str, record: Mapping[str, Any]) -> None:
        """Append a record to a key. Never waits for another rank."""
        self._store.append(key, json.dumps(record, separators=(",", ":")) + "\n")

    def read(self, key: str) -> list[dict[str, Any]]:
        """Return the records of a key so far. Takes two messages to the store and back, and never waits.

        Store.wait() would write a warning of torch to stderr after each timeout.
        """
        if not self._store.check([key]):
            return []
        return [json.loads(row) for row in self._store.get(key).splitlines()]

    def wait(self, key: str, count: int, seconds: float) -> list[dict[str, Any]]:
        """Return the records of a key when there are as many as expected, or after some seconds."""
        deadline = time.monotonic() + seconds
        while len(rows := self.read(key)) < count and time.monotonic() < deadline:
            time.sleep(PAUSE)
        return rows

    def list_served(self) -> set[int]:
        """Return the ranks that use a store of this process; empty if another process serves the store."""
        return {row["rank"] for row in self.read(_JOINED)} if _served else set()

    def delete(self, key: str) -> None:
        """Remove the records of a key, which were judged."""
        self._store.delete_key(key)


def serve_from_start(distributed: Any) -> None:
    """Serve a store on the first rank from the creation of the process group on: it may have no part in the training.

    distributed: the module torch.distributed.
    """
    initialize = distributed.init_process_group

    @wrap(initialize)
    def initialize_watched(*arguments: Any, **named: Any) -> None:
        initialize(*arguments, **named)
        _serve(distributed)

    distributed.init_process_group = initialize_watched
    if distributed.is_initialized():
        _serve(distributed)


# The store that this process serves.
_served: list[Any] = []


def _serve(distributed: Any) -> None:
    """Serve a store on the first rank, and tell its address in the store of the script."""
    if distributed.get_rank() or distributed.get_world_size() < 2:
        return
    # The first step reports what cannot be used.
    with suppress(AttributeError, NotImplementedError, RuntimeError, ValueError):
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it
        if _is_of_launcher(store):
            return
        if not _served:
            _served.append(distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        store.set(_ADDRESS, json.dumps([socket.gethostname(), _served[0].port]))


def _unwrap(store: Any) -> Any:
    """Return the store within prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _is_of_launcher(store: Any) -> bool:
    """Whether torchrun serves a store, as long as any rank runs. The answer is the same on all ranks."""
    port = getattr(_unwrap(store), "port", None)
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("MASTER_PORT") == f"{port}"


def _join_own_store(store: Any) -> Any:
    """Return a store that the first rank serves for watching alone.

    store: of the script, through which the first rank tells the address. Raises Unusable if it does not.
    """
    distributed: Any = sys.modules["torch.distributed"]
    if _served:
        return _served[0]
    try:
        store.wait([_ADDRESS], _ADDRESS_TIME)
        server_host, port = json.loads(store.get(_ADDRESS))
        # The name of this machine need not be known to itself.
        by_name = "localhost" if server_host == socket.gethostname() else server_host
        # The ranks have found the store of the script.
        address = getattr(_unwrap(store), "host", by_name)
        return distributed.TCPStore(address, port, timeout=_ADDRESS_TIME)
    except (NotImplementedError, RuntimeError) as error:
        raise Unusable(_describe_store(store)) from error


def _describe_store(store: Any) -> str:
    name = type(_unwrap(store)).__name__
    return f"its store is a {name}, and this rank reaches no store of the first rank; use torchrun"
