"""Megatron-LM iteration folders: `iter_0000500/mp_rank_00_001/model_optim_rng.pt`, one folder per model part.

The numbers are tensor-, pipeline- and expert-parallel ranks (megatron/training/checkpointing.py, get_checkpoint_name);
each folder contains another part of the model.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from syncheck.errors import MalformedFile, UnreadableFile
from syncheck.readers.assembly import Part, choose_label, list_numbers, match_in_order, note_missing_parts, read_parts

if TYPE_CHECKING:
    from syncheck.snapshots import Snapshot

FORMAT = "megatron"
_FOLDER = re.compile(r"(?P<label>mp_rank_(?P<numbers>\d+(?:_\d+){0,2}))")
# Whether a file contains only optimizer state.
_FILES = {"model_optim_rng.pt": False, "model_rng.pt": False, "optim.pt": True, "distrib_optim.pt": True}


def matches_folder(folder: str) -> bool:
    """Whether a folder contains a model-parallel rank's folder with Megatron's files."""
    for rank in match_in_order(_FOLDER, os.listdir(folder)):
        for name in _FILES:
            if os.path.lexists(os.path.join(folder, rank.string, name)):
                return True
    return False


def holds(relative: str) -> bool:
    """Whether a file belongs to this format. relative: its path below the folder."""
    rank, _, name = relative.partition("/")
    return _FOLDER.fullmatch(rank) is not None and name in _FILES


def read(folder: str) -> Snapshot:
    """Open the folder as one checkpoint. Raises CheckpointError for an unreadable file, or a rank without files."""
    ranks = match_in_order(_FOLDER, os.listdir(folder))
    parts: list[Part] = []
    numbers: list[tuple[int, ...]] = []
    for rank in ranks:
        label = choose_label(rank, ranks)
        rank_folder = os.path.join(folder, rank.string)
        for name in _list_files(rank_folder):
            parts.append(Part(os.path.join(rank_folder, name), label, _FILES[name]))
        numbers.append(list_numbers(rank["numbers"]))

    assembly = read_parts(folder, FORMAT, parts)
    assembly.notes += note_missing_parts(numbers, "model-parallel parts")
    return assembly.snapshot()


def _list_files(rank_folder: str) -> list[str]:
    """Return Megatron's files in the folder of a rank. Raises MalformedFile if it has no such file."""
    try:
        present_names = set(os.listdir(rank_folder))
    except OSError as error:
        raise UnreadableFile.because(rank_folder, error) from None

    names = [name for name in _FILES if name in present_names]
    if not names:
        raise MalformedFile(
            rank_folder,
            found="no file of this rank",
            needed=f"one of {', '.join(_FILES)}",
            next_step="the save did not finish, or the copy is not complete: save or copy the whole folder again",
        )
    return names
