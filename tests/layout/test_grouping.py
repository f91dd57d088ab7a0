"""Grouping of files into replicas by path and metadata; the files need not exist."""

from __future__ import annotations

from itertools import chain, product
from typing import TYPE_CHECKING, Any

import pytest
from support.checkpoints import snapshot
from support.listings import list_fields

from syncheck.layout.grouping import group_replicas
from syncheck.messages import Grouping

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.layout.groups import CheckpointGroup
    from syncheck.snapshots import Snapshot

# A pattern with its numbers, and the sizes of the groups that its files make.
REPLICAS = {
    # verl, FSDP examples of torch, Composer, fairseq, ray, nanotron, NeMo, picotron
    "global_step_20/actor/model_world_size_4_rank_{0-3}.pt": [4],
    "global_step_20/actor/{model,optim,extra_state}_world_size_2_rank_{0-1}.pt": [2, 2, 2],
    "fsdp-model-rank-{0-3}.pt": [4],
    "ep1-ba{100,200}-rank{0-1}.pt": [2, 2],
    "checkpoint_1_500-rank-{0-1}.pt": [2],
    "TorchTrainer_a1b2_00000/checkpoint_00000{1,2}/rank={0-3}.pt": [4, 4],
    "model_weight_pp-rank-{0-1}-of-2_tp-rank-{0-1}-of-2.safetensors": [4],
    "tp_rank_0{0-1}_pp_rank_00{0-1}/model_weights.ckpt": [4],
    "zero/dp-{0-1}-of-2_pp-0-of-1_tp-{0-1}-of-2.pt": [4],
    # DeepSpeed, Megatron, Hugging Face, Accelerate: parts and random states
    "global_step5/zero_pp_rank_{0-3}_mp_rank_00_model_states.pt": [4],
    "global_step5/bf16_zero_pp_rank_{0-3}_mp_rank_00_optim_states.pt": [1, 1, 1, 1],
    "iter_0000500/mp_rank_0{0-1}/model_optim_rng.pt": [1, 1],
    "model-0000{1-3}-of-00003.safetensors": [1, 1, 1],
    "checkpoint-{500,1000}/rng_state_{0-1}.pth": [2, 2],
    "checkpoint-500/random_states_{0-3}.pkl": [4],
    # launchers: SLURM, torchrun, Kubernetes, MPI, hosts by name and by address
    "job-12345/node-{0-1}/task_{0-3}.pt": [8],
    "run/cn00{1-2}/rank_{0-1}.pt": [4],
    "run/{cn001/rank_{0-1},cn002/rank_{2-3}}.pt": [4],
    "out/attempt_0/{0-3}.pt": [4],
    "ckpt-worker-{0-3}.pt": [4],
    "train-job-{master-0/rank_0,worker-0/rank_1,worker-1/rank_2}/model.pt": [3],
    "mpi_rank{0-3}_of_4.pt": [4],
    "192.168.1.{10,11}/local_rank_{0-1}/model.pt": [4],
    "node1.cluster.example/gpu{0-7}.pt": [8],
    "dgx-{a/rank{0-1},b/rank{2-3}}.pt": [4],
    "node{0-1}/step_{10,20}/gpu_{0-1}.pt": [4, 4],
    "step_{10,20}/node{0-1}/gpu_{0-1}.pt": [4, 4],
    "host{0-1}.gpu{0-1}.ckpt": [4],
    "server_{0-1}_device_{0-3}.pth": [8],
    "instance-{0-1}/process_{0-1}.pth": [4],
    "rack1/blade{1-2}/rank{0-1}.pt": [4],
    "rack{1/blade1/rank{0-1},1/blade2/rank{2-3},2/blade1/rank{4-5}}.pt": [6],
    # users
    "model_{0-3}.pth": [4],
    "model_gpu{0-3}.pth": [4],
    "debug.rank{0-3}": [4],
    "model.pth.{0-3}": [4],
    "model.pth.rank{0-3}": [4],
    "r{0-3}/model.pt": [4],
    "weights-r{0-3}-final.pt": [4],
    "resnet50_rank{0-1}_epoch{1,2}.pth": [2, 2],
    "rank{0-1}_epoch={1,2}.ckpt": [2, 2],
    "{before,after}_allreduce_rank{0-1}.pt": [2, 2],
    "{ema,model}_rank{0-1}.pt": [2, 2],
    "seed{1,2}/rank{0-1}.pt": [2, 2],
    "fold_{0-2}/rank{0-1}.pt": [2, 2, 2],
    "exp{1,2}/step_{5,9}/rank{0-1}.pt": [2, 2, 2, 2],
    "lora_r{8,16}_rank{0-1}.safetensors": [2, 2],
    "adapter_rank{0-1}/adapter_model.safetensors": [2],
    "dp{0-1}.pt": [2],
    "dp{0-1}_pp{0-1}_tp{0-1}.pt": [8],
    "rank{0-3}_dp0.pt": [4],
    "step-000{100,200}.pt": [1, 1],
    "epoch=1-step={100,200}.ckpt": [1, 1],
    "{best,last}.pt": [2],
    "{best,last,rank0,rank1}.pt": [1, 1, 2],
}


