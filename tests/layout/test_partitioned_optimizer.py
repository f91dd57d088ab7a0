"""Partitioned optimizer state of ranks or nodes, recognized by metadata, shapes, parameter numbers, or labels."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.checkpoints import network as arrays
from support.checkpoints import save_pth
from support.listings import get_failing, join_fields, list_codes, list_failing, list_fields, list_names
from support.states import copy_values
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

import syncheck
from syncheck.messages import Detail
from syncheck.records import Reason

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WORLD = 3


def network() -> nn.Module:
    """Return a network with parameters of several shapes, some of which repeat."""
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))


def twins() -> nn.Module:
    """Return a network of two equal layers."""
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def take_step(optimizer: Any, model: nn.Module) -> Any:
    """Take one step with the same gradients on every rank. Return the optimizer."""
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (i + 1))
    optimizer.step()
    return optimizer


def save_zero_ranks(
    folder: Path,
    change: Callable[[int, dict[str, Any]], None] = lambda rank, state: None,
    make: Callable[[], nn.Module] = network,
    **groups: Any,
) -> list[Path]:
    """Save the state of each rank of a ZeroRedundancyOptimizer. change: called with each rank's state."""
    folder.mkdir(exist_ok=True)
    files = []
    for rank in range(WORLD):
        dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
        try:
            torch.manual_seed(0)
            model = make()
            content: dict[str, Any] = {"model": copy_values(model.state_dict())}
            split: Any = model.parameters()
            if groups:
                decayed = [p for p in model.parameters() if p.ndim > 1]
                split = [{"params": decayed, **groups}, {"params": [p for p in model.parameters() if p.ndim < 2]}]
            optimizer = ZeroRedundancyOptimizer(split, torch.optim.AdamW, lr=1e-3)
            content["optimizer"] = take_step(optimizer, model).optim.state_dict()
        finally:
            dist.destroy_process_group()
        change(rank, content)
        files.append(folder / f"z_rank{rank}.pth")
        torch.save(content, files[-1])
    return files


@pytest.mark.parametrize("groups", [{}, {"weight_decay": 0.5}], ids=["one group", "two groups"])
def test_partitions_numbered_by_each_rank(tmp_path: Path, groups: dict[str, Any]) -> None:
    """The local state dicts of ZeRO are sharded by design: the optimizer is not compared, and the model is in sync."""
    report = syncheck.compare(*save_zero_ranks(tmp_path, **groups))
    (group,) = report.groups
    assert (report.exit_code, list_codes(group.findings)) == (0, ["SYN104"])
    assert group.kinds["optimizer"].compared == 0


def test_a_model_difference_beside_partitions_is_reported(tmp_path: Path) -> None:
    """With a partitioned optimizer, a parameter that differs is reported, and no optimizer state is."""

    def change(rank: int, content: dict[str, Any]) -> None:
        content["model"]["0.weight"][0, 0] += rank == 1

    (group,) = syncheck.compare(*save_zero_ranks(tmp_path, change)).groups
    assert set(join_fields(list_failing(group), "tensors")) == {"0.weight"}
    assert group.verdict == "out_of_sync"


@pytest.mark.parametrize("groups", [{}, {"weight_decay": 0.5}], ids=["one group", "two groups"])
def test_a_lost_partition_is_reported(tmp_path: Path, groups: dict[str, Any]) -> None:
    """A rank whose optimizer has parameters but no state has lost its partition, and is the only suspect."""

    def change(rank: int, content: dict[str, Any]) -> None:
        if rank == 2:
            content["optimizer"]["state"] = {}

    (group,) = syncheck.compare(*save_zero_ranks(tmp_path, change, **groups)).groups
    failing = list_failing(group)
    assert group.verdict == "out_of_sync"
    assert set(list_codes(failing)) <= {"SYN101", "SYN215"}
    assert set(join_fields(failing, "ranks")) == {2}


@pytest.mark.parametrize("odd", [False, True])
def test_consolidated_state_beside_partitions_is_undecided(tmp_path: Path, odd: bool) -> None:
    """If rank 0 holds the consolidated state, the parameters of the other ranks' states are unknown: exit code 2."""
    torch.manual_seed(0)
    model = network()
    complete = take_step(torch.optim.AdamW(model.parameters(), lr=1e-3), model).state_dict()

    def change(rank: int, content: dict[str, Any]) -> None:
        if rank == 0:
            content["optimizer"] = complete
        elif rank == 1 and odd:
            next(iter(content["optimizer"]["state"].values()))["exp_avg"].view(-1)[0] += 1

    report = syncheck.compare(*save_zero_ranks(tmp_path, change))
    assert (report.exit_code, report.groups[0].kinds["parameter"].identical) == (2, 10)


