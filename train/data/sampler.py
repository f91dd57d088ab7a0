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


def smallest_share(samples: int, world_size: int, parts: int, replicas: int) -> int:
    """Return the number of samples in the smallest share of a partitioned global batch.

    The batch is partitioned evenly over the ranks and into `parts` micro-batches, then over the `replicas` of a
    DataParallel with torch.chunk, which partitions 13 samples into 4, 4, 4 and 1. Replicas without samples are ignored.
    """
    per_rank = {samples // world_size, -(-samples // world_size)}
    per_part = {size for share in per_rank for size in (share // parts, -(-share // parts))}
    chunks = {size: -(-size // replicas) for size in per_part}
    return min(size % chunk or chunk if size else 0 for size, chunk in chunks.items())


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
        full, rest = divmod(samples, batch_size)
        self.sizes = [batch_size] * full
        if keep_last and rest:
            self.sizes.append(rest)
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


class OwnSharesSampler(Sampler[list[int]]):
    """Partition the epoch into per-rank batches and assign them to the ranks in turn, for --join.

    Nothing is dropped, and ranks may have unequal numbers of batches: the first ranks have one batch more.

    batch_size: global batch size; a batch of a rank has batch_size // world_size samples, the last of an epoch possibly
    fewer. sizes: the divisor of the loss for each batch of this rank, always batch_size, so that every sample has the
    same weight. longest: largest number of batches on any rank, which rank 0 always has. smallest: samples in the
    smallest batch of any rank.
    """

    def __init__(self, samples: int, batch_size: int, rank: int, world_size: int, *, shuffle: bool, seed: int) -> None:
        self.samples, self.rank, self.world_size = samples, rank, world_size
        self.shuffle, self.seed = shuffle, seed
        self.epoch, self.skip = 0, 0
        self.size = batch_size // world_size  # of a batch
        starts = range(0, samples, self.size)
        self.starts = starts[rank::world_size]
        self.sizes = [batch_size] * len(self.starts)
        self.longest, self.batches = len(starts[::world_size]), len(starts)
        self.smallest = samples % self.size or self.size

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Select the order of the next epoch, equal on all ranks. skip: number of batches to skip at its start."""
        self.epoch, self.skip = epoch, skip

    def __len__(self) -> int:
        return len(self.starts[self.skip :])

    def __iter__(self) -> Iterator[list[int]]:
        order = epoch_order(self.samples, shuffle=self.shuffle, seed=self.seed, epoch=self.epoch)
        for start in self.starts[self.skip :]:
            yield order[start : start + self.size]
