"""Recognizing the rank among the numbers of a path: nodes and model parts have ranks too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from checkpoints import snapshot

from syncheck.layout.grouping import group_replicas
from syncheck.messages import Grouping

if TYPE_CHECKING:
    from syncheck.layout.groups import ReplicaGroup


def groups(*paths: str) -> tuple[ReplicaGroup, ...]:
    """Group files without metadata."""
    return group_replicas([snapshot(path) for path in paths])


@pytest.mark.parametrize("folder", ["node_rank_{}", "node-rank{}", "group_rank{}", "machine_rank_{}"])
def test_the_rank_of_a_node_is_no_rank(folder: str) -> None:
    """Ranks in a folder per node are one group, so that nodes are compared with each other."""
    paths = [f"c/{folder.format(rank // 2)}/rank_{rank}.pth" for rank in range(4)]
    (group,) = groups(*paths)
    assert [(rank, s.path) for rank, s in group.ranks] == list(enumerate(paths))


@pytest.mark.parametrize(
    ("pattern", "mesh"),
    [
        ("tp_rank_0{}/w.ckpt", ["tp"]), ("tp_rank_00_pp_rank_00{}/w.ckpt", ["tp", "pp"]),
        ("model_ep_rank{}.pt", ["ep"]),
        ("w_tp{}_pp0.pt", ["tp", "pp"]),
        ("pp{}.pt", ["pp"]),
    ],
)  # fmt: skip
def test_ranks_of_parts_are_coordinates(pattern: str, mesh: list[str]) -> None:
    """Files of tensor-, pipeline- or expert-parallel ranks are one group, with mesh coordinates."""
    (group,) = groups(*(pattern.format(i) for i in range(2)))
    assert [list(s.mesh) for _, s in group.ranks] == [mesh, mesh]
    assert group.ranks[0][1].mesh != group.ranks[1][1].mesh


@pytest.mark.parametrize(
    "pattern", ["dp_rank_{}_tp_rank_{}.pt", "dp{}_tp{}.pt", "dp-{}/tp-{}/model.pt", "step_7/dp{}_tp{}.pth"]
)
def test_coordinates_of_two_dimensions(pattern: str) -> None:
    """Data- and tensor-parallel coordinates in names give one group of all ranks, in the order of names."""
    (group,) = groups(*(pattern.format(dp, tp) for dp in range(2) for tp in range(2)))
    coordinates = [(rank, s.mesh["dp"], s.mesh["tp"]) for rank, s in group.ranks]
    assert coordinates == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]


def test_data_parallel_and_model_parallel_ranks() -> None:
    """DeepSpeed's zero_pp_rank is the data-parallel rank, and mp_rank separates groups."""
    found = groups(*(f"zero_pp_rank_{dp}_mp_rank_0{tp}_model_states.pt" for dp in range(2) for tp in range(2)))
    assert [[rank for rank, _ in group.ranks] for group in found] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    "pattern",
    [
        "prints/{host}/rank{rank}.fingerprint.json", "{host}/ckpts/rank_{rank}.pth", "run/step_5/{host}/rank{rank}.pt",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "hosts", [("alpha", "beta"), ("10.0.1.5", "10.0.2.7"), ("ip-10-0-1-5", "ip-10-0-1-6"), ("gpu7", "cpu3")]
)
@pytest.mark.parametrize("described", ["no metadata", "metadata", "other steps", "some"])
def test_one_folder_per_host(pattern: str, hosts: tuple[str, str], described: str) -> None:
    """Host folders with different ranks are one group, with any metadata."""
    files = []
    for rank in range(4):
        path = pattern.format(host=hosts[rank // 2], rank=rank)
        block = {"run": "ddp", "rank": rank, "world_size": 4}
        block |= {"step": 5 + rank // 2} if described == "other steps" else {}
        files.append(
            snapshot(path, **({} if described == "no metadata" or (described == "some" and rank > 1) else block))
        )
    (group,) = group_replicas(files)
    assert [rank for rank, _ in group.ranks] == [0, 1, 2, 3]
    assert [s.host for _, s in group.ranks] == [hosts[0], hosts[0], hosts[1], hosts[1]]


def test_hosts_of_several_runs_and_steps() -> None:
    """Hosts are joined within a run and a step; runs with equal ranks stay separate."""
    paths = [
        f"{run}/{'ab'[rank // 2]}/{step}/rank{rank}.pt"
        for run in ("x", "y")
        for step in (100, 200)
        for rank in range(4)
    ]
    found = groups(*paths)
    assert [[rank for rank, _ in group.ranks] for group in found] == [[0, 1, 2, 3]] * 4
    assert sorted((group.run, group.step) for group in found) == [("x", 100), ("x", 200), ("y", 100), ("y", 200)]
    assert [len(group.ranks) for group in groups("a/rank0.pt", "a/rank1.pt", "b/rank0.pt", "b/rank1.pt")] == [2, 2]


@pytest.mark.parametrize(
    "pattern",
    [
        "node_rank{}_local_rank{}.pt", "node{}/rank{}.pt", "group_rank_{}/local_rank_{}.pt", "node{}_gpu{}.pt",
        "host{}-gpu{}.pt", "worker-{}/cuda:{}.pt", "machine_rank_{}/rank_{}/model.pt", "10.0.0.{}/rank{}.pt",
        "node{}/{}.pt", "gpunode0{}/proc{}/last.ckpt",
    ],
)  # fmt: skip
@pytest.mark.parametrize("roots", [False, True])
def test_ranks_within_nodes(pattern: str, roots: bool) -> None:
    """Ranks counted within each node are one group, numbered over all nodes, and not steps."""
    paths = [pattern.format(node, local) for node in range(2) for local in range(2)]
    given = {path: path.partition("/")[0] for path in paths} if roots and "/" in pattern else {}
    (group,) = group_replicas([snapshot(path) for path in paths], None, given)
    assert [(rank, s.path) for rank, s in group.ranks] == list(enumerate(paths))
    hosts = [s.host for _, s in group.ranks]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]


def test_nodes_with_steps() -> None:
    """Steps within nodes remain steps, and other words before a number are names of runs."""
    found = groups(*(f"node{node}/step_{step}/rank{r}.pt" for node in range(2) for step in (5, 9) for r in range(2)))
    assert [(group.step, len(group.ranks)) for group in found] == [(5, 4), (9, 4)]
    found = groups(*(f"node{node}/{step}.pt" for node in range(2) for step in (500, 900)))
    assert [(group.step, len(group.ranks)) for group in found] == [(500, 2), (900, 2)]
    found = groups(*(f"seed{seed}_rank{rank}.pt" for seed in range(2) for rank in range(2)))
    assert [(group.run, group.step, len(group.ranks)) for group in found] == [("seed0", None, 2), ("seed1", None, 2)]


@pytest.mark.parametrize("pattern", ["rank{0}/lora_r{1}.pt", "lora_r{1}/rank{0}.pt", "rank_{0}/lora_rank_{1}/w.pt"])
def test_ranks_of_adapters_are_no_ranks(pattern: str) -> None:
    """The rank of a LoRA adapter separates groups and is neither a process nor a step."""
    found = groups(*(pattern.format(rank, size) for rank in range(2) for size in (8, 16)))
    assert [[rank for rank, _ in group.ranks] for group in found] == [[0, 1], [0, 1]]
    assert {group.step for group in found} == {None}


@pytest.mark.parametrize(
    "pattern", ["rank_{}-of-4.pt", "rank{}-of-4.pt", "model_rank-0000{}-of-00004.pt", "r/rank_{}_of_4.pt"]
)
def test_the_number_of_ranks_beside_the_rank(pattern: str) -> None:
    """A rank followed by the number of ranks is a rank, not a part of a checkpoint."""
    (group,) = groups(*(pattern.format(rank) for rank in range(4)))
    assert [rank for rank, _ in group.ranks] == [0, 1, 2, 3]


def test_files_under_several_names() -> None:
    """A single file joins the only group that lacks its rank, so that it is compared."""
    assert [len(group.ranks) for group in groups("rank0.json", "ckpts/ddp_rank1.pth")] == [2]
    assert [len(group.ranks) for group in groups("a/rank0.pt", "a/rank1.pt", "b/rank2.pt")] == [3]
    assert [len(group.ranks) for group in groups("rank0.pt", "a/x_rank1.pt", "a/x_rank2.pt")] == [3]
    # Not if its rank is there, if it has none, if its step is another one, or if two groups lack it.
    assert sorted(len(group.ranks) for group in groups("rank1.pt", "a/x_rank1.pt", "a/x_rank2.pt")) == [1, 2]
    assert sorted(len(group.ranks) for group in groups("master.pt", "rank1.pt", "rank2.pt")) == [1, 2]
    assert sorted(len(g.ranks) for g in groups("epoch10_rank0.pt", "epoch10_rank1.pt", "epoch9_rank2.pt")) == [1, 2]
    two = groups("a_rank0.pt", "a_rank1.pt", "b_rank0.pt", "b_rank1.pt", "c_rank2.pt")
    assert sorted(len(group.ranks) for group in two) == [1, 2, 2]


def test_a_repeated_rank_is_one_rank() -> None:
    """rank_0/model_rank_0.pth and rank_1/model_rank_1.pth are replicas; optimizers beside them are too."""
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
def test_local_ranks_do_not_separate_groups(pattern: str) -> None:
    """Beside a global rank, neither the local rank nor the node's rank separates groups."""
    (group,) = groups(*(pattern.format(rank // 2, rank % 2, rank) for rank in range(4)))
    assert [rank for rank, _ in group.ranks] == [0, 1, 2, 3]


def test_a_local_rank_alone_is_the_rank() -> None:
    """If names contain only a local rank, it is the rank."""
    (group,) = groups("c/local_rank0.pth", "c/local_rank1.pth")
    assert [rank for rank, _ in group.ranks] == [0, 1]


def test_different_ranks_in_one_path_separate_groups() -> None:
    """In rank_0/rank_1.pth the rank is not repeated, so each folder is a group."""
    paths = [f"c/rank_{folder}/rank_{rank}.pth" for folder in range(2) for rank in range(2)]
    assert [len(group.ranks) for group in groups(*paths)] == [2, 2]


def test_repeated_ranks_are_noted() -> None:
    """If two files have the same rank in their names, positions replace ranks, and the note is correct."""
    (group,) = groups("c/rank0.pth", "c/rank0.safetensors", "c/rank1.pth", "c/rank1.safetensors")
    assert [rank for rank, _ in group.ranks] == [0, 1, 2, 3]
    assert group.grouping == (Grouping.NUMBERED_BY_ORDER(),)
