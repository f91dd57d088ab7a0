"""Who agrees with whom where the ranks hold several parts of a tensor."""

from __future__ import annotations

import pytest

from syncheck.evidence.suspects import sets_within
from syncheck.records import TensorDiff
from syncheck.report.words import clusters_text

Sets = tuple[tuple[int, ...], ...]


def apart(groups: Sets, clusters: Sets) -> TensorDiff:
    """Return a tensor whose ranks hold equal bytes by clusters, and ought to by groups."""
    return TensorDiff("w", "parameter", "float32", (4,), "different", replica_groups=groups, clusters=clusters)


@pytest.mark.parametrize(
    ("groups", "clusters", "expected"),
    [
        (((0, 1, 2),), ((0, 2), (1,)), [[(0, 2), (1,)]]),
        ((), ((0, 2), (1,)), [[(0, 2), (1,)]]),
        (((0, 1), (2, 3)), ((0,), (1,), (2,), (3,)), [[(0,), (1,)], [(2,), (3,)]]),
        (((0, 1), (2, 3)), ((2,), (3,)), [[(2,), (3,)]]),
        (((0, 1),), ((0,),), []),
    ],
)
def test_sets_by_the_part_that_they_hold(groups: Sets, clusters: Sets, expected: list[list[tuple[int, ...]]]) -> None:
    """Sets of equal ranks stand beside those of their own part; a part that is equal everywhere has no place."""
    assert sets_within(apart(groups, clusters)) == expected


class Rank(int):
    """A rank that counts how often it is looked up or compared."""

    touched = 0

    def __hash__(self) -> int:
        Rank.touched += 1
        return int.__hash__(self)

    def __eq__(self, other: object) -> bool:
        Rank.touched += 1
        return int.__eq__(self, other) is True


def test_hundreds_of_parts_are_not_held_against_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 shards on two ranks each a rank is looked at a few times: 1,024 ranks took a second a tensor."""
    monkeypatch.setattr(Rank, "touched", 0)
    ranks = [Rank(rank) for rank in range(1024)]
    diff = apart(tuple((rank, ranks[512 + rank]) for rank in ranks[:512]), tuple((rank,) for rank in ranks))
    assert len(sets_within(diff)) == 512
    assert clusters_text(diff) == "0 | 512; 1 | 513; 2 | 514; 3 | 515; 508 more"
    assert Rank.touched < 20 * len(ranks)