def expanded(pattern: str) -> list[str]:
    """Expand braces like a shell: {0-3} is a range, {a,b} are words, which may contain braces."""
    start = pattern.find("{")
    if start < 0:
        return [pattern]
    depth, end = 1, start + 1
    while depth:
        depth += {"{": 1, "}": -1}.get(pattern[end], 0)
        end += 1
    inner, words, level = pattern[start + 1 : end - 1], [""], 0
    for c in inner:
        level += {"{": 1, "}": -1}.get(c, 0)
        if c == "," and not level:
            words.append("")
        else:
            words[-1] += c
    if len(words) == 1 and "-" in inner and "{" not in inner:
        first, last = map(int, inner.split("-"))
        words = list(map(str, range(first, last + 1)))
    return [pattern[:start] + head + tail for head, tail in product(expand_all(words), expanded(pattern[end:]))]


def expand_all(patterns: Iterable[str]) -> list[str]:
    """Expand the braces of patterns."""
    return list(chain.from_iterable(map(expanded, patterns)))


def groups(
    *patterns: str, group_by: str | None = None, roots: dict[str, str] | None = None
) -> tuple[CheckpointGroup, ...]:
    """Group files without metadata: each file is in one group, and the members of a group stay in order."""
    paths = expand_all(patterns)
    result = group_replicas(list_snapshots(paths), group_by, roots or {})
    for group_paths in members(result):
        assert group_paths == sorted(group_paths, key=paths.index)
    assert sorted(chain.from_iterable(members(result))) == sorted(paths)
    return result


def by_step(found: tuple[CheckpointGroup, ...]) -> list[tuple[int | None, list[int]]]:
    """Return the step and the ranks of each group; ranks are in the order of the paths."""
    return [(group.step, list_fields(group.ranks, 0)) for group in found]


def members(found: tuple[CheckpointGroup, ...]) -> list[list[str]]:
    """Return the paths of each group."""
    return [list_paths(group) for group in found]


def list_snapshots(paths: Iterable[str]) -> list[Snapshot]:
    """Return a checkpoint without metadata for each path."""
    return [snapshot(path) for path in paths]


def list_paths(group: CheckpointGroup) -> list[str]:
    """Return the paths of a group in the order of its ranks."""
    return list_fields(list_fields(group.ranks, 1), "path")


def list_hosts(group: CheckpointGroup) -> list[str]:
    """Return the hosts of a group in the order of its ranks."""
    return list_fields(list_fields(group.ranks, 1), "host")


def list_sizes(found: Iterable[CheckpointGroup]) -> list[int]:
    """Return the sorted numbers of replicas of groups."""
    return sorted(len(group.ranks) for group in found)


def map_first_folders(paths: Iterable[str]) -> dict[str, str]:
    """Return the first folder of each path, as if the user passed these folders."""
    return {path: path.partition("/")[0] for path in paths}


def assert_ranks(group: CheckpointGroup, paths: list[str]) -> None:
    """Assert that the ranks of a group count its files, and that the files have this order."""
    assert list_fields(group.ranks, 0) == list(range(len(paths)))
    assert list_paths(group) == paths


@pytest.mark.parametrize("pattern", REPLICAS)
@pytest.mark.parametrize("folder", ["", "/scratch/2026-11-22/run7/"])
def test_sizes_of_groups(pattern: str, folder: str) -> None:
    """Names of trainers, launchers and users give groups of these sizes in any folder."""
    assert list_sizes(groups(folder + pattern)) == REPLICAS[pattern]


