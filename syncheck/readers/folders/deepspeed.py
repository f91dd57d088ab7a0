"""DeepSpeed's tag folders: `global_step500/` with a file for each model part and each rank's part of the optimizer.

Names as in deepspeed/runtime/engine.py (_get_ckpt_name, _get_zero_ckpt_name, _get_expert_ckpt_name): mp_rank counts the
model-parallel ranks, zero_pp_rank the data-parallel ones, whose ZeRO partitions have no element in common.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.messages import Note
from syncheck.readers.folders.inside import names_in, numbered
from syncheck.readers.folders.parallel_parts import label, lacking, read_parts

if TYPE_CHECKING:
    from syncheck.snapshots import Snapshot

FORMAT = "deepspeed"
_MP = r"mp_rank_\d+(?:_\d+)*"
_MODEL = re.compile(
    rf"(?P<label>(?:layer_\d+_expert_\d+_|zero_pp_rank_\d+_)?{_MP}|layer_\d+-model_\d+)[-_]model_states\.pt"
)
_OPTIMIZER = re.compile(rf"(?:bf16_)?(?P<label>(?:zero_pp_rank|expp_rank)_\d+_{_MP})_optim_states\.pt")

# Parts that are numbered from 0 on without a gap.
_MODEL_PART = re.compile(r"mp_rank_(\d+)")
_ZERO_PART = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)")


def matches_folder(folder: str) -> bool:
    """Whether a folder holds the files that DeepSpeed writes for a tag."""
    names = names_in(folder)
    return any(_MODEL.fullmatch(name) for name in names)


def holds(relative: str) -> bool:
    """Whether a file, by its path below the folder, belongs to such a checkpoint."""
    return any(pattern.fullmatch(relative) for pattern in (_MODEL, _OPTIMIZER))


def _is_part(match: re.Match[str]) -> bool:
    return match["label"].startswith("zero_pp_rank_")


def read(folder: str) -> Snapshot:
    """Open the folder as one checkpoint. Raises CheckpointError for a file of it that is broken."""
    names = names_in(folder)
    models, optimizers = numbered(_MODEL, names), numbered(_OPTIMIZER, names)
    parts = [
        # The only part of a folder may be one of several nodes'.
        (os.path.join(folder, match.string), match["label"] if _is_part(match) else label(match, found), is_optimizer)
        for found, is_optimizer in ((models, False), (optimizers, True))
        for match in found
    ]
    snapshot = read_parts(folder, FORMAT, parts)
    for found, pattern, what in ((models, _MODEL_PART, "model-parallel parts"), (optimizers, _ZERO_PART, "ZeRO parts")):
        places = [tuple(map(int, one.groups())) for match in found if (one := pattern.fullmatch(match["label"]))]
        snapshot = replace(snapshot, notes=(*snapshot.notes, *lacking(places, what)))
    shards = frozenset(match["label"] for match in (*models, *optimizers) if _is_part(match))
    snapshot = replace(snapshot, shard_labels=shards)
    if sum(match.string.startswith("zero_pp_rank_") for match in models) < 2:
        return snapshot
    return replace(snapshot, notes=(*snapshot.notes, Note.RANKS_IN_FOLDER()))
