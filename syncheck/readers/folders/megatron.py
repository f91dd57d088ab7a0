"""Folders of one Megatron-LM iteration: `iter_0000500/mp_rank_00_001/model_optim_rng.pt`, a folder for each part.

The numbers are the tensor-, pipeline- and expert-parallel ranks (megatron/training/checkpointing.py,
get_checkpoint_name): each folder holds another part of the model.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from syncheck.readers.folders.assembly import names_in, numbered
from syncheck.readers.folders.parallel_parts import read_parts

if TYPE_CHECKING:
    from syncheck.snapshots import Snapshot

FORMAT = "megatron"
_FOLDER = re.compile(r"mp_rank_\d+(?:_\d+){0,2}")
# Whether all in the file is of the optimizer.
_FILES = {"model_optim_rng.pt": False, "model_rng.pt": False, "optim.pt": True, "distrib_optim.pt": True}


def matches_folder(folder: str) -> bool:
    """Whether a folder holds the folder of a model-parallel rank with what Megatron saves in it."""
    return bool(_found(folder))


def holds(relative: str) -> bool:
    """Whether a file, by its path below the folder, belongs to such a checkpoint."""
    rank, _, name = relative.partition("/")
    return _FOLDER.fullmatch(rank) is not None and name in _FILES


def read(folder: str) -> Snapshot:
    """Open the folder as one checkpoint. Raises CheckpointError for a file of it that is broken."""
    found = _found(folder)
    several = len({os.path.dirname(relative) for relative in found}) > 1
    parts = [
        (os.path.join(folder, relative), os.path.dirname(relative) if several else "", _FILES[relative.split("/")[-1]])
        for relative in found
    ]
    return read_parts(folder, FORMAT, parts)


def _found(folder: str) -> list[str]:
    ranks = [match.string for match in numbered(_FOLDER, names_in(folder))]
    inside = [f"{rank}/{name}" for rank in ranks for name in _FILES]
    return [relative for relative in inside if os.path.isfile(os.path.join(folder, relative))]
