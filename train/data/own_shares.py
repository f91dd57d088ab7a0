"""Which samples a rank takes with --join: whole batches of its own, of which ranks may have unequal numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.data import Sampler

from train.data.sampler import epoch_order

if TYPE_CHECKING:
    from collections.abc import Iterator


class OwnSharesSampler(Sampler[list[int]]):
    """Cut the epoch into batches of one rank's size, and deal them out to the ranks in turn; nothing is dropped.

    batch_size: of all ranks together, so a batch has batch_size // world_size samples, the last of an epoch perhaps
    fewer. Where batches do not go round evenly, the first ranks have one more. sizes: for each batch of this rank,
    batch_size: what the sum of its losses is divided by, so that every sample weighs the same, whatever batch it is
    in. longest: batches of the ranks that have most, of which rank 0 always is one. smallest: samples of the smallest
    batch of any rank.
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
        """Choose the order of the next pass, the same on all ranks. skip: batches to leave out at its start."""
        self.epoch, self.skip = epoch, skip

    def __len__(self) -> int:
        return len(self.starts[self.skip :])

    def __iter__(self) -> Iterator[list[int]]:
        order = epoch_order(self.samples, shuffle=self.shuffle, seed=self.seed, epoch=self.epoch)
        for start in self.starts[self.skip :]:
            yield order[start : start + self.size]
