"""Folders of Accelerate's `save_state`: weights, optimizer.bin, and the RNG state of every rank."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from syncheck.readers.folders import huggingface

if TYPE_CHECKING:
    from syncheck.snapshots import Snapshot

FORMAT = "accelerate"
holds = huggingface.holds
_RANDOM = re.compile(r"random_states_\d+\.pkl")


def matches_folder(folder: str) -> bool:
    """Whether a folder contains weights, and RNG states under Accelerate's names."""
    names = os.listdir(folder)
    has_rng_states = any(_RANDOM.fullmatch(name) for name in names)
    return has_rng_states and huggingface.has_weights(names)


def read(folder: str) -> Snapshot:
    """Open the folder as one checkpoint. Raises CheckpointError for a missing or unreadable file."""
    return huggingface.read(folder, FORMAT)
