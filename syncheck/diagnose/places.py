"""What the rules have in common that look at where ranks stand: on which host, at which place of a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import differ
from syncheck.evidence.suspects import sets_within
from syncheck.records import names_text

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping

    from syncheck.records import TensorDiff

# Kinds that a step moves on all ranks alike.
_SHARED = ("parameter", "optimizer", "optimizer_step", "ema")


def others_text(tensors: Iterable[TensorDiff], ranks: Collection[int]) -> str:
    """Name what differs among the other ranks too, so that nothing hides behind a cause that is of these ranks alone.

    Running statistics and buffers follow each rank's data, and are not asked. '' where the others agree.
    """
    odd = set(ranks)
    names = [
        diff.name
        for diff in tensors
        if diff.kind in _SHARED and any(sum(not odd.issuperset(of) for of in sets) > 1 for sets in sets_within(diff))
    ]
    if not names:
        return ""
    return f"; {len(names)} of these tensors {differ(len(names))} among the other ranks too: {names_text(names)}"


def divided_by(diff: TensorDiff, places: Mapping[int, Hashable]) -> bool:
    """Whether ranks of one place always hold the same bytes of a tensor that differs, within each replica group."""
    found = sets_within(diff)
    for sets in found:
        of_place: dict[Hashable, int] = {}
        for i, ranks in enumerate(sets):
            if any(of_place.setdefault(places[rank], i) != i for rank in ranks):
                return False
    return bool(found)
