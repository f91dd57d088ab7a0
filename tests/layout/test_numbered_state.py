"""Optimizer state by number, if the model of some ranks lacks a tensor or has one more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.listings import find_first, get_failing, list_codes, list_failing
from support.states import add_prefix, copy_values
from torch import nn

import syncheck
from syncheck.diagnose.syn101_missing_tensors import Text as Missing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncheck.records import Group

    Change = Callable[[int, dict[str, Any]], None]


def make_model() -> Any:
    """Return a network whose layers have equal shapes, so that shapes alone name nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))


def compare(folder: Path, change: Change, *, ranks: int = 4, groups: bool = False, shuffled: bool = False) -> Group:
    """Compare the files of ranks whose contents are equal except for a change.

    groups: whether the weights have a parameter group of their own.
    shuffled: whether the state dict lists the states in another order, as after a state was recreated.
    """
    for rank in range(ranks):
        model = make_model()
        parameters: Any = model.parameters()
        if groups:
            weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
            biases = [parameter for parameter in model.parameters() if parameter.ndim < 2]
            parameters = [{"params": biases}, {"params": weights, "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(parameters)
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.linspace(1, 2 + number, parameter.numel()).view_as(parameter)
        optimizer.step()
        state = optimizer.state_dict()
        if shuffled:
            state["state"] = dict(reversed(state["state"].items()))
        content = {"model": copy_values(model.state_dict()), "optimizer": state}
        change(rank, content)
        torch.save(content, folder / f"m_rank{rank}.pth")
    (group,) = syncheck.compare(folder).groups
    return group


def lose(rank: int, content: dict[str, Any]) -> None:
    """Remove a tensor of the model on rank 1."""
    if rank == 1:
        del content["model"]["2.bias"]


def lose_first(rank: int, content: dict[str, Any]) -> None:
    """Remove the first tensor of the model on rank 1: the shapes of the others fit the first numbers."""
    if rank == 1:
        del content["model"]["0.weight"]


def lose_layer(rank: int, content: dict[str, Any]) -> None:
    """Remove both tensors of a layer on rank 1."""
    if rank == 1:
        del content["model"]["1.weight"], content["model"]["1.bias"]


def gain(rank: int, content: dict[str, Any]) -> None:
    """Add a tensor to the model of rank 1."""
    if rank == 1:
        content["model"]["1.extra"] = torch.ones(6)


def wrap_and_lose(rank: int, content: dict[str, Any]) -> None:
    """Remove a tensor on rank 1, and save the model of rank 0 with the prefix of a wrapper."""
    lose(rank, content)
    if rank != 1:
        content["model"] = add_prefix(content["model"], "module.")


@pytest.mark.parametrize("change", [lose, lose_first, lose_layer, gain, wrap_and_lose])
@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
def test_only_the_tensors_of_the_model_are_missing(tmp_path: Path, change: Change, groups: bool) -> None:
    """If one rank lacks a tensor of the model, the optimizer state of all ranks is compared and in sync."""
    group = compare(tmp_path, change, groups=groups)
    finding = get_failing(group)
    assert (finding.code, finding.ranks) == ("SYN101", (1,))
    assert not any(name.startswith("optimizer.") for name in finding.tensors)
    assert (group.kinds["optimizer"].identical, group.kinds["optimizer"].tensors) == (12, 12)


@pytest.mark.parametrize("change", [lose, gain])
@pytest.mark.parametrize("number", [0, 5])
def test_corrupted_state_beside_a_missing_tensor_is_found(tmp_path: Path, change: Change, number: int) -> None:
    """A difference of optimizer state on the rank that lacks a tensor is reported, also in the state of this tensor."""

    def corrupt(rank: int, content: dict[str, Any]) -> None:
        change(rank, content)
        if rank == 1:
            content["optimizer"]["state"][number]["exp_avg"].view(-1)[3] += 1

    group = compare(tmp_path, corrupt, shuffled=True)
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    damage = find_first(group.findings, code="SYN220")
    assert list_codes(list_failing(group)) == ["SYN101", "SYN220"]
    assert (damage.ranks, damage.tensors) == ((1,), (f"optimizer.{names[number]}.exp_avg",))


def test_two_ranks_lack_different_tensors(tmp_path: Path) -> None:
    """Each rank is named with the tensors that it lacks."""

    def change(rank: int, content: dict[str, Any]) -> None:
        if rank == 1:
            del content["model"]["2.bias"]
        if rank == 0:
            content["model"]["extra.weight"] = torch.ones(3)

    finding = get_failing(compare(tmp_path, change))
    one = Missing.TENSORS(tensors=1)
    assert (finding.ranks, finding.tensors) == ((0, 1), ("2.bias", "extra.weight"))
    assert finding.facts == (
        Missing.MISSING(ranks=(1,), missing=one, names=("2.bias",)),
        Missing.ALSO_MISSING(ranks=(1, 2, 3), missing=one, names=("extra.weight",)),
    )


def test_a_partition_is_not_paired(tmp_path: Path) -> None:
    """A rank that numbers fewer parameters than the other ranks may hold a partition: its state is not compared."""

    def halve(rank: int, content: dict[str, Any]) -> None:
        if rank == 1:
            state = content["optimizer"]
            state["state"] = {number: state["state"][number + 3] for number in range(3)}
            state["param_groups"][0]["params"] = [0, 1, 2]

    group = compare(tmp_path, halve, ranks=2)
    assert group.kinds["optimizer"].identical == 0


def test_other_shapes_are_not_paired(tmp_path: Path) -> None:
    """A rank with as many numbers but state of other shapes is not paired by number."""

    def change(rank: int, content: dict[str, Any]) -> None:
        lose(rank, content)
        if rank == 1:
            states = content["optimizer"]["state"]
            states[0], states[1] = states[1], states[0]

    group = compare(tmp_path, change)
    assert (group.verdict, group.kinds["optimizer"].identical) == ("out_of_sync", 0)


@pytest.mark.parametrize("kept", [0, 2])
def test_names_changed_by_a_map(tmp_path: Path, kept: int) -> None:
    """A model whose names a map changes, without or with some of its own names, names no numbers of the other one."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    first, second = tmp_path / "a.pth", tmp_path / "b.pth"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, first)
    renamed = {}
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        renamed[name if number < kept else f"block.{name}"] = tensor
    torch.save({"model": renamed}, second)
    accept = syncheck.DiffOptions(accept_inferred=True)
    for pair in ((first, second), (second, first)):
        report = syncheck.diff(*pair, options=accept)
        assert report.exit_code in (0, 1, 2)
        # The optimizer state of one model has no counterpart.
        assert report.counts.different == 0
