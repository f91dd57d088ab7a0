"""Optimizers of ranks that divide the parameters of one model, as in ZeRO."""

from __future__ import annotations

from itertools import chain, combinations, starmap
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.live.channel import Channel
    from syncheck.live.watching.watcher import Watcher

    Names = tuple[str, ...]


def find_divided(names_of_ranks: Mapping[int, Sequence[Names]]) -> set[str]:
    """Return the parameters that ranks divide, by the parameters of each optimizer of each rank.

    Sets of parameters on some ranks only are parts if the sets of any two ranks are equal or have no common parameter.
    If a rank lacks a parameter by mistake, the ranks overlap, or only a single set is left.
    """
    sets_of_ranks = list(map(set, names_of_ranks.values()))
    common: set[Names] = set.intersection(*sets_of_ranks)
    parts = set()
    for sets in sets_of_ranks:
        parts.add(frozenset(chain(*sets.difference(common))))
    parts.discard(frozenset())
    pairs = list(combinations(parts, 2))
    are_apart = [len(parts) > 1, *starmap(frozenset.isdisjoint, pairs)]
    return set(chain(*parts)) if all(are_apart) else set()


def list_undivided(watcher: Watcher, ranks: tuple[int, ...], channel: Channel) -> tuple[list[Any], bool]:
    """Return the optimizers of some ranks with copies of states, and whether optimizers are left out. Collective."""
    optimizers = watcher.list_optimizers(ranks)
    names: dict[Any, Names] = {}
    for optimizer in optimizers:
        layouts = watcher.list_layouts_of(optimizer)
        names[optimizer] = tuple(chain(*map(attrgetter("names"), layouts)))
    # Most ranks train alike, and many names are long.
    checksum = crc32(repr(list(names.values())).encode())
    if len(set(channel.gather(checksum, "optimizers").values())) == 1:
        return optimizers, False
    divided = find_divided(channel.gather(tuple(names.values()), "parts"))
    undivided = []
    for optimizer in optimizers:
        if divided.isdisjoint(names[optimizer]):
            undivided.append(optimizer)
        else:
            # The comparison has copies of the parameters, unlike the witnesses.
            watcher.outdated.update(map(attrgetter("key"), watcher.list_layouts_of(optimizer)))
    return undivided, bool(divided)