@pytest.mark.parametrize("differ", [False, True])
def test_states_that_may_be_partitions_or_copies(tmp_path: Path, differ: bool) -> None:
    """If two ranks hold half of the states with equal shapes, equal states are in sync, unequal states undecided."""
    for rank in range(2):
        torch.manual_seed(0)
        model = twins()
        content = {"model": model.state_dict()}
        half = torch.optim.AdamW(model[1].parameters(), lr=1e-3)
        content["optimizer"] = take_step(half, model).state_dict()
        content["optimizer"]["state"][0]["exp_avg"][0, 0] += rank * differ
        content["model"] = {name: torch.ones_like(t) for name, t in content["model"].items()}
        torch.save(content, tmp_path / f"m_rank{rank}.pth")
    assert syncheck.compare(tmp_path).exit_code == 2 * differ


@pytest.mark.parametrize("lose", ["entries", "group"])
def test_lost_state_of_a_partial_optimizer_is_missing(tmp_path: Path, lose: str) -> None:
    """If replicas train the head only, a state on one of two ranks is missing from the other, not partitioned."""
    for rank in range(2):
        torch.manual_seed(0)
        model = network()
        head = torch.optim.AdamW([*model[3].parameters(), *model[4].parameters()], lr=1e-3)
        content = {"model": copy_values(model.state_dict())}
        state = take_step(head, model).state_dict()
        if rank == 1:
            del state["state"][2], state["state"][3]
            if lose == "group":
                state["param_groups"][0]["params"] = [0, 1]
        torch.save(content | {"optimizer": state}, tmp_path / f"m_rank{rank}.pth")
    (group,) = syncheck.compare(tmp_path).groups
    # A shorter list of parameters is also a different setting.
    codes = list_codes(list_failing(group))
    assert codes == (["SYN101", "SYN107"] if lose == "group" else ["SYN101"])


