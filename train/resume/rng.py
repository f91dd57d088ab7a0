"""RNG states of one rank: torch, Python, numpy and its GPUs.

Dropout draws from torch's generator, and image transforms may draw from Python's and numpy's. After restoring all of
them, a resumed run draws the same numbers as an uninterrupted run.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def collect_rng_states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Collect RNG states as tensors and numbers for torch.load(weights_only=True). devices: GPUs of this rank."""
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


def restore_rng_states(states: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Restore the collected RNG states."""
    torch.set_rng_state(states["torch"])
    version, python_gauss = states["python_rest"]
    random.setstate((version, tuple(states["python"].tolist()), python_gauss))
    kind, position, has_gauss, numpy_gauss = states["numpy_rest"]
    words = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state((kind, words, position, has_gauss, numpy_gauss))
    for device, state in zip(devices, states["cuda"], strict=False):  # a run on the CPU saved none
        torch.cuda.set_rng_state(state, device)


def reseed_generators(seed: int, step: int, rank: int) -> None:
    """Start new random streams, different on each rank, after the number of ranks has changed.

    seed: of the run. step: of the resumed state, so that a second change leads to different streams.
    """
    words = np.random.SeedSequence((seed, step, rank)).generate_state(2)
    torch.manual_seed(int(words[0]))  # seeds CUDA too
    random.seed(int(words[1]))
    np.random.seed(int(words[1]))
