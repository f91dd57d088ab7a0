"""SYN219 in files: the formats of averaged copies of several libraries, and the origin of their differences."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.imports import import_or_skip
from support.listings import find_all, get_failing, list_codes, list_failing
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from syncheck import Options, compare
from syncheck.diagnose.syn219_averaged_copy_stale import Text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncheck.records import Report

DECAY = 0.9


class Run:
    """One rank of a run: a model that is equal on all ranks, and a copy with the tensors of the rank."""

    def __init__(self, seed: int = 0, **layers: nn.Module) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential()
        for name, layer in (
            layers or {"fc": nn.Linear(4, 8), "norm": nn.BatchNorm1d(8), "head": nn.Linear(8, 2)}
        ).items():
            self.model.add_module(name, layer)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, 1e-2)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 4) + torch.arange(3.0)[:, None]).square().mean().backward()
        self.optimizer.step()

    def states(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def is_weight(name: str) -> bool:
    return name.endswith(("weight", "bias"))


def average(run: Run, updates: int) -> dict[str, torch.Tensor]:
    """Return a copy of the model after some updates."""
    copies = {}
    for name, tensor in run.model.state_dict().items():
        copies[name] = tensor * DECAY**updates if is_weight(name) else tensor.clone()
    return copies


def list_average(run: Run, updates: int) -> list[torch.Tensor]:
    return [tensor for name, tensor in average(run, updates).items() if is_weight(name)]


def diffusers(run: Run, updates: int) -> dict[str, Any]:
    """Return the state of diffusers' EMAModel."""
    return {
        "decay": DECAY, "min_decay": 0.0, "optimization_step": updates, "update_after_step": 0,
        "use_ema_warmup": False, "inv_gamma": 1.0, "power": 2 / 3, "shadow_params": list_average(run, updates),
    }  # fmt: skip


def averaged_model(run: Run, updates: int) -> dict[str, Any]:
    averaged = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.module.load_state_dict(average(run, updates))
    averaged.n_averaged.fill_(updates)
    return averaged.state_dict()


def weight_averaging(run: Run, updates: int) -> dict[str, Any]:
    """Return a checkpoint of Lightning's WeightAveraging: the model is beside its averages."""
    return {
        "state_dict": average(run, updates),
        "optimizer_states": [run.optimizer.state_dict()],
        "current_model_state": run.model.state_dict(),
        "averaging_state": {"n_averaged": torch.tensor(updates)},
    }


def stochastic_averaging(run: Run, updates: int) -> dict[str, Any]:
    """Return a checkpoint of Lightning's StochasticWeightAveraging."""
    state = {"n_averaged": updates, "average_model_state": average(run, updates)}
    return {"callbacks": {"StochasticWeightAveraging": state}}


def ema_pytorch(run: Run, updates: int) -> dict[str, Any]:
    library = import_or_skip("ema_pytorch")
    ema = library.EMA(run.model, beta=DECAY)
    ema.ema_model.load_state_dict(average(run, updates))
    ema.step.fill_(updates)
    return {"average_of_weights": ema.state_dict()}


def in_generator(run: Run, updates: int) -> dict[str, Any]:
    """Return the checkpoint of a generator and its average, beside a discriminator."""
    second = {"conv.weight": torch.ones(3, 3), "conv.bias": torch.ones(3)}
    return {"generator": run.model.state_dict(), "generator_ema": average(run, updates), "discriminator": second}


FORMATS: dict[str, Callable[[Run, int], dict[str, Any]]] = {
    "timm": lambda run, updates: {"state_dict_ema": average(run, updates)},
    "basicsr": lambda run, updates: {"params": run.model.state_dict(), "params_ema": average(run, updates)},
    "diffusers": lambda run, updates: {"unet_state": diffusers(run, updates)},
    "diffusers at the top": diffusers,
    "torch, any key": lambda run, updates: {"slow_weights": averaged_model(run, updates)},
    "lightning average": weight_averaging,
    "lightning swa": stochastic_averaging,
    "ema-pytorch, any key": ema_pytorch,
    "generator": in_generator,
}
WITHOUT_MODEL = ("basicsr", "lightning average", "generator")


def save(folder: Path, updates: dict[int, int], write: Callable[[Run, int], dict[str, Any]], bare: bool) -> Report:
    """Save one file per rank with the given number of updates, and compare them."""
    for rank, number in updates.items():
        run = Run()
        run.step()
        states = {"optimizer": run.optimizer.state_dict()} if bare else run.states()
        torch.save(states | write(run, number), folder / f"rank{rank}.pt")
    return compare(*sorted(folder.glob("*.pt")), options=Options())


@pytest.mark.parametrize("name", FORMATS)
def test_copies_with_different_updates(name: str, tmp_path: Path) -> None:
    """A copy that one of three ranks updated more often is SYN219 on this rank, in the format of each library."""
    report = save(tmp_path, {0: 3, 1: 5, 2: 3}, FORMATS[name], name in WITHOUT_MODEL)
    finding = get_failing(report)
    assert (finding.code, finding.ranks) == ("SYN219", (1,))
    assert len([tensor for tensor in finding.tensors if is_weight(tensor) or "shadow_params" in tensor]) == 6