# A pattern, and the step and ranks of each group.
RANKS: dict[str, list[tuple[int | None, list[int]]]] = {
    # The rank is a known word in the name of the file or a folder, or the only number that varies.
    **{
        f"c/{name}": [(step, [0, 1, 3])]
        for step, names in {
            None: (
                "rank_{0,1,3}.pth", "rank{0,1,3}.pth", "rank-{0,1,3}.pth", "model_r{0,1,3}.pth",
                "model_0116249.rank_{0,1,3}.pth", "rank_{0,1,3}/model.pth", "rank{0,1,3}/last.safetensors",
                "m-r{0,1,3}.pt", "RANK_{0,1,3}.pt", "zero_pp_rank_{0,1,3}_mp_rank_00_model_states.pt",
                "random_states_{0,1,3}.pkl", "lora_rank8/model_{0,1,3}.pth", "model_v2_{0,1,3}.pth", "{0,1,3}.pth",
                "{0,1,3}/model.pth", "gpu{0,1,3}.pth", "resnet18_{0,1,3}_cifar10.pth", "ddp_rank{0,1,3}.pth",
            ),
            100: ("step_100/rank_{0,1,3}.pth",),
            7: ("epoch3/rank_{0,1,3}/step_7.pth",),
        }.items()
        for name in names
    },
    # A step is not a rank, and groups are sorted by step.
    **{
        f"c/{name}": [(0, [0]), (1, [0]), (100, [0])]
        for name in (
            "step_{0,1,100}.pth", "epoch{0,1,100}.pth", "iter-{0,1,100}.pth", "checkpoint-{0,1,100}.pth",
            "global_step{0,1,100}/model.pt",
        )
    },
    "c/history/step_{10,2}/rank_{0,1}.pth": [(2, [0, 1]), (10, [0, 1])],
    "c/{100,200}/rank{0,1}.pth": [(100, [0, 1]), (200, [0, 1])],
    "node{0,1}/step_{5,9}/rank{0,1}.pt": [(5, [0, 1, 2, 3]), (9, [0, 1, 2, 3])],
    "node{0,1}/{500,900}.pt": [(500, [0, 1]), (900, [0, 1])],
    "seed{0,1}_rank{0,1}.pt": [(None, [0, 1]), (None, [0, 1])],
    # One folder per node, with ranks over all nodes or within each node.
    "c/node{0/rank{0,1},1/rank{2,3}}.pth": [(None, [0, 1, 2, 3])],
    "c/node{0/step_{10,20}/rank{0,1},1/step_{10,20}/rank{2,3}}.pth": [(10, [0, 1, 2, 3]), (20, [0, 1, 2, 3])],
    "c/node{0/rank{0,1},1/rank{2,3}}/checkpoint-5": [(5, [0, 1, 2, 3])],
    **{
        f"c/{node}{{0/rank_{{0,1}},1/rank_{{2,3}}}}.pth": [(None, [0, 1, 2, 3])]
        for node in ("node_rank_", "node-rank", "group_rank_", "machine_rank_")
    },
    # Beside a global rank, neither the local rank nor the rank of the node separates groups.
    "n{0_local_rank{0_global_rank0,1_global_rank1},1_local_rank{0_global_rank2,1_global_rank3}}.pth": [
        (None, [0, 1, 2, 3])
    ],
    "global_rank{0_local_rank0,1_local_rank1,2_local_rank0,3_local_rank1}.pth": [(None, [0, 1, 2, 3])],
    "n{0/local_rank{0/rank0,1/rank1},1/local_rank{0/rank2,1/rank3}}.pth": [(None, [0, 1, 2, 3])],
    "node{0/rank_{0/model_rank_0,1/model_rank_1},1/rank_{2/model_rank_2,3/model_rank_3}}.pth": [(None, [0, 1, 2, 3])],
    "node_rank{0_local_rank{0_rank0,1_rank1},1_local_rank{0_rank2,1_rank3}}.pth": [(None, [0, 1, 2, 3])],
    "c/local_rank{0,1}.pth": [(None, [0, 1])],
    # A repeated rank is one rank; different ranks in one path separate groups.
    "c/rank_{0/model_rank_0,1/model_rank_1,2/model_rank_2}.pth": [(None, [0, 1, 2])],
    "c/rank_{0/{model,optim}_rank_0,1/{model,optim}_rank_1}.pth": [(None, [0, 1]), (None, [0, 1])],
    "c/rank_{0,1}/rank_{0,1}.pth": [(None, [0, 1]), (None, [0, 1])],
    # The rank of a LoRA adapter separates groups and is neither a process nor a step.
    "rank{0,1}/lora_r{8,16}.pt": [(None, [0, 1]), (None, [0, 1])],
    "lora_r{8,16}/rank{0,1}.pt": [(None, [0, 1]), (None, [0, 1])],
    "rank_{0,1}/lora_rank_{8,16}/w.pt": [(None, [0, 1]), (None, [0, 1])],
    # A rank beside the number of ranks is not a part of a checkpoint.
    "rank_{0-3}-of-4.pt": [(None, [0, 1, 2, 3])],
    "rank{0-3}-of-4.pt": [(None, [0, 1, 2, 3])],
    "model_rank-0000{0-3}-of-00004.pt": [(None, [0, 1, 2, 3])],
    "r/rank_{0-3}_of_4.pt": [(None, [0, 1, 2, 3])],
    # DeepSpeed's zero_pp_rank is the data-parallel rank, and mp_rank separates groups.
    "zero_pp_rank_{0,1}_mp_rank_0{0,1}_model_states.pt": [(None, [0, 1]), (None, [0, 1])],
    # Without numbers all files are one group. The file extension and the numbers in common folders are ignored.
    "{a/after,b/before}.pth": [(None, [0, 1])],
    "c/rank{0.pth,1.safetensors}": [(None, [0, 1])],
    "/data/2026-11/run7/rank{0,1}.pth": [(None, [0, 1])],
    # Equal names in folders that the user passed are replicas, also if their ranks are equal.
    "{a,b}/x_rank0.pth": [(None, [0, 1])],
    "{a/rank3,b/rank5}/x.pth": [(None, [3, 5])],
    # A file with coordinates only is the first replica, also if it is the only one.
    "tp_rank_00_pp_rank_000/m.ckpt": [(None, [0])],
    # A single file joins the only group that lacks its rank, unless its step differs or two groups lack the rank.
    "{rank0.json,ckpts/ddp_rank1.pth}": [(None, [0, 1])],
    "{a/rank{0,1},b/rank2}.pt": [(None, [0, 1, 2])],
    "{rank0,a/x_rank{1,2}}.pt": [(None, [0, 1, 2])],
}  # fmt: skip


