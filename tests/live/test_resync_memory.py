"""`resync` and how tensors and states lie in memory: shared elements, odd strides, lists of states, arrays, loggers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from agreement import Net, all_pass, each_rank, on_all
from healing import bits, healed
from torch import nn

from syncheck.live import resync


@pytest.mark.syncheck(ranks=3)
def test_a_single_element_with_a_stride_is_healed(syncheck_rank: Any) -> None:
    """A tensor of one element that was cut out of a larger one counts as contiguous and has a stride that is not 1."""
    model = nn.Module()
    model.cut = nn.Parameter(torch.arange(6.0)[::2][:1])
    model.register_buffer("corner", torch.arange(16.0).reshape(4, 4)[1::2, 1::2][:1, :1])
    if syncheck_rank.rank == 1:
        model.cut.data += 1
        model.corner += 1
    assert (model.cut.stride(), model.corner.stride()) == ((2,), (8, 2))
    healed(model, bad=(1,), source=0)


def by_lbfgs() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    train(model, optimizer)
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.arange(12.0).reshape(3, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


LISTS = ("old_dirs", "old_stps", "ro")


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("fault", ["lost", "fewer", "more", "first"])
def test_lists_of_an_optimizer_are_healed(syncheck_rank: Any, fault: str) -> None:
    """LBFGS keeps its history in lists: lost, too short and too long ones become lists like the source's, and train."""
    model, optimizer = by_lbfgs()
    state = optimizer.state[model.fc.weight]
    if syncheck_rank.rank == 1:
        if fault == "lost":
            optimizer.state.clear()
        for name in () if fault == "lost" else LISTS:
            if fault == "more":
                state[name] += [state[name][0].clone(), state[name][0].clone()]
            else:
                state[name].pop(0 if fault == "first" else -1)
    healed(model, optimizer, bad=(1,), source=0)
    state = optimizer.state[model.fc.weight]
    assert all(type(state[name]) is list for name in (*LISTS, "al"))
    train(model, optimizer)  # not one step more or less, and no error
    held = on_all(bits(model, optimizer))
    assert held[1] == held[0] == held[2]


class Helper:
    """Keeps plain values in containers, and has a state dict, as schedulers have."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


FULL = {"steps": [1, 2, 3], "deep": [(1, "a"), [2.5, [None, True]]], "named": {"a": {"b": [7]}}}
LESS: dict[str, Any] = {"steps": [1], "deep": [], "named": {}}


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize(("right", "wrong"), [(FULL, LESS), (LESS, FULL)])
def test_lists_of_values_are_healed(syncheck_rank: Any, right: dict[str, Any], wrong: dict[str, Any]) -> None:
    """Lists in a state dict that are longer or shorter than the source's, and nested ones, become equal to them."""
    helper = Helper(**(wrong if syncheck_rank.rank == 2 else right))
    done = all_pass(each_rank(resync, (Net().requires_grad_(False).apply(zeros), helper)))
    assert helper.values == right
    assert done.after.verdict == "in_sync"  # type: ignore[attr-defined]


def zeros(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data.zero_()


class Full(logging.Handler):
    """A handler of a log that cannot be written."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("no space left on device")


@pytest.mark.syncheck(ranks=3)
def test_a_log_that_fails_stops_no_rank(syncheck_rank: Any) -> None:
    """The first rank alone logs what was done; where its handler raises, it must not be the only rank that raises."""
    model = Net().apply(zeros)
    if syncheck_rank.rank == 1:
        model.fc.bias.data += 1
    handler = Full()
    logging.getLogger("syncheck").addHandler(handler)
    try:
        healed(model, bad=(1,), source=0)
    finally:
        logging.getLogger("syncheck").removeHandler(handler)
