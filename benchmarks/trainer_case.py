"""A case of parity for every method of the trainer, for the benchmark `equivalence` and the tests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from syncheck.testing import ParityCase, sampler_order
from train import parts
from train.faults import make_fault
from train.launch import RankContext
from train.methods import METHODS, assign_mesh
from train.methods.single import Single
from train.metrics import MetricSums
from train.settings import DEFAULT
from train.trainer import Trainer

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.settings import Settings

SMALL = replace(DEFAULT, data="text", model="gpt-tiny", width=16, depth=2, lr=0.1, save_per_rank=False)


class GradientTrainer(Trainer):
    """Computes the gradient of a step; `finish` of the case updates."""

    def update(self, step: int) -> None:
        """Keep the gradient."""


class TrainerCase(ParityCase):
    """One step of the trainer on the first global batch of its data.

    settings: with the method. ctx: of this rank.
    """

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        self.settings = settings
        self.ctx = assign_mesh(settings, ctx)
        self.micro_batches = settings.accumulate
        self.max_norm = settings.grad_clip
        self.data = parts.load(settings, ctx)
        self.mesh_sizes = dict(zip(self.ctx.mesh.names, self.ctx.mesh.sizes, strict=True))  # type: ignore[misc]

    @property
    def title(self) -> str:
        """The method and its accumulation."""
        return f"{self.settings.method} --accumulate {self.settings.accumulate}"

    def build(self) -> nn.Module:
        """Return the model of the settings."""
        torch.manual_seed(self.settings.seed)
        return parts.make_model(self.settings, self.data)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return the first samples of the training data."""
        inputs, targets = self.data.train[list(range(self.settings.batch_size))]
        return inputs, targets

    def loss_terms(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of each token."""
        inputs, targets = batch
        losses = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), reduction="none")
        return losses.view_as(targets)

    def owner(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the data rank and the micro-batch of each sample."""
        return sampler_order(len(batch[0]), self.ctx.mesh.data_size, self.micro_batches)

    def parallelize(self, model: nn.Module, mesh: Any) -> nn.Module:  # noqa: ARG002 - methods build their own
        """Wrap the model with the method of the settings."""
        self.method = METHODS[self.settings.method](self.settings, self.ctx)
        self.method.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.wrapped = self.method.wrap(model)
        return self.method.module

    def backward(self, model: nn.Module, batch: tuple[Tensor, Tensor], mesh: Any) -> None:  # noqa: ARG002
        """Run the trainer's step without its update."""
        fault = make_fault(self.settings, self.ctx, 1)
        settings = replace(self.settings, grad_clip=None)
        optimizer = torch.optim.SGD(self.method.module.parameters())
        trainer = GradientTrainer(settings, self.ctx, self.method, self.wrapped, optimizer, fault)
        rank, ranks = self.ctx.mesh.data_rank, self.ctx.mesh.data_size
        inputs, targets = (part[rank::ranks] for part in batch)
        trainer.run(1, inputs, targets, len(batch[0]), MetricSums(self.ctx.device, trainer.task))

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of one process."""
        single = Single(replace(self.settings, method="single"), RankContext(device=self.ctx.device))
        single.wrap(model)
        return parts.build_optimizer(self.settings, single)

    def parallel_optimizer(self, model: nn.Module, mesh: Any) -> Optimizer:  # noqa: ARG002
        """Return the optimizer of the method."""
        return parts.build_optimizer(self.settings, self.method)

    def finish(self, model: nn.Module, optimizer: Optimizer) -> Tensor | None:  # noqa: ARG002
        """Clip and step as the trainer does."""
        norm = None if self.max_norm is None else self.method.clip(self.max_norm)
        self.method.step(optimizer, torch.amp.GradScaler("cpu", enabled=False))
        return norm
