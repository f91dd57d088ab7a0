"""Some tensors are divided over the ranks, so that not all ranks ought to hold the same bytes.

Signature: a checkpoint holds DTensors (FSDP, HSDP, tensor parallel), or its metadata says that each rank keeps a part
of the optimizer's state (ZeRO) or stands in a tensor, pipeline or expert parallel mesh. This is information and never
fails a run.

Cause: the method divides the model or its optimizer. Ranks with the same coordinate along every dimension that
divides a tensor are replicas of it: under HSDP a shard is compared with its copies. A shard that only one rank holds
has no copy, so nothing can be said of it.

Fix: nothing, unless you want these tensors compared: save a full state dict on every rank as well
(`get_model_state_dict` with `full_state_dict=True`), or write the mesh into the files with `syncheck.metadata()`.

Incidents: NVIDIA-NeMo/Automodel#3135 (the replicate dimension was left out: shards agreed within a replica of the
model and differed between replicas, which only a comparison along that dimension can show).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, counted
from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, Shards

CODE = "SYN104"
SLUG = "sharded-by-design"
SEVERITY: Severity = "info"
CAUSE = "The method divides tensors over the ranks: only ranks that hold the same part of one are its replicas."
FIX = "Nothing has to change. To compare what has no replica, save a full state dict on every rank as well."
_MOST = 4  # layouts and sets of ranks that are named


def apply(case: Case) -> Match | None:
    """Tell by layout how many tensors were and were not compared; cover nothing."""
    shards = case.group.shards
    if not shards:
        return None
    texts = [_text(one) for one in shards[:_MOST]]
    if len(shards) > _MOST:
        rest = shards[_MOST:]
        texts.append(f"{counted(sum(one.tensors for one in rest), 'tensor')} in {counted(len(rest), 'other layout')}")
    return Match((), case.group.ranks, "; ".join(texts))


def _text(shards: Shards) -> str:
    """Say of one layout what is laid out so, how, and who was compared with whom."""
    what = {"DTensor": "DTensor", "optimizer": "tensor of the optimizer"}.get(shards.kind, "plain tensor")
    many = "tensors of the optimizer" if shards.kind == "optimizer" else ""
    text = f"{counted(shards.tensors, what, many)}, {shards.layout}:"
    if not shards.compared:
        return f"{text} not compared, no two ranks hold the same part"
    sets = " and ".join(ranks_text(found) for found in shards.replica_groups[:_MOST])
    if len(shards.replica_groups) > _MOST:
        sets += f" and {len(shards.replica_groups) - _MOST} more sets"
    left = shards.tensors - shards.compared
    return f"{text} compared within {sets}" + (f", and {left} of them with no other rank's" if left else "")
