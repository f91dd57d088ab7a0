"""Plain values beside tensors: in memory all are compared, first of all values of optimizers and schedulers."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.agreement import all_pass, each_rank
from support.listings import find_texts
from torch import nn

from syncheck.testing import OutOfSync, assert_in_sync, compare

if TYPE_CHECKING:
    from collections.abc import Callable


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def sgd(model: Any, groups: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),)) -> torch.optim.Optimizer:
    """Return an optimizer without momentum, and so without tensors."""
    parameters = list(model.parameters())
    return torch.optim.SGD([{"params": [parameters[i] for i in group]} for group in groups], lr=0.1)


def one_group(model: Any) -> Any:
    return model, sgd(model)


def two_groups(model: Any) -> Any:
    return model, sgd(model, ((0, 1), (2, 3)))


def swapped(model: Any) -> Any:
    return model, sgd(model, ((0, 3), (2, 1)))


def subset(model: Any) -> Any:
    return model, sgd(model, ((0, 1, 2),))


def none(model: Any) -> Any:
    return (model,)


def saved(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the checkpoint of a model and its optimizer."""

    def make(model: Any) -> Any:
        model, optimizer = of(model)
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    return make


def step_lr(steps: int) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return model, optimizer, scheduler

    return make


def plateau(loss: float) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd(model))
        scheduler.step(loss)
        return model, scheduler

    return make


def scaler(key: str, scale: float) -> Callable[[Any], Any]:
    state = torch.amp.GradScaler("cpu", init_scale=scale).state_dict()
    return lambda model: {"model": model.state_dict(), key: state}


def plain(**values: Any) -> Callable[[Any], Any]:
    return lambda model: {"model": model.state_dict(), **values}


UNLIKE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str, str]] = {
    "number of groups": (one_group, two_groups, "optimizer.param_groups.1.lr", "SYN107"),
    "members of groups": (two_groups, swapped, "optimizer.param_groups.0.params", "SYN107"),
    "saved members": (saved(two_groups), saved(one_group), "optimizer.param_groups.1.lr", "SYN107"),
    "a subset": (one_group, subset, "optimizer.param_groups.0.params", "SYN107"),
    "an optimizer on one side": (one_group, none, "optimizer.param_groups.0.lr", "SYN101"),
    "last_epoch": (step_lr(1), step_lr(2), "lr_scheduler.last_epoch", "SYN107"),
    "best": (plateau(1.0), plateau(2.0), "best", "SYN107"),
    "a scaler's scale": (scaler("amp", 8.0), scaler("amp", 4.0), "amp.scale", "SYN216"),
    "a scaler's key": (scaler("amp", 8.0), scaler("scaler", 8.0), "amp.scale", "SYN101"),
    "a number": (plain(temperature=0.5), plain(temperature=0.7), "temperature", "SYN299"),
    "a number on one side": (plain(temperature=0.5), plain(), "temperature", "SYN101"),
    "a step on one side": (plain(step=3), plain(), "step", "SYN101"),
    "a number and a dict": (plain(step=3), plain(step={"a": 1}), "step", "SYN101"),
    "a text and a tuple": (plain(note="y"), plain(note=("y", 1)), "note", "SYN101"),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_values_in_memory_count(what: str) -> None:
    """Equal tensors with a different optimizer, scheduler, scaler or number fail, and the value is named."""
    first, second, name, code = UNLIKE[what]
    assert_in_sync(first(net()), first(net()))
    with pytest.raises(OutOfSync) as caught:
        assert_in_sync(first(net()), second(net()))
    [finding] = caught.value.report.groups[0].findings
    assert finding.code == code
    assert find_texts(finding.values, name), finding.values


def test_a_live_optimizer_agrees_with_its_state_dict() -> None:
    """Group members are known by name or position; if neither can be compared, no difference is reported."""
    for make in (one_group, two_groups, subset, swapped):
        model, optimizer = make(net())
        assert_in_sync((model, optimizer), {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        assert_in_sync((model, optimizer), (torch.compile(model), optimizer))


@pytest.mark.parametrize("excused", [{"exclude": "temperature"}, {"only": "params"}, {"include": "*.weight"}], ids=str)
def test_options_exclude_values(excused: dict[str, Any]) -> None:
    """Options that exclude tensors also exclude values."""
    assert_in_sync(plain(temperature=0.5)(net()), plain(temperature=0.7)(net()), **excused)


def test_only_does_not_exclude_the_learning_rate() -> None:
    """only= selects tensors; a different learning rate is excluded only by name, as between files."""
    model, optimizer = one_group(net())
    altered, second = copy.deepcopy((model, optimizer))
    second.param_groups[0]["lr"] = 0.5
    assert compare((model, optimizer), (altered, second), only="params").verdict == "out_of_sync"
    assert_in_sync((model, optimizer), (altered, second), exclude="optimizer.param_groups.*")


@pytest.mark.syncheck(ranks=2)
def test_values_of_a_single_rank_may_differ(syncheck_rank: Any) -> None:
    """The rank, its device and its RNG state differ by design, in memory too."""
    rank = syncheck_rank.rank
    own_values = {"args": {"local_rank": rank, "device": f"cuda:{rank}"}, "rng": {"python": (3, (rank, 7), None)}}
    all_pass(each_rank(assert_in_sync, {"model": net().state_dict(), **own_values}))
