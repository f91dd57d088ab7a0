"""Optimizer state that ranks or nodes hold in parts: known by metadata, by shapes and numbers, and by labels."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoints import network as arrays
from checkpoints import save_pth
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
    """Return a network whose parameters are of several shapes, some of which repeat."""
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))


def twins() -> nn.Module:
    """Return a network of which each parameter is there twice."""
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def stepped(optimizer: Any, model: nn.Module) -> Any:
    """Return an optimizer that took a step with the same gradients everywhere."""
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (i + 1))
    optimizer.step()
    return optimizer


def zero(
    folder: Path,
    change: Callable[[int, dict[str, Any]], None] = lambda rank, state: None,
    make: Callable[[], nn.Module] = network,
    **groups: Any,
) -> list[Path]:
    """Save what each rank of a ZeroRedundancyOptimizer holds. change: called with the state of each rank."""
    folder.mkdir(exist_ok=True)
    files = []
    for rank in range(WORLD):
        dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
        try:
            torch.manual_seed(0)
            model = make()
            content: dict[str, Any] = {"model": {name: t.clone() for name, t in model.state_dict().items()}}
            split: Any = model.parameters()
            if groups:
                decayed = [p for p in model.parameters() if p.ndim > 1]
                split = [{"params": decayed, **groups}, {"params": [p for p in model.parameters() if p.ndim < 2]}]
            optimizer = ZeroRedundancyOptimizer(split, torch.optim.AdamW, lr=1e-3)
            content["optimizer"] = stepped(optimizer, model).optim.state_dict()
        finally:
            dist.destroy_process_group()
        change(rank, content)
        files.append(folder / f"z_rank{rank}.pth")
        torch.save(content, files[-1])
    return files


@pytest.mark.parametrize("groups", [{}, {"weight_decay": 0.5}], ids=["one group", "two groups"])
def test_parts_that_each_rank_numbers_itself(tmp_path: Path, groups: dict[str, Any]) -> None:
    """The local state dicts of ZeRO are sharded by design: the model is compared, and in sync."""
    report = syncheck.compare(*zero(tmp_path, **groups))
    (group,) = report.groups
    assert (report.exit_code, [finding.code for finding in group.findings]) == (0, ["SYN104"])
    assert group.kinds["optimizer"].compared == 0


def test_a_model_that_differs_beside_parts_is_found(tmp_path: Path) -> None:
    """Parts hide no parameter: one that differs is found, and nothing of the optimizer is accused."""

    def change(rank: int, content: dict[str, Any]) -> None:
        content["model"]["0.weight"][0, 0] += rank == 1

    (group,) = syncheck.compare(*zero(tmp_path, change)).groups
    assert {name for finding in group.findings if finding.fails for name in finding.tensors} == {"0.weight"}
    assert group.verdict == "out_of_sync"


@pytest.mark.parametrize("groups", [{}, {"weight_decay": 0.5}], ids=["one group", "two groups"])
def test_a_rank_that_lost_its_part_is_found(tmp_path: Path, groups: dict[str, Any]) -> None:
    """A rank whose optimizer has parameters and no state of any has lost it, as no other rank has."""

    def change(rank: int, content: dict[str, Any]) -> None:
        if rank == 2:
            content["optimizer"]["state"] = {}

    (group,) = syncheck.compare(*zero(tmp_path, change, **groups)).groups
    failing = [finding for finding in group.findings if finding.fails]
    assert group.verdict == "out_of_sync"
    assert {finding.code for finding in failing} <= {"SYN101", "SYN215"}
    assert {rank for finding in failing for rank in finding.ranks} == {2}


@pytest.mark.parametrize("odd", [False, True])
def test_the_whole_state_on_one_rank_beside_parts_is_never_in_sync(tmp_path: Path, odd: bool) -> None:
    """Rank 0 holds the consolidated state: nothing says which parameters the other ranks' states belong to."""
    torch.manual_seed(0)
    model = network()
    whole = stepped(torch.optim.AdamW(model.parameters(), lr=1e-3), model).state_dict()

    def change(rank: int, content: dict[str, Any]) -> None:
        if rank == 0:
            content["optimizer"] = whole
        elif rank == 1 and odd:
            next(iter(content["optimizer"]["state"].values()))["exp_avg"].view(-1)[0] += 1

    report = syncheck.compare(*zero(tmp_path, change))
    assert (report.exit_code, report.groups[0].kinds["parameter"].identical) == (2, 10)