@pytest.mark.parametrize("pattern", RANKS)
def test_steps_and_ranks(pattern: str) -> None:
    """Paths give these steps and ranks, and the order of the files does not matter."""
    result = groups(pattern)
    assert by_step(result) == RANKS[pattern]
    again = members(group_replicas(list_snapshots(reversed(expanded(pattern)))))
    assert sorted(map(sorted, again)) == sorted(map(sorted, members(result)))


@pytest.mark.parametrize(
    ("paths", "sizes"),
    [
        ("{c/rank{0,1},c/best}.pth", [1, 2]),
        ("{c/best,c/step_5}.pth", [2]),
        ("{c/best,c/step_{5,6}}.pth", [1, 1, 1]),
        ("{a/step_5,b/step_6}.pth", [1, 1]),
        ("a/{model,optimizer}-00001-of-00002.bin", [1, 1]),
        ("{a/x,b/y}_rank0.pth", [1, 1]),
        ("{a/step_5,b/step_6}/x_rank0.pth", [1, 1]),
        ("{rank1,a/x_rank{1,2}}.pt", [1, 2]),
        ("{master,rank{1,2}}.pt", [1, 2]),
        ("{epoch10_rank{0,1},epoch9_rank2}.pt", [1, 2]),
        ("{a_rank{0,1},b_rank{0,1},c_rank2}.pt", [1, 2, 2]),
        ("{a,b}/rank{0,1}.pt", [2, 2]),
    ],
)  # fmt: skip
def test_files_of_other_groups(paths: str, sizes: list[int]) -> None:
    """Files with other names, steps or parts, or with a rank that is present, are separate groups."""
    assert list_sizes(groups(paths)) == sizes


@pytest.mark.parametrize(
    ("pattern", "grouping"),
    [
        ("c/step_{0,1}.pth", Grouping.STEPS_ALONE()),
        ("c/model-0000{1-3}-of-00003.safetensors", Grouping.PARTS_ALONE()),
        *(
            (f"c/{pattern}", Grouping.SHARDS_ALONE())
            for pattern in (
                "mp_rank_0{0,1}_model_states.pt", "mp_rank_00_00{0,1}/model_optim_rng.pt",
                "mp_rank_0{0,1}/model_optim_rng.pt", "zero_pp_rank_{0,1}_mp_rank_00_optim_states.pt",
                "bf16_zero_pp_rank_{0,1}_mp_rank_00_optim_states.pt", "expp_rank_{0,1}_mp_rank_00_optim_states.pt",
                "layer_0{0,1}-model_00-model_states.pt", "layer_01-model_0{0,1}-model_states.pt",
                "layer_3_expert_{0,1}_mp_rank_00_model_states.pt",
            )
        ),
    ],
)  # fmt: skip
def test_steps_and_parts_are_not_replicas(pattern: str, grouping: Any) -> None:
    """Files that differ in the step, the part or the shard are not compared, and the reason is reported."""
    result = groups(pattern)
    assert set(list_sizes(result)) == {1}
    assert set(list_fields(result, "grouping")) == {(grouping,)}


@pytest.mark.parametrize(
    ("pattern", "runs"),
    [
        ("c/{ddp,ddp-syncbn}_rank{0,1}.pth", {"ddp", "ddp-syncbn"}),
        ("c/rank_{0/{model,optim}_rank_0,1/{model,optim}_rank_1}.pth", {"model", "optim"}),
        ("seed{0,1}_rank{0,1}.pt", {"seed0", "seed1"}),
    ],
)
def test_runs(pattern: str, runs: set[str]) -> None:
    """Each run is a group with the name of the run; steps of one run have one name."""
    assert set(list_fields(groups(pattern), "run")) == runs
    for steps in ("c/step_{0,1}.pth", "c/history/step_{10,2}/rank_{0,1}.pth"):
        assert len(set(list_fields(groups(steps), "run"))) == 1


def test_replicas_with_different_words() -> None:
    """If only words differ, files of one step and part are replicas, as in two copies of a run."""
    result = groups("{new,old}/checkpoint-{500,1000}/model-00001-of-00002.bin")
    assert by_step(result) == [(500, [0, 1]), (1000, [0, 1])]
    assert set(list_fields(result, "grouping")) == {(Grouping.NO_RANKS_ONE_STEP(),)}


def test_copies_of_folders_are_sorted_by_rank() -> None:
    """If the folders that the user passed have ranks in their names, the replicas are in the order of the ranks."""
    paths = ["a_rank1/w.pt", "b_rank0/w.pt"]
    (group,) = group_replicas(list_snapshots(paths), roots=map_first_folders(paths))
    assert group.grouping == (Grouping.FOLDER_COPIES(),)
    assert_ranks(group, ["b_rank0/w.pt", "a_rank1/w.pt"])


@pytest.mark.parametrize("pattern", ["c/rank{}.pth", "c/rank{:05}.pth", "c/{}.pth"])
def test_natural_order_of_many_ranks(pattern: str) -> None:
    """1,024 replicas are sorted by rank, with and without padding."""
    paths = [pattern.format(i) for i in range(1024)]
    (group,) = group_replicas(list_snapshots(sorted(paths)))
    assert_ranks(group, paths)


def test_repeated_ranks_are_noted() -> None:
    """If two files have the same rank in their names, positions replace ranks, and the note is correct."""
    (group,) = groups("c/rank{0,1}.{pth,safetensors}")
    assert list_fields(group.ranks, 0) == [0, 1, 2, 3]
    assert group.grouping == (Grouping.NUMBERED_BY_ORDER(),)


# --- meshes, nodes and hosts ---


