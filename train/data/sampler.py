"""Samplers that partition the samples of an epoch over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator


def epoch_order(samples: int, *, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Return the indices of all samples in the order of an epoch, equal on all ranks; `shuffle` varies it by epoch."""
    if not shuffle:
        return list(range(samples))
    # The same order as in torch.utils.data.DistributedSampler.
    order: list[int] = torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    return order


class DistributedBatchSampler(Sampler[list[int]]):
    """Partition every global batch over the ranks, so that exactly one rank gets each sample.

    Rank r takes every world_size-th index of the batch, starting with index r. Shares differ by at most one sample, and
    lower ranks have the larger shares. Even shares equal the batches of torch.utils.data.DistributedSampler with the
    same seed; that class cannot partition unevenly and repeats samples instead.

    A last, incomplete global batch is dropped, so that every step has the same weight; with `keep_last` it is a smaller
    batch. In both cases all ranks have the same number of steps.

    samples: number of samples. batch_size: global batch size. sizes: samples of each global batch over all ranks.
    longest: number of global batches.

    Call `set_epoch` before each epoch; otherwise every epoch has the same order.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        rank: int,
        world_size: int,
        *,
        shuffle: bool,
        seed: int,
        keep_last: bool = False,
    ) -> None:
        self.samples, self.batch_size = samples, batch_size
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.seed = shuffle, seed
        self.epoch, self.skip = 0, 0
        full, remainder = divmod(samples, batch_size)
        self.sizes = [batch_size] * full
        if keep_last and remainder:
            self.sizes.append(remainder)
        self.longest = len(self.sizes)

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Select the order of the next epoch, equal on all ranks. skip: number of global batches to skip first."""
        self.epoch, self.skip = epoch, skip

    def __len__(self) -> int:
        return len(self.sizes) - self.skip

    def __iter__(self) -> Iterator[list[int]]:
        order = epoch_order(self.samples, shuffle=self.shuffle, seed=self.seed, epoch=self.epoch)
        start = sum(self.sizes[: self.skip])
        for size in self.sizes[self.skip :]:
            yield order[start + self.rank : start + size : self.world_size]
            start += size
