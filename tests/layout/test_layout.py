"""Every rule for grouping files into replicas, on records of files that do not exist."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import snapshot

from syncheck.layout.grouping import group_replicas
from syncheck.messages import Grouping

Grouped = list[list[tuple[int, str]]]


def grouped(*paths: str, group_by: str | None = None, roots: dict[str, str] | None = None) -> Grouped:
    """Group files without metadata, and return rank and path of each member."""
    found = group_replicas([snapshot(path) for path in paths], group_by, roots)
    assert sum(len(replicas.ranks) for replicas in found) == len(paths)
    return [[(rank, s.path) for rank, s in replicas.ranks] for replicas in found]


def sizes(*paths: str, **options: Any) -> list[int]:
    """Return the number of files of each group."""
    return sorted(len(members) for members in grouped(*paths, **options))


def described(*files: dict[str, Any]) -> list[list[str]]:
    """Group files with metadata, and return the paths of each group."""
    found = group_replicas([snapshot(**file) for file in files])
    return [[s.path for _, s in replicas.ranks] for replicas in found]


# --- names ---


@pytest.mark.parametrize(
    "pattern",
    [
        "c/rank_{}.pth", "c/rank{}.pth", "c/rank-{}.pth", "c/model_r{}.pth", "c/model_0116249.rank_{}.pth",
        "c/rank_{}/model.pth", "c/rank{}/last.safetensors", "c/step_100/rank_{}.pth", "c/m-r{}.pt", "c/RANK_{}.pt",
        "c/zero_pp_rank_{}_mp_rank_00_model_states.pt", "c/random_states_{}.pkl", "c/epoch3/rank_{}/step_7.pth",
        "c/lora_rank8/model_{}.pth", "c/model_v2_{}.pth", "c/{}.pth", "c/{}/model.pth", "c/gpu{}.pth",
        "c/resnet18_{}_cifar10.pth", "c/ddp_rank{}.pth",
    ],
)  # fmt: skip
def test_ranks_in_names(pattern: str) -> None:
    """The rank is a known word in the file's or a folder's name, or the only number that varies."""
    paths = [pattern.format(i) for i in (0, 1, 3)]
    assert grouped(*paths) == [[(0, paths[0]), (1, paths[1]), (3, paths[2])]]


@pytest.mark.parametrize(
    "pattern", ["c/step_{}.pth", "c/epoch{}.pth", "c/iter-{}.pth", "c/checkpoint-{}.pth", "c/global_step{}/model.pt"]
)
def test_a_step_is_never_a_rank(pattern: str) -> None:
    """Files that differ only in the step are not replicas."""
    found = group_replicas([snapshot(pattern.format(step)) for step in (0, 1, 100)])
    assert [(len(replicas.ranks), replicas.step) for replicas in found] == [(1, 0), (1, 1), (1, 100)]
    assert {replicas.grouping for replicas in found} == {(Grouping.STEPS_ALONE(),)}
    assert len({replicas.run for replicas in found}) == 1


def test_ranks_and_steps() -> None:
    """The ranks of one step form a group, and groups are sorted by step."""
    paths = [f"c/history/step_{step}/rank_{rank}.pth" for step in (10, 2) for rank in (1, 0)]
    found = group_replicas([snapshot(path) for path in paths])
    assert [(replicas.step, [rank for rank, _ in replicas.ranks]) for replicas in found] == [(2, [0, 1]), (10, [0, 1])]
    assert len({replicas.run for replicas in found}) == 1


def test_a_further_number_whose_ranks_repeat_is_a_step() -> None:
    """Files with one further number and every rank for each value are steps of one run."""
    found = group_replicas([snapshot(f"c/{step}/rank{rank}.pth") for step in (100, 200) for rank in (0, 1)])
    assert [(replicas.step, len(replicas.ranks)) for replicas in found] == [(100, 2), (200, 2)]


def test_node_folders_are_joined() -> None:
    """Folders of nodes form one group if no rank repeats."""
    paths = ["c/node0/rank0.pth", "c/node0/rank1.pth", "c/node1/rank2.pth", "c/node1/rank3.pth"]
    assert grouped(*paths) == [list(enumerate(paths))]


def test_one_folder_per_node_and_the_rank_in_the_file() -> None:
    """With one folder per node, each step is a group of all ranks."""
    paths = [f"c/node{rank // 2}/step_{step}/rank{rank}.pth" for step in (10, 20) for rank in range(4)]
    assert grouped(*paths) == [list(enumerate(paths[:4])), list(enumerate(paths[4:]))]
    paths = [f"c/node{node}/rank{rank}/checkpoint-5" for node in (0, 1) for rank in (2 * node, 2 * node + 1)]
    assert grouped(*paths) == [list(enumerate(paths))]


def test_two_runs_in_one_glob_are_two_groups() -> None:
    """Files of two runs are never one group."""
    paths = ["c/ddp_rank0.pth", "c/ddp_rank1.pth", "c/ddp-syncbn_rank0.pth", "c/ddp-syncbn_rank1.pth"]
    found = group_replicas([snapshot(path) for path in paths])
    assert [(replicas.run, len(replicas.ranks)) for replicas in found] == [("ddp", 2), ("ddp-syncbn", 2)]


def test_a_lone_file_beside_a_group_stays_alone() -> None:
    """A file with a unique name pattern is not compared with the ranks beside it."""
    assert sizes("c/rank0.pth", "c/rank1.pth", "c/best.pth") == [1, 2]


def test_parts_are_not_replicas() -> None:
    """Files with different numbers around -of- are parts of one checkpoint, and not compared."""
    parts = [f"c/model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    found = group_replicas([snapshot(path) for path in parts])
    assert [len(replicas.ranks) for replicas in found] == [1, 1, 1]
    assert {replicas.grouping for replicas in found} == {(Grouping.PARTS_ALONE(),)}


def test_model_parallel_shards_are_not_replicas() -> None:
    """Files that differ in mp_rank contain different parts of the model, and cause no false alarm."""
    for pattern in (
        "c/mp_rank_0{}_model_states.pt", "c/mp_rank_00_00{}/model_optim_rng.pt", "c/mp_rank_0{}/model_optim_rng.pt",
        "c/zero_pp_rank_{}_mp_rank_00_optim_states.pt", "c/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt",
        "c/expp_rank_{}_mp_rank_00_optim_states.pt", "c/layer_0{}-model_00-model_states.pt",
        "c/layer_01-model_0{}-model_states.pt", "c/layer_3_expert_{}_mp_rank_00_model_states.pt",
    ):  # fmt: skip
        found = group_replicas([snapshot(pattern.format(i)) for i in (0, 1)])
        assert [len(replicas.ranks) for replicas in found] == [1, 1], pattern
        assert {replicas.grouping for replicas in found} == {(Grouping.SHARDS_ALONE(),)}, pattern


def test_the_extension_is_ignored() -> None:
    """A .pth and a .safetensors file of two ranks are one group."""
    assert sizes("c/rank0.pth", "c/rank1.safetensors") == [2]


def test_files_without_numbers_are_one_group() -> None:
    """If names contain no numbers, all files form one group."""
    assert grouped("a/before.pth", "b/after.pth") == [[(0, "a/before.pth"), (1, "b/after.pth")]]


def test_words_distinguish_replicas() -> None:
    """If only words differ, files of one step and part are replicas, as in two copies of a run."""
    paths = [f"{run}/checkpoint-{step}/model-00001-of-00002.bin" for step in (500, 1000) for run in ("old", "new")]
    found = group_replicas([snapshot(path) for path in paths])
    assert [(replicas.step, sorted(s.path for _, s in replicas.ranks)) for replicas in found] == [
        (500, sorted(paths[:2])),
        (1000, sorted(paths[2:])),
    ]
    assert {replicas.grouping for replicas in found} == {(Grouping.NO_RANKS_ONE_STEP(),)}


def test_a_step_beside_words() -> None:
    """A file with a step in its name and a file without are compared; files of two steps are not."""
    assert sizes("c/best.pth", "c/step_5.pth") == [2]
    assert sizes("c/best.pth", "c/step_5.pth", "c/step_6.pth") == [1, 1, 1]
    assert sizes("a/step_5.pth", "b/step_6.pth") == [1, 1]
    assert sizes("a/model-00001-of-00002.bin", "a/optimizer-00001-of-00002.bin") == [1, 1]


def test_numbers_of_common_folders_are_ignored() -> None:
    """A number in the common part of all paths is ignored."""
    paths = ["/data/2026-11/run7/rank0.pth", "/data/2026-11/run7/rank1.pth"]
    assert grouped(*paths) == [[(0, paths[0]), (1, paths[1])]]


def test_natural_order_of_many_ranks() -> None:
    """1,024 replicas are sorted by rank, with and without padding."""
    for pattern in ("c/rank{}.pth", "c/rank{:05}.pth", "c/{}.pth"):
        paths = [pattern.format(i) for i in range(1024)]
        assert grouped(*sorted(paths)) == [list(enumerate(paths))]


def test_order_of_the_arguments_does_not_matter() -> None:
    """Groups do not depend on the order of the given files."""
    paths = [f"c/{run}_rank{rank}.pth" for run in ("a", "b") for rank in range(3)] + ["c/best.pth"]
    assert grouped(*paths) == grouped(*reversed(paths))


# --- folders ---


def test_files_with_one_name_in_two_folders() -> None:
    """Two files with one name in two folders are compared, although their ranks are equal."""
    assert grouped("a/x_rank0.pth", "b/x_rank0.pth") == [[(0, "a/x_rank0.pth"), (1, "b/x_rank0.pth")]]
    assert grouped("a/rank3/x.pth", "b/rank5/x.pth") == [[(3, "a/rank3/x.pth"), (5, "b/rank5/x.pth")]]
    assert sizes("a/x_rank0.pth", "b/y_rank0.pth") == [1, 1]
    assert sizes("a/step_5/x_rank0.pth", "b/step_6/x_rank0.pth") == [1, 1]
    # In a folder that was searched these may be two runs.
    paths = ["c/a/x_rank0.pth", "c/b/x_rank0.pth"]
    assert sizes(*paths, roots=dict.fromkeys(paths, "c")) == [1, 1]


def test_folders_with_the_same_names_in_each() -> None:
    """With two models in each of two folders, models of one name are compared."""
    paths = [f"hf/{folder}/{name}" for folder in ("a", "b") for name in ("best", "final")]
    found = grouped(*paths, roots=dict.fromkeys(paths, "hf"))
    assert sorted(sorted(path for _, path in members) for members in found) == [
        ["hf/a/best", "hf/b/best"],
        ["hf/a/final", "hf/b/final"],
    ]


def test_folders_that_are_copies_are_compared_path_by_path() -> None:
    """Several folders with the same relative paths are copies of each other."""
    paths = [f"{folder}/{name}" for folder in ("old", "new") for name in ("rank0.pth", "rank1.pth")]
    found = grouped(*paths, roots={path: path.partition("/")[0] for path in paths})
    assert sorted(sorted(path for _, path in members) for members in found) == [
        ["new/rank0.pth", "old/rank0.pth"],
        ["new/rank1.pth", "old/rank1.pth"],
    ]


def test_folders_of_steps_are_no_copies() -> None:
    """Folders step_1 and step_2 with the same ranks are steps of one run."""
    paths = [f"step_{step}/rank_{rank}.pth" for step in (1, 2) for rank in (0, 1)]
    roots = {path: path.partition("/")[0] for path in paths}
    found = group_replicas([snapshot(path) for path in paths], None, roots)
    assert [(replicas.step, len(replicas.ranks)) for replicas in found] == [(1, 2), (2, 2)]


def test_folders_with_different_files_are_grouped_by_name() -> None:
    """Files in folders with different relative paths are grouped by their names."""
    paths = ["a/rank0.pth", "a/rank1.pth", "b/rank0.pth", "b/rank1.pth", "b/rank2.pth"]
    assert sizes(*paths, roots={path: path[0] for path in paths}) == [2, 3]


# --- metadata ---


def test_run_ids_are_never_mixed() -> None:
    """Files of two launches are two groups, although run, step and pattern are equal."""
    files = [
        {"path": f"c/x_rank{rank}.pth", "run": "ddp", "run_id": "one" if rank < 2 else "two", "rank": rank % 2}
        for rank in range(4)
    ]
    assert described(*files) == [["c/x_rank0.pth", "c/x_rank1.pth"], ["c/x_rank2.pth", "c/x_rank3.pth"]]


def test_a_stale_replica_stays_in_its_group() -> None:
    """A file of an older step with the same folder and pattern is compared with the group."""
    files = [
        {"path": f"c/ddp_rank{r}.pth", "run": "ddp", "run_id": "a", "rank": r, "step": 5 if r == 2 else 9}
        for r in range(4)
    ]
    assert described(*files) == [[file["path"] for file in files]]


def test_a_file_without_metadata_joins_its_group() -> None:
    """A file whose name contains a group's missing rank is compared; with a rank that is present, it is not."""
    files = [{"path": f"c/ddp_rank{r}.pth", "run": "ddp", "run_id": "a", "rank": r} for r in range(3)]
    assert described(*files, {"path": "c/ddp_rank3.pth"}) == [[f"c/ddp_rank{r}.pth" for r in range(4)]]
    for other in ("c/ddp_rank2.safetensors", "c/other_rank3.pth", "d/ddp_rank2.pth"):
        assert sorted(described(*files, {"path": other}), key=len) == [[other], [file["path"] for file in files]]
    (group,) = group_replicas([snapshot(**file) for file in (*files, {"path": "c/ddp_rank3.pth"})])
    assert group.grouping == (Grouping.METADATA(), Grouping.SOME_BY_NAME(ranks=(3,)))


def test_metadata_ranks_win_over_names() -> None:
    """The metadata's rank precedes the name's rank."""
    found = group_replicas([snapshot(f"c/rank{i}.pth", run="r", run_id="a", rank=1 - i, step=1) for i in range(2)])
    assert [(rank, s.path) for rank, s in found[0].ranks] == [(0, "c/rank1.pth"), (1, "c/rank0.pth")]


def test_steps_of_one_run_are_groups_in_order() -> None:
    """Every step of a run is a group with its ranks."""
    files = [
        snapshot(f"c/h/step_{step}/rank_{rank}.pth", run="ddp", run_id="a", rank=rank, step=step)
        for step in (20, 3)
        for rank in (0, 1)
    ]
    assert [(replicas.run, replicas.step, len(replicas.ranks)) for replicas in group_replicas(files)] == [
        ("ddp", 3, 2),
        ("ddp", 20, 2),
    ]


def test_final_files_and_history_of_one_run() -> None:
    """The final files are a separate group, although the last step's history has equal ranks and step."""
    files = [{"path": f"c/ddp_rank{r}.pth", "run": "ddp", "run_id": "a", "rank": r, "step": 9} for r in (0, 1)]
    files += [{"path": f"c/h/step_9/rank_{r}.pth", "run": "ddp", "run_id": "a", "rank": r, "step": 9} for r in (0, 1)]
    assert sorted(map(len, described(*files))) == [2, 2]


