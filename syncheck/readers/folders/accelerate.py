"""Folders of Accelerate's `save_state`: weights, optimizer.bin, and the random states of every rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from syncheck.readers.folders import huggingface
from syncheck.readers.folders.inside import names_in

if TYPE_CHECKING:
    from syncheck.snapshots import Snapshot

FORMAT = "accelerate"
holds = huggingface.holds
_RANDOM = re.compile(r"random_states_\d+\.pkl")


def matches_folder(folder: str) -> bool:
    """Whether a folder holds weights, and random states under the names that Accelerate gives them."""
    names = names_in(folder)
    return huggingface.has_weights(names) and any(_RANDOM.fullmatch(name) for name in names)


def read(folder: str) -> Snapshot:
    """Open the folder as one checkpoint. Raises CheckpointError for a file of it that is missing or broken."""
    return huggingface.read(folder, FORMAT)
