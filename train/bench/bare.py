"""Training loops as one writes them by hand, without anything around them: what the trainer is held against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

    from train.launch import RankContext

Loader = DataLoader[tuple[torch.Tensor, ...]]


def batches(samples: Dataset[tuple[torch.Tensor, ...]], batch_size: int, ctx: RankContext) -> Loader:
    """Give each rank its share of every global batch, in a new order each epoch. batch_size: of all ranks together."""
    sampler: Sampler[int] = DistributedSampler(samples, ctx.world_size, ctx.rank)
    # As fast as the trainer's own: the data set is asked for a whole batch at once.
    whole = BatchSampler(sampler, batch_size // ctx.world_size, drop_last=True)
    return DataLoader(samples, sampler=whole, batch_size=None)


def epoch(forward: nn.Module, optimizer: Optimizer, loader: Loader, device: torch.device) -> int:
    """Train on every batch once; nothing is counted, shown or saved. Returns the number of steps."""
    steps = 0
    for x, y in loader:
        loss = F.cross_entropy(forward(x.to(device)), y.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps
