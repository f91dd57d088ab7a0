"""Optimizers of ranks that divide the parameters of one model, as ZeRO does: each rank updates its own part."""

from __future__ import annotations

from itertools import chain, combinations, filterfalse, starmap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.live.channel import Channel
    from syncheck.live.watching.watcher import Watcher

    Names = tuple[str, ...]


def find_divided(names_of_ranks: Mapping[int, Sequence[Names]]) -> set[str]:
    """Return the parameters that ranks divide, by the parameters of each optimizer of each rank.

    Sets of parameters on some ranks only are parts if those of any two ranks are equal or have no common parameter.
    A parameter without an optimizer on a single rank is no part: the ranks overlap, or only one set is left.
    """
    sets_of_ranks = list(map(set, names_of_ranks.values()))
    common: set[Names] = set.intersection(*sets_of_ranks)
    parts = set()
    for sets in sets_of_ranks:
        parts.add(frozenset(chain(*sets.difference(common))))
    parts.discard(frozenset())
    are_apart = all(starmap(frozenset.isdisjoint, combinations(parts, 2)))
    return set(chain(*parts)) if are_apart and len(parts) > 1 else set()


def list_undivided(watcher: Watcher, ranks: tuple[int, ...], channel: Channel) -> tuple[list[Any], bool]:
    """Return the optimizers of some ranks whose states are copies, and whether others are left out. On all ranks."""
    optimizers = watcher.list_optimizers(ranks)
    signatures: list[str] = []
    names: dict[Any, Names] = {}
    for optimizer in optimizers:
        layouts = watcher.find_layouts(optimizer)
        for layout in layouts:
            signatures.append(layout.signature)
        names[optimizer] = tuple(chain.from_iterable(layout.names for layout in layouts))
    # Most ranks train alike, and many names are long.
    if len(set(channel.gather(tuple(signatures), "optimizers").values())) == 1:
        return optimizers, False
    divided = find_divided(channel.gather(tuple(names.values()), "parts"))
    undivided = list(filterfalse(lambda optimizer: not divided.isdisjoint(names[optimizer]), optimizers))
    return undivided, bool(divided)