@pytest.mark.parametrize("differ", [False, True])
def test_states_that_may_be_parts_or_copies(tmp_path: Path, differ: bool) -> None:
    """Two ranks, each with half as many states as parameters, of the same shapes: equal is in sync, unequal unclear."""
    for rank in range(2):
        torch.manual_seed(0)
        model = twins()
        content = {"model": model.state_dict()}
        half = torch.optim.AdamW(model[1].parameters(), lr=1e-3)
        content["optimizer"] = stepped(half, model).state_dict()
        content["optimizer"]["state"][0]["exp_avg"][0, 0] += rank * differ
        content["model"] = {name: torch.ones_like(t) for name, t in content["model"].items()}
        torch.save(content, tmp_path / f"m_rank{rank}.pth")
    assert syncheck.compare(tmp_path).exit_code == 2 * differ


@pytest.mark.parametrize("lose", ["entries", "group"])
def test_an_optimizer_of_some_parameters_that_lost_state_is_no_partition(tmp_path: Path, lose: str) -> None:
    """Replicas that train the head only number four parameters each: a state that one lacks is missing."""
    for rank in range(2):
        torch.manual_seed(0)
        model = network()
        head = torch.optim.AdamW([*model[3].parameters(), *model[4].parameters()], lr=1e-3)
        content = {"model": {k: t.clone() for k, t in model.state_dict().items()}}
        state = stepped(head, model).state_dict()
        if rank == 1:
            del state["state"][2], state["state"][3]
            if lose == "group":
                state["param_groups"][0]["params"] = [0, 1]
        torch.save(content | {"optimizer": state}, tmp_path / f"m_rank{rank}.pth")
    (group,) = syncheck.compare(tmp_path).groups
    # A group that lists fewer parameters is a setting of its own.
    codes = [finding.code for finding in group.findings if finding.fails]
    assert codes == (["SYN101", "SYN107"] if lose == "group" else ["SYN101"])