@pytest.mark.parametrize(
    ("pattern", "mesh"),
    [
        ("tp_rank_0{0,1}/w.ckpt", ["tp"]), ("tp_rank_00_pp_rank_00{0,1}/w.ckpt", ["tp", "pp"]),
        ("model_ep_rank{0,1}.pt", ["ep"]), ("w_tp{0,1}_pp0.pt", ["tp", "pp"]), ("pp{0,1}.pt", ["pp"]),
        ("dp_rank_{0,1}_tp_rank_{0,1}.pt", ["dp", "tp"]), ("dp{0,1}_tp{0,1}.pt", ["dp", "tp"]),
        ("dp-{0,1}/tp-{0,1}/model.pt", ["dp", "tp"]), ("step_7/dp{0,1}_tp{0,1}.pth", ["dp", "tp"]),
    ],
)  # fmt: skip
def test_coordinates_in_a_mesh(pattern: str, mesh: list[str]) -> None:
    """Files with mesh coordinates in their names are one group, in the order of the names."""
    (group,) = groups(pattern)
    meshes = list_fields(list_fields(group.ranks, 1), "mesh")
    assert set(map(tuple, meshes)) == {tuple(mesh)}
    coordinates = [tuple(coordinate.values()) for coordinate in meshes]
    assert coordinates == sorted(set(coordinates))
    if "dp" in mesh:
        assert coordinates == list(product((0, 1), repeat=2))


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
        block = {"run": "ddp", "rank": rank, "world_size": 4}
        block |= {"step": 5 + rank // 2} if described == "other steps" else {}
        without = described == "no metadata" or (described == "some" and rank > 1)
        files.append(snapshot(pattern.format(host=hosts[rank // 2], rank=rank), **({} if without else block)))
    (group,) = group_replicas(files)
    assert list_fields(group.ranks, 0) == [0, 1, 2, 3]
    assert list_hosts(group) == [hosts[0], hosts[0], hosts[1], hosts[1]]


def test_hosts_of_several_runs_and_steps() -> None:
    """Hosts are joined within a run and a step; runs with equal ranks stay separate."""
    result = groups("{x,y}/{a/{100,200}/rank{0,1},b/{100,200}/rank{2,3}}.pt")
    assert [(group.run, *by_step((group,))[0]) for group in sorted(result, key=lambda g: (g.run, g.step or 0))] == [
        (run, step, [0, 1, 2, 3]) for run, step in product(("x", "y"), (100, 200))
    ]


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
    paths = [pattern.format(node, local) for node, local in product(range(2), range(2))]
    (group,) = groups(*paths, roots=map_first_folders(paths) if roots and "/" in pattern else {})
    assert_ranks(group, paths)
    hosts = list_hosts(group)
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]


# --- folders that the user passed ---


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("c/{a,b}/x_rank0.pth", ["c/a/x_rank0.pth", "c/b/x_rank0.pth"]),
        ("hf/{a,b}/{best,final}", ["hf/a/best hf/b/best", "hf/a/final hf/b/final"]),
        ("{a,b}/rank{0,1}.pth", ["a/rank0.pth a/rank1.pth", "b/rank0.pth b/rank1.pth"]),
        (
            "{a,b}/step{1,2}/w{0,1}.pt",
            [f"{run}/step{step}/w0.pt {run}/step{step}/w1.pt" for run in "ab" for step in "12"],
        ),
        ("step_{1,2}/rank_{0,1}.pth", ["step_1/rank_0.pth step_1/rank_1.pth", "step_2/rank_0.pth step_2/rank_1.pth"]),
        ("{a/rank{0,1},b/rank{0-2}}.p", ["a/rank0.p a/rank1.p", "b/rank0.p b/rank1.p b/rank2.p"]),
    ],
    ids=["two runs", "models in a folder", "ranks of two runs", "a step of two runs", "steps of a run", "other files"],
)
def test_folders(pattern: str, expected: list[str]) -> None:
    """Folders with the same relative paths are copies, unless they hold ranks, or are steps of one searched folder."""
    result = groups(pattern, roots=map_first_folders(expanded(pattern)))
    assert sorted(" ".join(sorted(paths)) for paths in members(result)) == expected


# --- metadata ---


def described(*files: dict[str, Any]) -> list[list[str]]:
    """Group files with the metadata of a run `ddp` of launch `a`, and return the paths of each group."""
    return members(group_replicas([snapshot(**({"run": "ddp", "run_id": "a"} | file)) for file in files]))


@pytest.mark.parametrize(
    ("files", "sizes"),
    [
        ([("c/x_rank{}.pth", r, {"run_id": "one" if r < 2 else "two", "rank": r % 2}) for r in range(4)], [2, 2]),
        ([("c/ddp_rank{}.pth", r, {"step": 5 if r == 2 else 9}) for r in range(4)], [4]),
        (
            [(f"c/{name}{{}}.pth", r, {"step": 9}) for name, r in product(("ddp_rank", "h/step_9/rank_"), (0, 1))],
            [2, 2],
        ),
        ([(f"node{r // 2}/local{r % 2}.pth", r, {"step": 9}) for r in range(4)], [4]),
        ([(f"exp{e}/{'abc'[r]}.pth", r, {"run_id": f"{e}"}) for e, r in product((0, 1, 2), range(3))], [3, 3, 3]),
        ([(f"{r}/model.pth", r, {"step": 9}) for r in range(4)], [4]),
    ],
    ids=[
        "two launches",
        "a rank of an older step",
        "final files and history",
        "nodes",
        "numbered experiments",
        "folders of ranks",
    ],
)
def test_files_with_metadata(files: list[tuple[str, int, dict[str, Any]]], sizes: list[int]) -> None:
    """Launches are separate groups, and ranks of one launch with one path pattern are one group."""
    result = described(*({"path": path.format(rank), "rank": rank} | more for path, rank, more in files))
    assert sorted(chain.from_iterable(result)) == sorted(path.format(rank) for path, rank, _ in files)
    assert list(map(len, result)) == sizes


def test_numbers_of_experiments_are_no_ranks() -> None:
    """Files of two experiments of one name are never paired, although their numbers equal ranks."""
    files = product(("exp0", "exp1"), enumerate("ab"))
    result = described(*({"path": f"{folder}/{name}.pth", "rank": rank, "step": 5} for folder, (rank, name) in files))
    assert result == [["exp0/a.pth", "exp0/b.pth"], ["exp1/a.pth", "exp1/b.pth"]]


def test_a_file_without_metadata_joins_its_group() -> None:
    """A file whose name contains a group's missing rank is compared; with a rank that is present, it is not."""
    files = [snapshot(f"c/ddp_rank{r}.pth", run="ddp", run_id="a", rank=r) for r in range(3)]
    (group,) = group_replicas([*files, snapshot("c/ddp_rank3.pth")])
    assert members((group,)) == [expanded("c/ddp_rank{0-3}.pth")]
    assert group.grouping == (Grouping.METADATA(), Grouping.SOME_BY_NAME(ranks=(3,)))
    for second in ("c/ddp_rank2.safetensors", "c/other_rank3.pth", "d/ddp_rank2.pth"):
        result = members(group_replicas([*files, snapshot(second)]))
        assert sorted(result, key=len) == [[second], list_fields(files, "path")]


def test_metadata_ranks_precede_names() -> None:
    """The metadata's rank precedes the name's rank."""
    files = {"path": "c/rank0.pth", "rank": 1, "step": 1}, {"path": "c/rank1.pth", "rank": 0, "step": 1}
    (result,) = described(*files)
    assert result == ["c/rank1.pth", "c/rank0.pth"]


def test_steps_and_runs_with_metadata() -> None:
    """Groups are sorted by step; two runs of one name get their folder as a prefix."""
    result = group_replicas(
        [
            snapshot(f"c/h/step_{s}/rank_{r}.pth", run="ddp", run_id="a", rank=r, step=s)
            for s, r in product((20, 3), (0, 1))
        ]
    )
    assert [(group.run, *by_step((group,))[0]) for group in result] == [("ddp", 3, [0, 1]), ("ddp", 20, [0, 1])]
    result = group_replicas(
        [snapshot(f"{run}/ddp_rank{r}.pth", run="ddp", run_id=run, rank=r, step=1) for run, r in product("ab", (0, 1))]
    )
    assert list_fields(result, "run") == ["a/ddp", "b/ddp"]


# --- the option --group-by ---


@pytest.mark.parametrize(
    ("pattern", "group_by", "expected"),
    [
        ("{a,b}_{x,y}_1.pth", r"_([xy])_", [["a_x_1.pth", "b_x_1.pth"], ["a_y_1.pth", "b_y_1.pth"]]),
        ("step_{1,2}.pth", "step", [["step_1.pth", "step_2.pth"]]),
        ("{more,other,x1,x2}.pth", "^x", [["more.pth"], ["other.pth"], ["x1.pth", "x2.pth"]]),
    ],
)
def test_group_by(pattern: str, group_by: str, expected: list[list[str]]) -> None:
    """Files with equal captured groups are replicas; a file without a match is alone."""
    assert sorted(members(groups(pattern, group_by=group_by))) == expected