@pytest.mark.parametrize("name", FORMATS)
def test_equal_copies_are_in_sync(name: str, tmp_path: Path) -> None:
    """Equal copies are in sync."""
    assert save(tmp_path, {0: 3, 1: 3}, FORMATS[name], name in WITHOUT_MODEL).verdict == "in_sync"


@pytest.mark.parametrize("name", ["diffusers", "diffusers at the top", "torch, any key", "ema-pytorch, any key"])
def test_counts_of_updates_prove_missed_updates(name: str, tmp_path: Path) -> None:
    """Different counts of updates, as tensors or numbers, are evidence of missed updates."""
    finding = get_failing(save(tmp_path, {0: 3, 1: 5}, FORMATS[name], False))
    assert finding.cause.code is Text.CAUSE_UPDATES
    assert [fact.parameters["values"] for fact in finding.facts if fact.code is Text.UPDATES] == [{0: 3, 1: 5}]


def test_a_frozen_part_and_a_list_of_the_trained_parameters(tmp_path: Path) -> None:
    """A list of averages without names may cover the trained parameters only, beside a frozen encoder."""
    for rank in range(2):
        torch.manual_seed(0)
        encoder = nn.Linear(4, 4).requires_grad_(False)
        run = Run(encoder=encoder, fc=nn.Linear(4, 2))
        run.step()
        shadow = [p.detach() * DECAY**rank for p in run.model.parameters() if p.requires_grad]
        ema = {"decay": DECAY, "num_updates": 4, "shadow_params": shadow, "collected_params": None}
        torch.save(run.states() | {"average": ema}, tmp_path / f"rank{rank}.pt")
    finding = get_failing(compare(*sorted(tmp_path.glob("*.pt")), options=Options()))
    assert (finding.code, finding.certainty) == ("SYN219", "consistent")
    assert finding.cause.code is Text.CAUSE_START


def test_modules_with_names_of_averages_are_no_copies(tmp_path: Path) -> None:
    """Attention called `ema` or `swa`, and a codebook with averages, have no counterpart in the model."""
    for rank in range(2):
        torch.manual_seed(0)
        model = nn.ModuleDict({
            "stem": nn.Linear(4, 4), "ema": nn.Linear(4, 4), "block": nn.ModuleDict({"swa": nn.Linear(4, 4)}),
        })  # fmt: skip
        torch.manual_seed(rank)
        for layer in (model["ema"], model["block"]["swa"]):
            nn.init.normal_(layer.weight)
        model["ema"].register_buffer("shadow_params", torch.randn(2))
        torch.save({"model": model.state_dict()}, tmp_path / f"rank{rank}.pt")
    report = compare(*sorted(tmp_path.glob("*.pt")), options=Options())
    assert report.verdict == "out_of_sync"
    assert "SYN219" not in list_codes(report.findings)
    assert "ema" not in report.groups[0].kinds


class Averages:
    """A copy that each rank creates from its own initial weights, before the model is broadcast."""

    def __init__(self, run: Run, rank: int) -> None:
        torch.manual_seed(100 + rank)
        self.run = run
        self.model = copy.deepcopy(run.model)
        for parameter in self.model.parameters():
            nn.init.normal_(parameter)

    def update(self) -> None:
        with torch.no_grad():
            for mine, weight in zip(self.model.parameters(), self.run.model.parameters(), strict=True):
                mine.lerp_(weight, 1 - DECAY)


def train(folder: Path, missed: dict[int, tuple[int, ...]], created: bool) -> Report:
    """Save two ranks at steps 2, 5 and 9. missed: steps without an update. created: before the broadcast."""
    for rank in range(2):
        run = Run()
        averages = Averages(run, rank if created else 0)
        for step in range(1, 10):
            run.step()
            if step not in missed.get(rank, ()):
                averages.update()
            if step in (2, 5, 9):
                states = run.states() | {"model_ema": averages.model.state_dict(), "step": step}
                torch.save(states, folder / f"step{step}-rank{rank}.pt")
    return compare(*sorted(folder.glob("*.pt")), options=Options())


def test_a_copy_created_before_the_broadcast_shrinks_by_the_decay(tmp_path: Path) -> None:
    """Equal updates multiply the difference by the decay, in all tensors: the copies were unequal from the start."""
    report = train(tmp_path, {}, created=True)
    last = list_failing(report.groups[-1])[0]
    assert (last.code, last.certainty) == ("SYN219", "likely")
    assert last.cause.code is Text.CAUSE_START
    (shrinks,) = find_all(last.facts, code=Text.SHRINKS)
    assert shrinks.parameters["decay"] == pytest.approx(DECAY, abs=0.002)
    assert shrinks.parameters["ratio"] == pytest.approx(DECAY**7, rel=0.01)


@pytest.mark.parametrize("missed", [{1: tuple(range(1, 10))}, {1: (4,)}, {0: (1, 3, 5, 7, 9)}])
def test_missed_updates_are_not_an_unequal_start(missed: dict[int, tuple[int, ...]], tmp_path: Path) -> None:
    """A copy that never, once or rarely misses an update has another cause than one that was unequal at the start."""
    report = train(tmp_path, missed, created=False)
    last = list_failing(report.groups[-1])[0]
    assert last.code == "SYN219"
    assert last.cause.code is not Text.CAUSE_START
