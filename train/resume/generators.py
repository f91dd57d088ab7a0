"""The states of all random number generators that a rank may draw from.

Dropout draws from torch's, transforms of images may draw from Python's and numpy's, and each DataLoader draws a seed
from torch's when an epoch begins. Restored, a run draws what it would have drawn without the interruption.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def generator_states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Collect them as tensors and numbers, which torch.load(weights_only=True) accepts. devices: GPUs of this rank."""
    version, words, python_gauss = random.getstate()
    kind, numpy_words, position, has_gauss, numpy_gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words),
        "python_rest": [version, python_gauss],
        "numpy": torch.from_numpy(np.asarray(numpy_words).astype(np.int64)),
        "numpy_rest": [str(kind), int(position), int(has_gauss), float(numpy_gauss)],
        "cuda": [torch.cuda.get_rng_state(device) for device in devices],
    }


def restore_generators(states: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Go on drawing where these states were collected."""
    torch.set_rng_state(states["torch"])
    version, python_gauss = states["python_rest"]
    random.setstate((version, tuple(states["python"].tolist()), python_gauss))
    kind, position, has_gauss, numpy_gauss = states["numpy_rest"]
    words = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state((kind, words, position, has_gauss, numpy_gauss))
    for device, state in zip(devices, states["cuda"], strict=False):  # there are none of a run on the CPU
        torch.cuda.set_rng_state(state, device)


def reseed(seed: int, step: int, rank: int) -> None:
    """Begin new streams, another on each rank, for a run that goes on with another number of ranks.

    seed: of the run. step: at which it goes on; so a second change gives other streams than the first.
    """
    words = np.random.SeedSequence((seed, step, rank)).generate_state(2)
    torch.manual_seed(int(words[0]))  # CUDA too
    random.seed(int(words[1]))
    np.random.seed(int(words[1]))
