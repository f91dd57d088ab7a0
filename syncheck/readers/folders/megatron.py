"""Folders of one Megatron-LM iteration: `iter_0000500/mp_rank_00_001/model_optim_rng.pt`, a folder for each part.

The numbers are the tensor-, pipeline- and expert-parallel ranks (megatron/training/checkpointing.py,
get_checkpoint_name): each folder holds another part of the model.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.errors import MalformedFile, UnreadableFile
from syncheck.readers.folders.inside import names_in, numbered
from syncheck.readers.folders.parallel_parts import label, lacking, read_parts

if TYPE_CHECKING:
    from syncheck.snapshots import Snapshot

FORMAT = "megatron"
_FOLDER = re.compile(r"(?P<label>mp_rank_(?P<numbers>\d+(?:_\d+){0,2}))")
# Whether all in the file is of the optimizer.
_FILES = {"model_optim_rng.pt": False, "model_rng.pt": False, "optim.pt": True, "distrib_optim.pt": True}


def matches_folder(folder: str) -> bool:
    """Whether a folder holds the folder of a model-parallel rank with what Megatron saves in it."""
    ranks = numbered(_FOLDER, names_in(folder))
    return any(os.path.lexists(os.path.join(folder, rank.string, name)) for rank in ranks for name in _FILES)


def holds(relative: str) -> bool:
    """Whether a file, by its path below the folder, belongs to such a checkpoint."""
    rank, _, name = relative.partition("/")
    return _FOLDER.fullmatch(rank) is not None and name in _FILES


def read(folder: str) -> Snapshot:
    """Open the folder as one checkpoint. Raises CheckpointError for a file of it that is broken, or a rank without."""
    ranks = numbered(_FOLDER, names_in(folder))
    parts = [
        (os.path.join(folder, rank.string, name), label(rank, ranks), _FILES[name])
        for rank in ranks
        for name in _files(os.path.join(folder, rank.string))
    ]
    snapshot = read_parts(folder, FORMAT, parts)
    gone = lacking((tuple(map(int, rank["numbers"].split("_"))) for rank in ranks), "model-parallel parts")
    return replace(snapshot, notes=(*snapshot.notes, *gone))


def _files(rank: str) -> list[str]:
    """Return what Megatron saved in the folder of a rank. Raises MalformedFile where there is nothing of it."""
    try:
        inside = set(names_in(rank))
    except OSError as error:
        raise UnreadableFile.because(rank, error) from None
    found = [name for name in _FILES if name in inside]
    if not found:
        again = "the save did not finish, or the copy is not complete: save or copy the whole folder again"
        raise MalformedFile(rank, found="no file of this rank", needed=f"one of {', '.join(_FILES)}", next_step=again)
    return found
