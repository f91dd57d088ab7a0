"""Evaluate a model on the test set, without changing it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from train.errors import UserError
from train.metrics import Meter, Score

if TYPE_CHECKING:
    from torch import Tensor, nn

    from train.data.dataset import Images
    from train.launch import RankContext

Batches = DataLoader[tuple["Tensor", ...]]
EVALUATION_BATCH = 512  # maximum samples per rank and forward; does not affect the score


def evaluation_batches(samples: Images, ctx: RankContext) -> Batches:
    """Give each rank every world_size-th test sample. Each sample is counted once, without padding.

    All ranks get equally many batches, because under FSDP every forward is a collective. Raises UserError if there are
    fewer samples than ranks.
    """
    if len(samples) < ctx.world_size:
        raise UserError(
            f"{len(samples)} test samples for {ctx.world_size} ranks: each rank needs a sample; use fewer ranks"
        )
    mine = torch.arange(ctx.rank, len(samples), ctx.world_size)
    largest_share = math.ceil(len(samples) / ctx.world_size)
    parts = mine.tensor_split(math.ceil(largest_share / EVALUATION_BATCH))
    # batch_size=None: the sampler yields whole batches. A separate generator, as in training: a run resumed at the end
    # of an epoch evaluates again, which must not affect dropout.
    generator = torch.Generator().manual_seed(0)
    return DataLoader(samples, sampler=[part.tolist() for part in parts], batch_size=None, generator=generator)


def evaluate(module: nn.Module, batches: Batches, ctx: RankContext) -> Score:
    """Score the model on the test set; a collective.

    module: the unwrapped model. A forward through DDP's wrapper, even without gradients, would copy rank 0's buffers to
    all ranks and skip the copy before the next training step. Under plain DDP every rank therefore scores its share
    with its own BatchNorm statistics.
    """
    module.eval()
    meter = Meter(ctx.device)
    with torch.no_grad():  # not inference_mode, because FSDP keeps gathered tensors
        for x, y in batches:
            logits, labels = module(x.to(ctx.device)), y.to(ctx.device)
            meter.add(F.cross_entropy(logits, labels, reduction="sum"), logits, labels)
    module.train()
    return meter.over_ranks(ctx)


class Best:
    """The epoch with the best test accuracy so far; among equal epochs the first.

    accuracy: 0 to 1. epoch: counted from 1. step: optimizer steps done. None before the first evaluation.
    """

    def __init__(self) -> None:
        self.accuracy: float | None = None
        self.epoch: int | None = None
        self.step: int | None = None

    def update(self, test: Score, epoch: int, step: int) -> bool:
        """Record one evaluation and return whether it is the best so far; equal on all ranks.

        A run resumed at the end of an epoch may evaluate the best epoch again, which remains the best.
        """
        if self.accuracy is not None and step != self.step and not test.accuracy > self.accuracy:
            return False
        self.accuracy, self.epoch, self.step = test.accuracy, epoch, step
        return True

    def state(self) -> dict[str, Any]:
        """Return JSON values for `restore`."""
        return {"accuracy": self.accuracy, "epoch": self.epoch, "step": self.step}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        self.accuracy, self.epoch, self.step = state["accuracy"], state["epoch"], state["step"]
