"""Derive seeds from several numbers: random streams for ranks, and for each sample of each epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from train.launch import RankContext

BITS = 2**64 - 1


def mixed(*numbers: int) -> int:
    """Derive a 64-bit number from several numbers; their order matters.

    Sums or products would give different combinations the same seed: seed 0 on rank 1 and seed 1 on rank 0.
    """
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = scrambled(state ^ np.uint64(number & BITS))
    return int(state[0])


def mixed_each(seed: int, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Derive a 64-bit number from a derived seed and each index: [N] of [N]."""
    return scrambled(np.uint64(seed) ^ scrambled(indices.astype(np.uint64)))


def scrambled(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the output of SplitMix64 for each state. It is a bijection, and similar inputs give unrelated outputs.

    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, figure 17; constants from
    https://prng.di.unimi.it/splitmix64.c.
    """
    z = np.asarray(state, np.uint64) + np.uint64(0x9E3779B97F4A7C15)  # overflow is intended
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def seed_rank(seed: int, ctx: RankContext) -> None:
    """Give this rank and each of its GPUs a separate random stream.

    Call it after building the model, which needs equal streams on all ranks. With equal streams in training, dropout
    would drop the same positions in every rank's share of a batch, and its noise would not average out over ranks. The
    same holds for the GPUs of DataParallel. Only tensor-parallel ranks share a stream.
    """
    torch.manual_seed(mixed(seed, ctx.mesh.stream))
    for index, device in enumerate(ctx.devices):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(mixed(seed, ctx.mesh.stream, index))


def draw_integers(keys: NDArray[np.uint64], stream: int, size: int) -> NDArray[np.int64]:
    """Draw an integer from 0 to size - 1 for each key [N]; streams of one key are independent. Returns int64 [N]."""
    return (scrambled(keys + np.uint64(stream)) % np.uint64(size)).astype(np.int64)
