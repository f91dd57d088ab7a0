"""The parts of a replica that `check` compares, and its arguments, each with and without an injected difference."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.agreement import Net, all_pass, all_raise, each_rank
from support.listings import find_all, list_fields, list_names
from torch import nn

from syncheck.live import check

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.records import Report


class Rich(nn.Module):
    """A network with tied weights, a non-persistent buffer, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.scale = 1.0

    def get_extra_state(self) -> dict[str, Any]:
        return {"scale": self.scale, "history": torch.full((2,), self.scale)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)) * self.mask.sum()


def replica(groups: int = 0) -> tuple[Rich, torch.optim.Optimizer, Any]:
    """Return a network after a step with its optimizer and scaler. groups: order of the optimizer's two groups."""
    torch.manual_seed(0)
    model = Rich()
    listing = [{"params": [model.first.weight], "lr": 0.1}, {"params": [model.first.bias, model.last.bias], "lr": 0.1}]
    optimizer = torch.optim.Adam(listing[::-1] if groups else listing)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return model, optimizer, scaler


def transient(model: Rich, optimizer: Any, scaler: Any) -> None:
    model.mask[1] = 2


def extra(model: Rich, optimizer: Any, scaler: Any) -> None:
    model.scale = 2.0


def tied(model: Rich, optimizer: Any, scaler: Any) -> None:
    model.first.weight.data[2, 1] += 1


def moment(model: Rich, optimizer: Any, scaler: Any) -> None:
    optimizer.state[model.last.bias]["exp_avg"][3] += 1


def rate(model: Rich, optimizer: Any, scaler: Any) -> None:
    optimizer.param_groups[1]["lr"] = 0.5


def scale(model: Rich, optimizer: Any, scaler: Any) -> None:
    scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})


# The fault on rank 1, and the reported names.
PLANTED: dict[str, tuple[Callable[..., None], list[str]]] = {
    "a buffer that is not saved": (transient, ["mask"]),
    "an extra state": (extra, ["_extra_state.history", "_extra_state.scale"]),
    "a weight that is tied": (tied, ["first.weight", "last.weight"]),
    "a moment": (moment, ["optimizer.last.bias.exp_avg"]),
    "a learning rate": (rate, ["optimizer.param_groups.1.lr"]),
    "a loss scale": (scale, ["scaler.scale"]),
}


def named(report: Report) -> list[str]:
    """Return the names of all differences, tensors first."""
    group = report.groups[0]
    return list_names(group.tensors) + list_names(find_all(group.values, counts=True))


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("what", PLANTED)
def test_every_part_of_a_replica_is_compared(syncheck_rank: Any, what: str) -> None:
    """A difference in one part on rank 1 is reported by name, and nothing else."""
    parts = replica()
    assert all_pass(each_rank(check, *parts)).verdict == "in_sync"
    plant, names = PLANTED[what]
    if syncheck_rank.rank == 1:
        plant(*parts)
    report = all_pass(each_rank(check, *parts))
    assert (report.verdict, named(report)) == ("out_of_sync", names)


@pytest.mark.syncheck(ranks=2)
def test_optimizer_states_by_name_and_groups_by_position(syncheck_rank: Any) -> None:
    """If rank 1's optimizer has another group order, states agree by name, and group members differ."""
    parts = replica(groups=syncheck_rank.rank)
    report = all_pass(each_rank(check, *parts))
    group = report.groups[0]
    assert (group.tensors, group.kinds["optimizer"].identical) == ((), 6)
    assert set(list_names(group.values)) == {
        "optimizer.param_groups.0.params",
        "optimizer.param_groups.1.params",
    }


# --- RNG states ---


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("generator", ["torch", "python", "numpy"])
def test_random_states_are_compared_when_asked(syncheck_rank: Any, generator: str) -> None:
    """With rng=True, different seeds are reported; without it they are ignored.

    The replica's path consists of class names, without internal classes.
    """
    state = {"w": torch.ones(3)}
    seeds = {"torch": torch.manual_seed, "python": random.seed, "numpy": np.random.seed}
    for seed in seeds.values():
        seed(1)
    report = all_pass(each_rank(check, state, rng=True))
    assert (report.verdict, report.groups[0].kinds["rng"].identical) == ("in_sync", 5)
    assert report.groups[0].replicas[0].path.startswith("dict, RandomStates on ")
    seeds[generator](1 + syncheck_rank.rank)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    outcomes = each_rank(check, state, rng=True)
    assert all_pass(outcomes).verdict == "out_of_sync"
    assert list_fields(outcomes[0].report.groups[0].tensors, "name", "kind") == [(f"rng.{generator}", "rng")]
    assert f"rng.{generator}" in outcomes[0].findings[0].tensors
    assert all_pass(each_rank(check, state)).verdict == "in_sync"
    if generator == "python":
        random.seed(1)
        if syncheck_rank.rank:  # the same words, and a cached normal variate
            random.setstate((*random.getstate()[:2], 0.5))
        before = before[0], random.getstate(), before[2]
        report = all_pass(each_rank(check, state, rng=True))
        assert list_names(report.groups[0].tensors) == ["rng.python_gauss"]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


