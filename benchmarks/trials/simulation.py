"""Simulate the ranks of a data-parallel run in one process: a copy of the model per rank, gradients averaged by hand.

The arithmetic is that of DistributedDataParallel with gloo: each gradient is divided by the number of ranks and added
in the order of ranks, and the buffers of rank 0 are copied to all ranks before each forward pass.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import syncheck
from benchmarks.trials.models import MODELS, Sizes

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from benchmarks.trials.faults import Fault

# Learning rates by optimizer.
RATES = {
    "sgd": 0.1,
    "momentum": 0.03,
    "nesterov": 0.03,
    "adam": 2e-3,
    "adamw": 2e-3,
    "adafactor": 1e-2,
    "muon": 1e-2,
}
# The gradients of a rank, by parameter.
Gradients = dict[str, Tensor]
EMA_DECAY = 0.95
# A loss scale of torch.amp.GradScaler. Powers of two scale gradients without rounding, so the runs need no float16.
SCALER = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}


@dataclass(frozen=True)
class Setup:
    """The settings of a run without its fault."""

    model: str
    sizes: Sizes
    optimizer: str
    ranks: int
    seed: int
    samples: int
    """Per rank and step."""
    lr: float
    weight_decay: float
    onset: int
    """The step at which the fault begins, counted from 1."""
    odd_rank: int
    """The rank of a fault of one rank."""


def draw_setup(numbers: random.Random, part: int) -> Setup:
    """Draw the settings of a run. part: selects the sizes of models, so that parts have no model in common."""
    model = numbers.choice(list(MODELS))
    optimizer = numbers.choice(list(RATES))
    ranks = numbers.choice((2, 2, 3, 4, 8))
    return Setup(
        model=model,
        # Widths differ between parts by their remainder.
        sizes=Sizes(width=12 + 4 * part + 12 * numbers.randrange(2), depth=1 + numbers.randrange(3)),
        optimizer=optimizer,
        ranks=ranks,
        seed=numbers.randrange(1 << 30),
        samples=numbers.choice((2, 4, 8, 16)),
        lr=RATES[optimizer] * numbers.choice((0.3, 1.0, 2.0)),
        weight_decay=numbers.choice((0.0, 0.0, 1e-4, 0.01)),
        onset=numbers.choice((1, 10, 100)),
        odd_rank=numbers.randrange(ranks),
    )


def make_optimizers(setup: Setup, module: nn.Module) -> list[Optimizer]:
    """Return the optimizers of a model: one, or with Muon a second one for vectors and embeddings."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    settings = {"lr": setup.lr, "weight_decay": setup.weight_decay}
    if setup.optimizer == "sgd":
        return [torch.optim.SGD(trained, **settings)]
    if setup.optimizer in ("momentum", "nesterov"):
        nesterov = setup.optimizer == "nesterov"
        return [torch.optim.SGD(trained, **settings, momentum=0.9, nesterov=nesterov)]
    if setup.optimizer == "adam":
        return [torch.optim.Adam(trained, **settings)]
    if setup.optimizer == "adamw":
        return [torch.optim.AdamW(trained, **settings)]
    if setup.optimizer == "adafactor":
        return [torch.optim.Adafactor(trained, **settings)]
    matrices = [parameter for parameter in trained if parameter.dim() == 2]
    others = [parameter for parameter in trained if parameter.dim() != 2]
    return [torch.optim.Muon(matrices, **settings), torch.optim.AdamW(others, lr=2e-3, weight_decay=0.0)]


class Rank:
    """One rank: its model, optimizers, averaged copy, loss scale and data."""

    def __init__(self, setup: Setup, rank: int, module: nn.Module) -> None:
        self.rank = rank
        self.module = module
        self.optimizers = make_optimizers(setup, module)
        self.average = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.scaler = dict(SCALER)
        self.data = torch.Generator().manual_seed(setup.seed * 64 + rank)
        self.gradients: Gradients = {}

    def named_trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def state_of(self, name: str) -> dict[str, Any]:
        """Return the optimizer state of a parameter, which changes in place."""
        parameter = self.named_trained()[name]
        for optimizer in self.optimizers:
            if parameter in optimizer.state:
                state: dict[str, Any] = optimizer.state[parameter]
                return state
        return {}