def test_node_folders_with_metadata_are_joined() -> None:
    """One folder per node with ranks only in the metadata is one group of one run."""
    files = [
        {"path": f"node{r // 2}/local{r % 2}.pth", "run": "ddp", "run_id": "a", "rank": r, "step": 9} for r in range(4)
    ]
    assert sorted(described(*files)[0]) == sorted(file["path"] for file in files)


def test_runs_of_one_name_are_distinguished_by_folder() -> None:
    """Two runs of one name get their folder as a prefix, so that they are not one series."""
    files = [
        snapshot(f"{folder}/ddp_rank{rank}.pth", run="ddp", run_id=folder, rank=rank, step=1)
        for folder in ("a", "b")
        for rank in (0, 1)
    ]
    assert [replicas.run for replicas in group_replicas(files)] == ["a/ddp", "b/ddp"]


# --- the user's word ---


def test_group_by_overrides() -> None:
    """Files whose paths give equal captured groups are replicas, regardless of their names."""
    paths = ["a_x_1.pth", "b_x_1.pth", "a_y_1.pth", "b_y_1.pth"]
    found = grouped(*paths, group_by=r"_([xy])_")
    assert [[path for _, path in members] for members in found] == [paths[:2], paths[2:]]
    assert sizes("step_1.pth", "step_2.pth", group_by="step") == [2]


def test_group_by_without_a_match() -> None:
    """A file that does not match the expression is in no other file's group."""
    assert sizes("x1.pth", "x2.pth", "other.pth", "more.pth", group_by="^x") == [1, 1, 2]
