"""Who holds what of one tensor or value: each set of ranks that hold the same is a vote for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncheck.records import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.records import TensorDiff, ValueDiff

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vote:
    """Who holds what of one tensor or value within one replica group.

    sets: ranks that hold the same, largest first. absent: the ranks without it. groups: all replica groups of the
    tensor. counts: whether it makes the ranks differ; bytes that are equal as numbers do not.
    """

    name: str
    kind: str
    ranks: Ranks
    sets: tuple[Ranks, ...]
    groups: tuple[Ranks, ...]
    absent: Ranks = ()
    counts: bool = True

    @property
    def majority(self) -> Ranks:
        """The set of more than half of the ranks; empty where there is none."""
        first = self.sets[0]
        return first if 2 * len(first) > len(self.ranks) else ()

    @property
    def told(self) -> str:
        """How it went: '3 versions on 4 ranks, the largest on ranks 0, 1'."""
        first, second, *_ = (*map(len, self.sets), 0)
        if first == 1:
            return f"another on each of {len(self.ranks)} ranks"
        most = f"none on more than {first}" if first == second else f"the largest on {ranks_text(self.sets[0])}"
        return f"{len(self.sets)} versions on {len(self.ranks)} ranks, {most}"


def of_tensor(diff: TensorDiff, groups: tuple[Ranks, ...]) -> list[Vote]:
    """Return who holds which bytes of a tensor, for each replica group in which they differ."""
    if diff.status == "not_compared" and diff.reason != "missing":
        return []
    missing = diff.reason == "missing"
    having = {rank for held in diff.clusters for rank in held}
    counts = diff.out_of_sync or diff.status == "different"
    found = []
    for members in groups:
        sets = [held for held in diff.clusters if set(held) <= set(members)]
        told = {rank for held in sets for rank in held}
        # Where some ranks lack the tensor, those that have it and are in no set of this group do not differ in it.
        alike = tuple(rank for rank in members if missing and rank in having - told)
        absent = tuple(rank for rank in members if missing and rank not in having)
        sets += [held for held in (alike, absent) if held]
        if len(sets) > 1:
            ordered = _largest_first(sets)
            found.append(Vote(diff.name, diff.kind, tuple(sorted(members)), ordered, groups, absent, counts))
    return found


def of_value(value: ValueDiff, ranks: Ranks) -> Vote:
    """Return who holds which value; NaN is equal to itself here."""
    sets: list[tuple[object, list[int]]] = []
    for rank in ranks:
        own = value.by_rank.get(rank)
        same = next((of for held, of in sets if held == own or (held != held and own != own)), None)
        if same is None:
            sets.append((own, [rank]))
        else:
            same.append(rank)
    absent = tuple(rank for rank in ranks if value.by_rank.get(rank) is None)
    return Vote(value.name, "value", ranks, _largest_first(tuple(of) for _, of in sets), (ranks,), absent)


def _largest_first(sets: Iterable[Ranks]) -> tuple[Ranks, ...]:
    return tuple(sorted(sets, key=lambda held: (-len(held), held[0])))