class Run:
    """A simulated run with a fault."""

    def __init__(self, setup: Setup, fault: Fault) -> None:
        self.setup = setup
        self.fault = fault
        self.model = MODELS[setup.model]
        self.step = 0
        self.buffers_synced = True
        torch.manual_seed(setup.seed)
        module = self.model.build(setup.sizes)
        self.ranks = [Rank(setup, rank, copy.deepcopy(module)) for rank in range(setup.ranks)]
        fault.start(self)

    @property
    def odd(self) -> Rank:
        """The rank of a fault of one rank."""
        return self.ranks[self.setup.odd_rank]

    @property
    def began(self) -> bool:
        """Whether the fault has begun."""
        return self.step >= self.setup.onset

    def train(self) -> None:
        """Train all ranks for one step."""
        self.step += 1
        if self.buffers_synced:
            self._copy_buffers()
        for rank in self.ranks:
            rank.gradients = self.compute_gradients(rank)
        local = [rank.gradients for rank in self.ranks]
        if self.fault.averages(self):
            average_gradients(local, self.ranks)
        self.fault.change_gradients(self, local)
        for rank in self.ranks:
            if self.fault.takes_step(self, rank):
                self._take_step(rank)
            if self.fault.updates_average(self, rank):
                self._update_average(rank)
        self.fault.finish_step(self)

    def _copy_buffers(self) -> None:
        first = dict(self.ranks[0].module.named_buffers())
        for rank in self.ranks[1:]:
            for name, buffer in rank.module.named_buffers():
                if name not in self.fault.local_buffers:
                    buffer.copy_(first[name])

    def compute_gradients(self, rank: Rank) -> Gradients:
        """Return the gradients of a rank on a batch of its own, by name."""
        x, y = self.model.draw(self.setup.sizes, self.setup.samples, rank.data)
        rank.module.train()
        loss = F.cross_entropy(rank.module(x), y)
        parameters = rank.named_trained()
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        self.fault.see_batch(self, rank, x)
        return dict(zip(parameters, gradients, strict=True))

    def _take_step(self, rank: Rank) -> None:
        for name, parameter in rank.named_trained().items():
            parameter.grad = rank.gradients.get(name)
        for optimizer in rank.optimizers:
            optimizer.step()

    @torch.no_grad()
    def _update_average(self, rank: Rank) -> None:
        for name, parameter in rank.module.named_parameters():
            rank.average[name].lerp_(parameter, 1 - EMA_DECAY)

    def save(self, rank: Rank, *, with_optimizer: bool, with_metadata: bool) -> dict[str, Any]:
        """Return the content of a rank's checkpoint, copied."""
        content: dict[str, Any] = {"model": rank.module.state_dict()}
        if with_optimizer:
            states = [optimizer.state_dict() for optimizer in rank.optimizers]
            if len(states) == 1:
                content["optimizer"] = states[0]
            else:
                content["optimizers"] = states
        if self.fault.saves_average:
            content["ema"] = rank.average
        if self.fault.saves_scaler:
            content["scaler"] = rank.scaler
        if with_metadata:
            content["syncheck"] = syncheck.metadata(
                run="trial",
                rank=rank.rank,
                world_size=len(self.ranks),
                step=self.fault.name_step(self, rank),
                model=rank.module,
                optimizer=rank.optimizers[0] if len(rank.optimizers) == 1 else None,
                buffers_synced=self.buffers_synced,
                averaging=self.fault.describe_averaging(self),
                host=self.fault.name_host(rank),
            )
        return self.fault.change_content(self, rank, copy.deepcopy(content))


def average_gradients(local: Sequence[Gradients], ranks: Sequence[Rank]) -> None:
    """Give each rank the average of the gradients of these ranks, in the order of summation of gloo on two ranks."""
    for name in local[0]:
        total = local[0][name] / len(local)
        for gradients in local[1:]:
            total = total + gradients[name] / len(local)
        for rank in ranks:
            rank.gradients = {**rank.gradients, name: total.clone()}