def nodes(folder: Path, ranks: list[list[int]], size: int = 4, value: float = 0.0) -> list[Path]:
    """Write a tag folder for each node, with the partitions of its ranks. value: added to the last node's model."""
    made = []
    for node, own in enumerate(ranks):
        tag = folder / f"node{node}" / "global_step500"
        tag.mkdir(parents=True)
        model = {"w": torch.ones(4) + value * (node == len(ranks) - 1)}
        torch.save({"module": model, "global_steps": 500, "dp_world_size": size, "mp_world_size": 1},
                   tag / "mp_rank_00_model_states.pt")  # fmt: skip
        for rank in own:
            part = {"single_partition_of_fp32_groups": [torch.full((4,), float(rank))], "zero_stage": 2}
            torch.save({"optimizer_state_dict": part}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        made.append(tag)
    return made


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
    """Nodes hold the partitions of their own ranks: with all of them there, the models decide."""
    report = syncheck.compare(*nodes(tmp_path, ranks, size, value))
    assert report.exit_code == code
    assert report.counts.tensors - report.counts.not_compared >= (1 if code < 2 else 0)


def test_copies_of_one_nodes_folder_are_compared(tmp_path: Path) -> None:
    """Two copies of one node's folder hold the same partitions: one that differs is found."""
    (first,) = nodes(tmp_path, [[2, 3]])
    second = tmp_path / "copy" / "global_step500"
    shutil.copytree(first, second)
    assert syncheck.compare(first, second).exit_code == 0
    other = {"single_partition_of_fp32_groups": [torch.zeros(4)], "zero_stage": 2}
    torch.save({"optimizer_state_dict": other}, second / "zero_pp_rank_3_mp_rank_00_optim_states.pt")
    assert syncheck.compare(first, second).exit_code == 1


OWN = (["fc.weight"], ["fc.bias"])


def rank_file(folder: Path, rank: int, state: dict[str, Any], *, sharded: bool = True, own: Any = OWN) -> Path:
    """Write a rank's file. state: moments by parameter, which need not be those that the rank says are its own."""
    model = arrays()
    parameters = own[rank]
    block = syncheck.metadata(run="zero", run_id="1", rank=rank, world_size=2, optimizer_sharded=sharded)
    block["optimizer_parameters"] = parameters
    moments = {parameters.index(name): {"exp_avg": array} for name, array in state.items()}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": list(range(len(parameters)))}]}
    return save_pth(folder / f"zero_rank{rank}.pth", {"model": model, "optimizer": optimizer, "syncheck": block})


def moments(name: str, value: float = 1.0) -> dict[str, Any]:
    """State of one parameter."""
    return {name: np.full_like(arrays()[name], value)}


def test_parts_are_not_missing(tmp_path: Path) -> None:
    """Each rank's own state is counted as sharded, and the model in both files is in sync."""
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
    """A rank whose file names a parameter among its own, and lacks its state, has lost it: SYN101."""
    own = OWN if whose == "own" else (["fc.weight"], ["fc.weight", "fc.bias"])
    first = {**moments("fc.weight")}
    files = [rank_file(tmp_path, 0, first, own=own), rank_file(tmp_path, 1, {}, own=own)]
    report = syncheck.compare(*files)
    assert report.verdict == "out_of_sync"
    (group,) = report.groups
    (finding,) = (finding for finding in group.findings if finding.fails)
    lost = {f"optimizer.{name}.exp_avg" for name in own[1]}  # though of fc.bias no file holds anything
    assert (finding.code, set(finding.tensors)) == ("SYN101", lost)
    details = {diff.name: diff.detail for diff in group.tensors}
    assert details["optimizer.fc.bias.exp_avg"] == Detail.OWN_PART_MISSING(rank=1)
    if whose == "shared":
        assert details["optimizer.fc.weight.exp_avg"] == Detail.MISSING(ranks=(1,))


def test_state_that_nobody_keeps_is_not_missing(tmp_path: Path) -> None:
    """Plain SGD keeps no state on any rank, and a parameter that had no gradient has none: nothing is lost."""
    nobody = [rank_file(tmp_path / "sgd", rank, {}) for rank in range(2)]
    own = (["fc.weight"], ["fc.bias", "conv.weight"])
    unused = [rank_file(tmp_path / "unused", rank, moments(own[rank][0]), own=own) for rank in range(2)]
    for files in (nobody, unused):
        assert syncheck.compare(*files).verdict == "in_sync"


def test_the_flag_on_one_rank_excuses_nothing(tmp_path: Path) -> None:
    """Where only one file says that state is in parts, the other's is missing from it: SYN101."""
    files = [rank_file(tmp_path, rank, moments(OWN[rank][0]), sharded=rank == 0) for rank in range(2)]
    report = syncheck.compare(*files)
    assert report.verdict == "out_of_sync"
    assert [finding.code for finding in report.groups[0].findings] == ["SYN101"]


def test_state_on_both_is_compared(tmp_path: Path) -> None:
    """What two ranks hold all the same, unequal, is a difference."""
    own = (["fc.weight"], ["fc.weight"])
    files = [rank_file(tmp_path, rank, moments("fc.weight", rank), own=own) for rank in range(2)]
    (group,) = syncheck.compare(*files).groups
    assert group.verdict == "out_of_sync"
    assert [diff.name for diff in group.tensors] == ["optimizer.fc.weight.exp_avg"]
