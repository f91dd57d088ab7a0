"""DeepSpeed tag folders: `global_step500/` with a file per model-parallel rank and per ZeRO partition.

Names as in deepspeed/runtime/engine.py (_get_ckpt_name, _get_zero_ckpt_name, _get_expert_ckpt_name): mp_rank is the
model-parallel rank, zero_pp_rank the data-parallel rank, whose ZeRO partitions are disjoint.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.errors import UnsupportedFormat
from syncheck.messages import Note
from syncheck.readers.assembly import Part, choose_label, list_numbers, match_in_order, note_missing_parts, read_parts

if TYPE_CHECKING:
    from syncheck.snapshots import Snapshot

FORMAT = "deepspeed"
_MP = r"mp_rank_\d+(?:_\d+)*"
_MODEL = re.compile(
    rf"(?P<label>(?:layer_\d+_expert_\d+_|zero_pp_rank_\d+_)?{_MP}|layer_\d+-model_\d+)[-_]model_states\.pt"
)
_OPTIMIZER = re.compile(rf"(?:bf16_)?(?P<label>(?:zero_pp_rank|expp_rank)_\d+_{_MP})_optim_states\.pt")
# The subfolder of a universal checkpoint (deepspeed/checkpoint/ds_to_universal.py), which is not read.
_UNIVERSAL = "zero"
_UNIVERSAL_PART = re.compile(rf"{_UNIVERSAL}/[^/]+/\w+\.pt")

# Files that are numbered from 0 without gaps.
_MODEL_PART = re.compile(r"mp_rank_(\d+)")
_ZERO_PART = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)")


def matches_folder(folder: str) -> bool:
    """Whether a folder contains files that DeepSpeed writes for a tag."""
    names = os.listdir(folder)
    if any(_MODEL.fullmatch(name) for name in names):
        return True
    return _UNIVERSAL in names and _is_universal(folder)


def holds(relative: str) -> bool:
    """Whether a file belongs to this format. relative: its path below the folder."""
    if relative.startswith(f"{_UNIVERSAL}/"):
        return _UNIVERSAL_PART.fullmatch(relative) is not None
    return any(pattern.fullmatch(relative) for pattern in (_MODEL, _OPTIMIZER))


def _is_universal(folder: str) -> bool:
    """Whether a folder has a subfolder for each parameter, as ds_to_universal.py writes."""
    parameters = os.path.join(folder, _UNIVERSAL)
    if not os.path.isdir(parameters):
        return False
    return any(os.path.isfile(os.path.join(parameters, name, "fp32.pt")) for name in os.listdir(parameters))


def _is_zero_partition(match: re.Match[str]) -> bool:
    return match["label"].startswith("zero_pp_rank_")


def read(folder: str) -> Snapshot:
    """Open the folder as one checkpoint. Raises CheckpointError for an unreadable file."""
    if _is_universal(folder):
        raise UnsupportedFormat(
            folder,
            found="a universal checkpoint of DeepSpeed",
            needed="a checkpoint as DeepSpeed saves it",
            next_step="pass the folder that it was converted from, such as global_step500/",
        )

    names = os.listdir(folder)
    models = match_in_order(_MODEL, names)
    optimizers = match_in_order(_OPTIMIZER, names)
    parts = _list_parts(folder, models, is_optimizer=False) + _list_parts(folder, optimizers, is_optimizer=True)
    assembly = read_parts(folder, FORMAT, parts)

    assembly.notes += note_missing_parts(_list_part_numbers(models, _MODEL_PART), "model-parallel parts")
    assembly.notes += note_missing_parts(_list_part_numbers(optimizers, _ZERO_PART), "ZeRO parts")
    rank_files = [match for match in models if match.string.startswith("zero_pp_rank_")]
    if len(rank_files) > 1:
        assembly.notes.append(Note.RANKS_IN_FOLDER())
    # The partitions of one ZeRO group are disjoint: they are no replicas.
    shards = frozenset(match["label"] for match in (*models, *optimizers) if _is_zero_partition(match))
    return replace(assembly.snapshot(), shard_labels=shards)


def _list_parts(folder: str, matches: list[re.Match[str]], *, is_optimizer: bool) -> list[Part]:
    """Return the files of one kind as parts of the checkpoint."""
    parts = []
    for match in matches:
        # Other nodes may have more ZeRO partitions.
        label = match["label"] if _is_zero_partition(match) else choose_label(match, matches)
        parts.append(Part(os.path.join(folder, match.string), label, is_optimizer))
    return parts


def _list_part_numbers(matches: list[re.Match[str]], pattern: re.Pattern[str]) -> list[tuple[int, ...]]:
    """Return the numbers in the labels that match a pattern."""
    labels = [match["label"] for match in matches]
    return [list_numbers(label) for label in labels if pattern.fullmatch(label)]
