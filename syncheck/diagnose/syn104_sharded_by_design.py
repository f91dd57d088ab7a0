"""Some tensors are sharded, so not all ranks should hold the same bytes.

Signature: a checkpoint holds DTensors (FSDP, HSDP, tensor parallel), or its metadata records that each rank holds a
part of the optimizer state (ZeRO) or belongs to a tensor, pipeline or expert parallel mesh. The states of Muon and
other layer-wise optimizers show their owners: disjoint, equally large sets of ranks hold them. This is information and
never fails a run.

Cause: the training method shards the model or its optimizer. Ranks with the same coordinate in every dimension that
shards a tensor are replicas of each other: HSDP shards are compared with their copies. A shard on a single rank has no
copy to compare with.

DTensors and the metadata of the optimizer record their shards. Names of files and a mesh in the metadata only place the
ranks: no file records that a plain tensor is a part. If plain tensors have one shape on several ranks and were not
compared, the finding is only consistent with shards; it states how many tensors are bitwise equal, which ranks
that drew their parts never are.

Files of tensor-parallel ranks may record nothing, not even in their names, and look like replicas. Their sizes and
contents show it: the output projection of an attention has 1/N of the inputs that `config.json` or `params.json` beside
the files states, or else 1/N of the hidden size, and norms are equal on all ranks. The divided weights have other
values on each rank, in nearly all elements. Replicas with other initial weights on each rank differ in the same way, so
the verdict is undecided.

Fix: no change is needed if the tensors are shards. `syncheck diff` compares the shards with another copy of the model:
a full state dict, another layout or an export. If plain tensors belong to a mesh, add it to the files with
`syncheck.metadata()`. If the ranks hold copies, compare all files as replicas with an empty `group_by`.

Incidents: NVIDIA-NeMo/Automodel#3135 (the replicate dimension was ignored: shards agreed within a replica of the model
and differed between replicas, which only a comparison along this dimension shows).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires, state_if
from syncheck.findings import UnclearParts
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
        "No change is needed. `syncheck diff` compares shards without a replica to another copy of the model, such as "
        "a full state dict."
    )
    CAUSE_UNSURE = (
        "The file names or the metadata place the ranks in a mesh of model parallelism, where plain tensors may be "
        "parts. No file records which tensors are parts."
    )
    FIX_UNSURE = (
        "If the ranks hold copies, compare all files as replicas: {group_by:option ''}. If the ranks hold parts, no "
        "change is needed: `syncheck diff` compares parts to another copy of the model, if names or a map show the "
        "places."
    )
    CAUSE_UNMARKED = (
        "The files look like shards of one model: their layers have a part of the size of the whole layers, and other "
        "values on each rank, while the undivided tensors are equal. No file records shards."
    )
    FIX_UNMARKED = (
        "If the files are shards, `syncheck diff` compares them to another copy of the model, if the files show the "
        "places; save DTensors, or record the mesh with `syncheck.metadata()`. If the ranks hold copies, compare all "
        "files as replicas: {group_by:option ''}."
    )
    EQUAL = (
        "{count:count tensor} with one shape on several ranks {count:verb is|are} bitwise equal on them "
        "({names:names}), as copies are"
    )
    DIFFERENT = (
        "{count:count tensor} with one shape on several ranks {count:verb differs|differ} ({names:names}), as "
        "parts do, and copies that are out of sync"
    )
    COMPARED = "{tensors}, {layout}: compared within {groups:sets}"
    PARTLY_COMPARED = "{tensors}, {layout}: {compared} compared within {groups:sets}, {alone} without a replica"
    NOT_COMPARED = "{tensors}, {layout}: not compared, because no two ranks hold the same shard"
    NOT_PLACED = "{tensors}, {layout}: not compared, because no two ranks have the same coordinates"
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
    match = Match((), case.group.ranks, facts)
    if case.group.evidence.doubt is not None:
        return match.with_cause(Text.CAUSE_UNMARKED, Text.FIX_UNMARKED).as_consistent("SYN210")
    unclear = case.group.evidence.unclear_parts
    if unclear is None or unclear == UnclearParts():
        return match
    return _doubt(match, unclear)


def _doubt(match: Match, unclear: UnclearParts) -> Match:
    """Return the match of plain tensors that may be parts or copies, with the evidence for both."""
    equal, different = unclear.equal, unclear.different
    facts = [
        *match.facts,
        *state_if(equal, Text.EQUAL(count=len(equal), names=equal)),
        *state_if(different, Text.DIFFERENT(count=len(different), names=different)),
    ]
    # Copies that differ would have no other explanation.
    other_causes = ("SYN299",) if different else ()
    unsure = replace(match, facts=facts).with_cause(Text.CAUSE_UNSURE, Text.FIX_UNSURE)
    return unsure.as_consistent(*other_causes)


def _describe_layout(shards: Shards) -> Message:
    """State how many tensors have a layout, and which ranks were compared."""
    sentences = {"DTensor": Text.DTENSORS, "optimizer": Text.OPTIMIZER_TENSORS}
    tensors = sentences.get(shards.kind, Text.PLAIN_TENSORS)(count=shards.tensors)
    if not shards.compared:
        sentence = Text.NOT_PLACED if shards.kind == "model parallel" else Text.NOT_COMPARED
        return sentence(tensors=tensors, layout=shards.layout)
    described = {"tensors": tensors, "layout": shards.layout, "groups": shards.replica_groups}
    without_replica = shards.tensors - shards.compared
    if not without_replica:
        return Text.COMPARED(**described)
    return Text.PARTLY_COMPARED(**described, compared=shards.compared, alone=without_replica)
