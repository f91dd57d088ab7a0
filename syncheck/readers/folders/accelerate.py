"""Folders of Accelerate's `save_state`: weights, optimizer.bin, and the random states of every rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from syncheck.readers.folders import training
from syncheck.readers.folders.inside import names_in

if TYPE_CHECKING:
    from syncheck.snapshots import Snapshot

FORMAT = "accelerate"
_RANDOM = re.compile(r"random_states_\d+\.pkl")


def matches_folder(folder: str) -> bool:
    """Whether a folder holds weights, and random states under the names that Accelerate gives them."""
    names = names_in(folder)
    return training.has_weights(names) and any(_RANDOM.fullmatch(name) for name in names)


def holds(relative: str) -> bool:
    """Whether a file, by its path below the folder, belongs to such a checkpoint."""
    return training.holds(relative)


def read(folder: str) -> Snapshot:
    """Open the folder as one checkpoint. Raises CheckpointError for a file of it that is missing or broken."""
    return training.read(folder, FORMAT)
