"""What the rules have in common that look at where ranks stand: on which host, at which place of a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from syncheck.records import TensorDiff


def sets_within(diff: TensorDiff) -> list[list[tuple[int, ...]]]:
    """Return, of each replica group within which bytes differ, the sets of ranks that hold equal bytes."""
    everyone = tuple(sorted(rank for ranks in diff.clusters for rank in ranks))
    groups = [set(group) for group in diff.replica_groups or (everyone,)]
    found = [[ranks for ranks in diff.clusters if set(ranks) <= group] for group in groups]
    return [sets for sets in found if len(sets) > 1]


def divided_by(diff: TensorDiff, places: Mapping[int, Hashable]) -> bool:
    """Whether ranks of one place always hold the same bytes of a tensor that differs, within each replica group."""
    found = sets_within(diff)
    for sets in found:
        of_place: dict[Hashable, int] = {}
        for i, ranks in enumerate(sets):
            if any(of_place.setdefault(places[rank], i) != i for rank in ranks):
                return False
    return bool(found)