def write_nodes(folder: Path, ranks: list[list[int]], size: int = 4, value: float = 0.0) -> list[Path]:
    """Write a tag folder per node with the partitions of its ranks. value: added to the last node's model."""
    created = []
    for node, own_values in enumerate(ranks):
        tag = folder / f"node{node}" / "global_step500"
        tag.mkdir(parents=True)
        model = {"w": torch.ones(4) + value * (node == len(ranks) - 1)}
        torch.save({"module": model, "global_steps": 500, "dp_world_size": size, "mp_world_size": 1},
                   tag / "mp_rank_00_model_states.pt")  # fmt: skip
        for rank in own_values:
            part = {"single_partition_of_fp32_groups": [torch.full((4,), float(rank))], "zero_stage": 2}
            torch.save({"optimizer_state_dict": part}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        created.append(tag)
    return created


@pytest.mark.parametrize(
    ("ranks", "size", "value", "code"),
    [
        ([[0, 1], [2, 3]], 4, 0, 0),
        ([[0], [1], [2]], 3, 0, 0),
        ([[0, 1], [2, 3]], 4, 1, 1),
        ([[0, 1], [3]], 4, 0, 2),
        ([[0, 1], [2, 3]], 8, 0, 2),
        ([[0, 1], [0, 1]], 2, 0, 0),
        ([[0, 1], [1]], 2, 0, 1),
    ],
)
def test_folders_of_nodes(tmp_path: Path, ranks: list[list[int]], size: int, value: float, code: int) -> None:
    """If all partitions are present, the models decide; an absent partition is exit code 2, or 1 if a copy has it."""
    report = syncheck.compare(*write_nodes(tmp_path, ranks, size, value))
    assert report.exit_code == code
    assert report.counts.tensors - report.counts.not_compared >= (1 if code < 2 else 0)


def test_copies_of_one_nodes_folder_are_compared(tmp_path: Path) -> None:
    """If two copies of one node's folder differ in a partition, the exit code is 1."""
    (first,) = write_nodes(tmp_path, [[2, 3]])
    second = tmp_path / "copy" / "global_step500"
    shutil.copytree(first, second)
    assert syncheck.compare(first, second).exit_code == 0
    altered = {"single_partition_of_fp32_groups": [torch.zeros(4)], "zero_stage": 2}
    torch.save({"optimizer_state_dict": altered}, second / "zero_pp_rank_3_mp_rank_00_optim_states.pt")
    assert syncheck.compare(first, second).exit_code == 1


OWN = (["fc.weight"], ["fc.bias"])


def rank_file(folder: Path, rank: int, state: dict[str, Any], *, sharded: bool = True, own: Any = OWN) -> Path:
    """Write a rank's file. state: moments by parameter. own: the parameters in the metadata of each rank."""
    model = arrays()
    parameters = own[rank]
    block = syncheck.metadata(run="zero", run_id="1", rank=rank, world_size=2, optimizer_sharded=sharded)
    block["optimizer_parameters"] = parameters
    moments = {parameters.index(name): {"exp_avg": array} for name, array in state.items()}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": list(range(len(parameters)))}]}
    return save_pth(folder / f"zero_rank{rank}.pth", {"model": model, "optimizer": optimizer, "syncheck": block})


def moments(name: str, value: float = 1.0) -> dict[str, Any]:
    """Return the state of one parameter."""
    return {name: np.full_like(arrays()[name], value)}


def test_partitions_are_not_missing(tmp_path: Path) -> None:
    """Each rank's own optimizer state counts as sharded, and the model is in sync."""
    files = [rank_file(tmp_path, rank, moments(OWN[rank][0])) for rank in range(2)]
    report = syncheck.compare(*files)
    (group,) = report.groups
    (finding,) = group.findings
    assert (report.verdict, finding.code, finding.fails) == ("in_sync", "SYN104", False)
    (shards,) = group.shards
    assert (shards.kind, shards.tensors, shards.compared, shards.replica_groups) == ("optimizer", 2, 0, ())
    assert {diff.name: (diff.reason, diff.detail) for diff in group.tensors} == {
        "optimizer.fc.weight.exp_avg": (Reason.SHARDED, Detail.PARTITIONED(ranks=(0,))),
        "optimizer.fc.bias.exp_avg": (Reason.SHARDED, Detail.PARTITIONED(ranks=(1,))),
    }
    assert group.counts.not_compared == 2


@pytest.mark.parametrize("whose", ["own", "shared"])
def test_lost_state_is_missing(tmp_path: Path, whose: str) -> None:
    """If a rank lacks the state of a parameter in its metadata, the state is lost: SYN101."""
    is_own = OWN if whose == "own" else (["fc.weight"], ["fc.weight", "fc.bias"])
    first = {**moments("fc.weight")}
    files = [rank_file(tmp_path, 0, first, own=is_own), rank_file(tmp_path, 1, {}, own=is_own)]
    report = syncheck.compare(*files)
    assert report.verdict == "out_of_sync"
    (group,) = report.groups
    finding = get_failing(group)
    lost = {f"optimizer.{name}.exp_avg" for name in is_own[1]}  # no file holds state of fc.bias
    assert (finding.code, set(finding.tensors)) == ("SYN101", lost)
    details = dict(list_fields(group.tensors, "name", "detail"))
    assert details["optimizer.fc.bias.exp_avg"] == Detail.OWN_PART_MISSING(rank=1)
    if whose == "shared":
        assert details["optimizer.fc.weight.exp_avg"] == Detail.MISSING(ranks=(1,))


def test_state_on_no_rank_is_not_missing(tmp_path: Path) -> None:
    """State is not missing if no rank has any, as with plain SGD or a parameter without gradients."""
    nobody = [rank_file(tmp_path / "sgd", rank, {}) for rank in range(2)]
    own_values = (["fc.weight"], ["fc.bias", "conv.weight"])
    unused = [rank_file(tmp_path / "unused", rank, moments(own_values[rank][0]), own=own_values) for rank in range(2)]
    for files in (nobody, unused):
        assert syncheck.compare(*files).verdict == "in_sync"


def test_a_partition_flag_on_one_rank_only_is_ignored(tmp_path: Path) -> None:
    """If the metadata of only one file marks the optimizer as sharded, state in the other file is missing: SYN101."""
    files = [rank_file(tmp_path, rank, moments(OWN[rank][0]), sharded=rank == 0) for rank in range(2)]
    report = syncheck.compare(*files)
    assert report.verdict == "out_of_sync"
    assert list_codes(report.groups[0].findings) == ["SYN101"]


def test_state_on_both_ranks_is_compared(tmp_path: Path) -> None:
    """State of the same parameter on two ranks is compared, and a difference is out of sync."""
    own_values = (["fc.weight"], ["fc.weight"])
    files = [rank_file(tmp_path, rank, moments("fc.weight", rank), own=own_values) for rank in range(2)]
    (group,) = syncheck.compare(*files).groups
    assert group.verdict == "out_of_sync"
    assert list_names(group.tensors) == ["optimizer.fc.weight.exp_avg"]
