"""Hugging Face folders: weights with or without an index, and what transformers' Trainer saves beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.readers.folders import training
from syncheck.readers.folders.inside import names_in

if TYPE_CHECKING:
    from syncheck.snapshots import Snapshot

FORMAT = "huggingface"


def matches_folder(folder: str) -> bool:
    """Whether a folder holds an index of weights, or weights and what the libraries put beside them."""
    return training.is_checkpoint(names_in(folder))


def holds(relative: str) -> bool:
    """Whether a file, by its path below the folder, belongs to such a checkpoint."""
    return training.holds(relative)


def read(folder: str) -> Snapshot:
    """Open the folder as one checkpoint. Raises CheckpointError for a file of it that is missing or broken."""
    return training.read(folder, FORMAT)
