"""Seeds that are made from several numbers: a random stream for each rank, and for each sample of each epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from train.launch import RankContext

BITS = 2**64 - 1


def mixed(*numbers: int) -> int:
    """Make one number of 64 bits from several; their order matters.

    Sums and products of the numbers would give many combinations the same seed: seed 0 on rank 1, seed 1 on rank 0.
    """
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = scrambled(state ^ np.uint64(number & BITS))
    return int(state[0])


def mixed_each(seed: int, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Make a number of 64 bits from a mixed seed and each index: [N] of [N]."""
    return scrambled(np.uint64(seed) ^ scrambled(indices.astype(np.uint64)))


def scrambled(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Give each number the output of SplitMix64 in that state: one to one, and near inputs have unlike outputs.

    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, figure 17; the constants are
    those of https://prng.di.unimi.it/splitmix64.c.
    """
    z = np.asarray(state, np.uint64) + np.uint64(0x9E3779B97F4A7C15)  # wraps around, as it should
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def seed_rank(seed: int, ctx: RankContext) -> None:
    """Give this rank, and each of its GPUs, a random stream of its own.

    To be called when the model has been built, which needs the same stream on all ranks. With the same stream in
    training, dropout would leave out the same places in every rank's share of a batch: its noise would no longer be
    averaged out over the ranks. So too for the GPUs of DataParallel.
    """
    torch.manual_seed(mixed(seed, ctx.rank))
    for index, device in enumerate(ctx.devices):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(mixed(seed, ctx.rank, index))
