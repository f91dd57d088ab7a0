"""Some tensors are sharded, so not all ranks should hold the same bytes.

Signature: a checkpoint holds DTensors (FSDP, HSDP, tensor parallel), or its metadata records that each rank holds a
part of the optimizer state (ZeRO) or belongs to a tensor, pipeline or expert parallel mesh. The states of Muon and
other layer-wise optimizers show their owners: disjoint, equally large sets of ranks hold them. This is information and
never fails a run.

Cause: the training method shards the model or its optimizer. Ranks with the same coordinate in every dimension that
shards a tensor are replicas of each other: HSDP shards are compared with their copies. A shard on a single rank has no
copy to compare with.

Fix: no change is needed. `syncheck diff` compares the shards with another copy of the model: a full state dict, another
layout or an export. If plain tensors belong to a mesh, add it to the files with `syncheck.metadata()`.

Incidents: NVIDIA-NeMo/Automodel#3135 (the replicate dimension was ignored: shards agreed within a replica of the model
and differed between replicas, which only a comparison along this dimension shows).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires, state_if
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from syncheck.records import Shards

CODE = "SYN104"
SLUG = "sharded-by-design"
SEVERITY = "info"
CERTAINTY = "proved"
_MOST = 4  # layouts


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = "The training method shards tensors: only ranks with the same shard are replicas of each other."
    FIX = (
        "No change is needed. syncheck diff compares shards without a replica to another copy of the model, such as "
        "a full state dict."
    )
    COMPARED = "{tensors}, {layout}: compared within {groups:sets}"
    PARTLY_COMPARED = "{tensors}, {layout}: {compared} compared within {groups:sets}, {alone} without a replica"
    NOT_COMPARED = "{tensors}, {layout}: not compared, because no two ranks hold the same shard"
    OTHER_LAYOUTS = "{tensors:count tensor} in {layouts:count other layout}"
    DTENSORS = "{count:count DTensor}"
    OPTIMIZER_TENSORS = "{count:count optimizer tensor}"
    PLAIN_TENSORS = "{count:count plain tensor}"


def _has_shards(case: Case) -> bool:
    """Whether the training method shards tensors."""
    return bool(case.group.shards)


@requires(_has_shards)
def apply(case: Case) -> Match | None:
    """Report by layout how many tensors were and were not compared; cover no tensor."""
    shards = case.group.shards
    further = shards[_MOST:]
    other_layouts = Text.OTHER_LAYOUTS(
        tensors=sum(layout.tensors for layout in further),
        layouts=len(further),
    )
    facts = [
        *map(_describe_layout, shards[:_MOST]),
        *state_if(further, other_layouts),
    ]
    return Match((), case.group.ranks, facts)


def _describe_layout(shards: Shards) -> Message:
    """State how many tensors have a layout, and which ranks were compared."""
    sentences = {"DTensor": Text.DTENSORS, "optimizer": Text.OPTIMIZER_TENSORS}
    tensors = sentences.get(shards.kind, Text.PLAIN_TENSORS)(count=shards.tensors)
    if not shards.compared:
        return Text.NOT_COMPARED(tensors=tensors, layout=shards.layout)
    described = {"tensors": tensors, "layout": shards.layout, "groups": shards.replica_groups}
    without_replica = shards.tensors - shards.compared
    if not without_replica:
        return Text.COMPARED(**described)
    return Text.PARTLY_COMPARED(**described, compared=shards.compared, alone=without_replica)