@pytest.mark.syncheck(ranks=2)
def test_another_generator_of_numpy_is_compared(syncheck_rank: Any) -> None:
    """The state of a non-default numpy generator is compared, and no rank fails."""
    usual = np.random.get_bit_generator()
    for case in (lambda rank: np.random.PCG64(5), lambda rank: np.random.PCG64(5 + rank)):
        np.random.set_bit_generator(case(syncheck_rank.rank))
        try:
            result = all_pass(each_rank(check, {"w": torch.ones(1)}, rng=True, include=("w", "rng.numpy")))
        finally:
            np.random.set_bit_generator(usual)
        assert result.verdict == ("in_sync" if case(0).state == case(1).state else "out_of_sync")


# --- arguments ---


@pytest.mark.syncheck(ranks=2)
def test_a_single_text_is_one_pattern(syncheck_rank: Any) -> None:
    """A string for include, exclude or only is one pattern, not a sequence of letters."""
    state = {"a": torch.ones(2), "ab": torch.full((2,), float(syncheck_rank.rank))}
    assert all_pass(each_rank(check, state, include="a*")).verdict == "out_of_sync"
    retained = all_pass(each_rank(check, state, exclude="*b"))
    assert (retained.verdict, retained.counts.identical, retained.groups[0].left_out) == ("in_sync", 1, 1)
    assert all_pass(each_rank(check, state, only="params")).verdict == "out_of_sync"
    assert all_pass(each_rank(check, Net(), only="optimizer")).verdict == "undecided"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a budget in words": ({"budget": "1 GB"}, "budget='1 GB': must be an integer number of bytes"),
    "a negative budget": ({"budget": -1}, "budget=-1: must be an integer number of bytes"),
    "an unknown kind": ({"only": "weights"}, "only='weights': must be one of params"),
    "a number for texts": ({"exclude": 3}, "exclude=3: must be a list"),
    "rng as a number": ({"rng": 2}, "rng=2: must be true or false"),
    "no mesh": (
        {"mesh": torch.arange(2)},
        "mesh= of class Tensor: expected",
    ),
    "a finding": ({"allow": "SYN999"}, "allow='SYN999': no such code"),
}


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("on", ["all ranks", "rank 1"])
def test_wrong_arguments_raise_on_all_ranks(syncheck_rank: Any, on: str) -> None:
    """An invalid argument, on all ranks or on one, is the same UsageError on all ranks."""
    for what, (options, says) in WRONG.items():
        settings = options if on == "all ranks" or syncheck_rank.rank == 1 else {}
        outcome = all_raise(each_rank(check, {"w": torch.ones(1)}, **settings), "UsageError")
        assert outcome.text.startswith(says if on == "all ranks" else f"rank 1: {says}"), what
    outcome = all_raise(each_rank(check, Net(), 3 if syncheck_rank.rank else None), "UsageError")
    assert outcome.text.startswith("rank 1: an object of class int cannot be compared")


@pytest.mark.syncheck(ranks=4)
def test_a_mesh_that_does_not_fit_is_refused(syncheck_rank: Any) -> None:
    """A mesh without names, or without some of the group's ranks, raises the same UsageError on all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    state = {"w": torch.ones(1)}
    outcome = all_raise(each_rank(check, state, mesh=init_device_mesh("cpu", (2, 2))), "UsageError")
    assert outcome.text.startswith("mesh= has no dimension names")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    outcome = all_raise(each_rank(check, state, mesh=mesh["dp"], group=dist.group.WORLD), "UsageError")
    assert "ranks 0, 2: mesh= does not contain ranks 1, 3 of the group" in outcome.text
    # A one-dimensional mesh is a group too.
    report = each_rank(check, {"w": torch.full((1,), float(syncheck_rank.rank % 2))}, mesh=mesh["dp"])
    assert {outcome.report.verdict for outcome in report} == {"in_sync"}
    assert [outcome.report.groups[0].ranks for outcome in report] == [(0, 2), (1, 3)] * 2
