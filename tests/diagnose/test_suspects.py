"""Sets of equal ranks if ranks hold different shards of a tensor."""

from __future__ import annotations

import pytest

from syncheck.records import TensorDiff, sets_within
from syncheck.report.tables import clusters_text

Sets = tuple[tuple[int, ...], ...]


def make_diff(groups: Sets, clusters: Sets) -> TensorDiff:
    """Return a tensor with expected replica groups and actual clusters of equal ranks."""
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
def test_sets_within_replica_groups(groups: Sets, clusters: Sets, expected: list[list[tuple[int, ...]]]) -> None:
    """Sets of equal ranks are listed by replica group, and groups without differences are not listed."""
    assert sets_within(make_diff(groups, clusters)) == expected


class Rank(int):
    """A rank that counts its hash calls and comparisons."""

    touched = 0

    def __hash__(self) -> int:
        Rank.touched += 1
        return int.__hash__(self)

    def __eq__(self, other: object) -> bool:
        Rank.touched += 1
        return int.__eq__(self, other) is True


def test_shards_are_not_compared_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 512 shards on two ranks each, the number of comparisons grows with the ranks, not with their square.

    Comparisons in pairs took 1,024 ranks one second per tensor.
    """
    monkeypatch.setattr(Rank, "touched", 0)
    ranks = [Rank(rank) for rank in range(1024)]
    diff = make_diff(tuple((rank, ranks[512 + rank]) for rank in ranks[:512]), tuple((rank,) for rank in ranks))
    assert len(sets_within(diff)) == 512
    assert clusters_text(diff) == "0 | 512; 1 | 513; 2 | 514; 3 | 515; 508 more"
    assert Rank.touched < 20 * len(ranks)
