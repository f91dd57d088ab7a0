"""Which number of a path is the rank: nodes have ranks too, parts of a model have, and a rank may be said twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from checkpoints import snapshot

from syncheck import layout

if TYPE_CHECKING:
    from syncheck.layout.groups import Replicas


def groups(*paths: str) -> tuple[Replicas, ...]:
    """Group files without metadata."""
    return layout.group([snapshot(path) for path in paths])


@pytest.mark.parametrize("folder", ["node_rank_{}", "node-rank{}", "group_rank{}", "machine_rank_{}"])
def test_the_rank_of_a_node_is_no_rank(folder: str) -> None:
    """Ranks in a folder for each node are one group, so that nodes are compared with each other."""
    paths = [f"c/{folder.format(rank // 2)}/rank_{rank}.pth" for rank in range(4)]
    (group,) = groups(*paths)
    assert [(rank, s.path) for rank, s in group.ranks] == list(enumerate(paths))


@pytest.mark.parametrize("pattern", ["tp_rank_0{}/w.ckpt", "tp_rank_00_pp_rank_00{}/w.ckpt", "model_ep_rank{}.pt"])
def test_ranks_of_parts_are_no_replicas(pattern: str) -> None:
    """Files of tensor, pipeline or expert parallel ranks, as NeMo names them, hold other parts of the model."""
    found = groups(*(pattern.format(i) for i in range(2)))
    assert [len(group.ranks) for group in found] == [1, 1]
    assert "each file holds another part of the model" in found[0].note


def test_data_parallel_ranks_beside_those_of_parts() -> None:
    """Of ranks of both kinds in a name, the data-parallel one is the rank; DeepSpeed's zero_pp_rank is such a one."""
    for pattern in ("dp_rank_{}_tp_rank_{}.pt", "zero_pp_rank_{}_mp_rank_0{}_model_states.pt"):
        found = groups(*(pattern.format(dp, tp) for dp in range(2) for tp in range(2)))
        assert [[rank for rank, _ in group.ranks] for group in found] == [[0, 1], [0, 1]]


def test_a_rank_said_twice_is_one_rank() -> None:
    """rank_0/model_rank_0.pth and rank_1/model_rank_1.pth are replicas; optimizers beside them are a group, too."""
    paths = [f"c/rank_{rank}/{what}_rank_{rank}.pth" for what in ("model", "optim") for rank in range(3)]
    found = groups(*paths)
    assert [[rank for rank, _ in group.ranks] for group in found] == [[0, 1, 2]] * 2
    assert {group.run for group in found} == {"model", "optim"}


@pytest.mark.parametrize(
    "pattern",
    [
        "n{0}_local_rank{1}_global_rank{2}.pth", "global_rank{2}_local_rank{1}.pth", "n{0}/local_rank{1}/rank{2}.pth",
        "node{0}/rank_{2}/model_rank_{2}.pth", "node_rank{0}_local_rank{1}_rank{2}.pth",
    ],
)  # fmt: skip
def test_the_rank_within_a_node_does_not_keep_apart(pattern: str) -> None:
    """Beside a global rank, neither the rank within the node nor that of the node sorts the files into groups."""
    (group,) = groups(*(pattern.format(rank // 2, rank % 2, rank) for rank in range(4)))
    assert [rank for rank, _ in group.ranks] == [0, 1, 2, 3]


def test_the_rank_within_a_node_alone_is_the_rank() -> None:
    """Where no other rank stands in the names, it is the only one there is."""
    (group,) = groups("c/local_rank0.pth", "c/local_rank1.pth")
    assert [rank for rank, _ in group.ranks] == [0, 1]


def test_numbers_that_are_not_the_same_keep_apart() -> None:
    """rank_0/rank_1.pth is not said twice: each folder is a group of its own."""
    paths = [f"c/rank_{folder}/rank_{rank}.pth" for folder in range(2) for rank in range(2)]
    assert [len(group.ranks) for group in groups(*paths)] == [2, 2]


def test_a_rank_of_two_files_is_said() -> None:
    """Where names give a rank to two files, positions stand for ranks, and the note does not claim otherwise."""
    (group,) = groups("c/rank0.pth", "c/rank0.safetensors", "c/rank1.pth", "c/rank1.safetensors")
    assert [rank for rank, _ in group.ranks] == [0, 1, 2, 3]
    assert group.note == "numbered by their order, for the names give a rank to several files"
