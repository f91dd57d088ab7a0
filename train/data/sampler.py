"""Which samples a rank takes: its share of each global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator


def epoch_order(samples: int, *, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """Give the indices of all samples in the order of an epoch, equal on all ranks; with `shuffle` each has its own."""
    if not shuffle:
        return list(range(samples))
    # As torch.utils.data.DistributedSampler does it.
    order: list[int] = torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    return order


def smallest_share(samples: int, world_size: int, parts: int, replicas: int) -> int:
    """Count the samples of the smallest share when a global batch is split.

    First over the ranks, then into `parts` micro-batches, both as evenly as can be, then over the `replicas` of a
    DataParallel with torch.chunk: 13 on 4 are 4, 4, 4 and 1. Replicas without a sample do not count.
    """
    per_rank = {samples // world_size, -(-samples // world_size)}
    per_part = {size for share in per_rank for size in (share // parts, -(-share // parts))}
    chunks = {size: -(-size // replicas) for size in per_part}
    return min(size % chunk or chunk if size else 0 for size, chunk in chunks.items())


class DistributedBatchSampler(Sampler[list[int]]):
    """Split every global batch over the ranks, each sample to exactly one of them.

    samples: how many there are. batch_size: of the global batch. Rank r takes every world_size-th index of
    the batch from the r-th on, so shares differ by at most one, lower ranks first. Where they are even, these
    are the batches of torch.utils.data.DistributedSampler with the same seed (a test compares them); that one
    cannot split unevenly, it repeats samples instead.

    Samples that do not fill a last global batch are dropped, other ones each epoch, so that every step has the
    same weight; with `keep_last` they are a batch of their own. Either way every rank makes the same number of
    steps. sizes: samples of each global batch, over all ranks. longest: how many there are.

    Call `set_epoch` before each epoch: without it every epoch has the same order.
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
        """Choose the order of the next pass, the same on all ranks. skip: global batches to leave out at its start."""
        self.epoch, self.skip = epoch, skip

    def __len__(self) -> int:
        return len(self.sizes) - self.skip

    def __iter__(self) -> Iterator[list[int]]:
        order = epoch_order(self.samples, shuffle=self.shuffle, seed=self.seed, epoch=self.epoch)
        start = sum(self.sizes[: self.skip])
        for size in self.sizes[self.skip :]:
            yield order[start + self.rank : start + size : self.world_size]
            start += size
