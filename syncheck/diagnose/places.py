"""What the rules have in common that look at where ranks stand: on which host, at which place of a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.evidence.suspects import sets_within

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from syncheck.records import TensorDiff


def divided_by(diff: TensorDiff, places: Mapping[int, Hashable]) -> bool:
    """Whether ranks of one place always hold the same bytes of a tensor that differs, within each replica group."""
    found = sets_within(diff)
    for sets in found:
        of_place: dict[Hashable, int] = {}
        for i, ranks in enumerate(sets):
            if any(of_place.setdefault(places[rank], i) != i for rank in ranks):
                return False
    return bool(found)
