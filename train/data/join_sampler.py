"""Samplers for --join, and the sizes of shares."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch.utils.data import Sampler

from train.data.sampler import epoch_order

if TYPE_CHECKING:
    from collections.abc import Iterator


def smallest_share(samples: int, world_size: int, parts: int, replicas: int) -> int:
    """Return the number of samples in the smallest share of a partitioned global batch.

    The batch is partitioned evenly over the ranks and into `parts` micro-batches, then over the `replicas` of a
    DataParallel with torch.chunk, which partitions 13 samples into 4, 4, 4 and 1. Replicas without samples are ignored.
    """
    # Shares of a rank, and of a micro-batch, differ by at most one sample, so the smallest comes from the smallest or
    # the largest share.
    sizes = set()
    for share in (samples // world_size, math.ceil(samples / world_size)):
        sizes |= {share // parts, math.ceil(share / parts)}
    smallest = []
    for size in sizes:
        chunk = math.ceil(size / replicas)
        # The last replica has what remains.
        smallest.append(size % chunk or chunk if chunk else 0)
    return min(smallest)


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
