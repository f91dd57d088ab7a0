"""The board: ranks post small records in the process group's store, and no rank ever waits for another rank.

A record is appended to one key for each tick of a replica group's clock, and torch's store joins the records of all
ranks in one value. Posting takes a few microseconds and returns at once. Reading happens in threads of their own, with
clones of the store's client: a read on the client of the script would block the script's own calls.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREFIX = "syncheck-watch"
# Seconds between two looks at the store.
PAUSE = 0.02


class Unusable(Exception):
    """The store of this process group cannot be used; its text is the reason."""


class Board:
    """A client of the store of the default process group.

    store: the client that posts and reads; a board belongs to one thread.
    owner: the store of the script, kept alive because rank 0 may serve it.
    """

    def __init__(self, store: Any, owner: Any) -> None:
        self._store, self._owner = store, owner

    @classmethod
    def open(cls) -> Board:
        """Return a board with a client of its own. Raises Unusable."""
        distributed: Any = sys.modules["torch.distributed"]
        # torch has no public name for it; init_process_group may have created it.
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
        # A FileStore reads its whole file for each key, and has no clones.
        try:
            clone = store.clone()
            extended = clone.has_extended_api()
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            raise Unusable(_describe_store(store)) from error
        if not extended:
            raise Unusable(_describe_store(store))
        return cls(distributed.PrefixStore(_PREFIX, clone), store)

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

    def delete(self, key: str) -> None:
        """Remove the records of a key, which were judged."""
        self._store.delete_key(key)


def _describe_store(store: Any) -> str:
    inner = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    return f"its store is a {type(inner).__name__}, which cannot be read without waiting; use tcp:// or torchrun"
