"""Sets of ranks: replica groups, and clusters of equal replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def find_set(rank: int, sets: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the set of ranks that includes a rank; empty if no set does."""
    for ranks in sets:
        if rank in ranks:
            return ranks

    return ()
