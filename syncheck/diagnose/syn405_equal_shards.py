"""Shards of one tensor at different positions are bitwise equal.

Signature: ranks hold different parts of a parameter (FSDP, tensor parallelism or expert parallelism), and parts of the
same shape hold the same bytes. Only floating-point parts with many different values count: zeros, ones and repeated
patterns are equal by design, and so are parts of less than 64 elements. Plain tensors in a mesh count only if their
names show that the layer is divided. Folders with one copy of the model, as of torch.distributed.checkpoint,
are not searched. This is information and never fails a run.

Cause: every rank was seeded with the same number and then drew its own part, so the whole tensor holds the same rows or
columns several times. FSDP shards become different with the first steps. Halves of a hidden layer on tensor-parallel
ranks do not: they get equal gradients, and the layer trains as if it had half the width.

Other causes are intended: experts that are copies of one dense layer (upcycling), parts that share one weight, and
parameters that were loaded from a smaller model by repeating it.

Fix: draw the whole tensor on every rank and divide it afterwards, or seed each position of the mesh with its own number
before its parts are drawn: `torch.manual_seed(seed + tp_rank)`. Replicated tensors need the same seed on all ranks.
If the copies are intended, no change is needed.

Incidents: pytorch/torchtitan#3106 and pytorch/pytorch#196562 (FSDP2 with CPU offload: all ranks drew equal shards),
InternLM/InternLM#405 and modelscope/ms-swift#7944 (one seed on all tensor-parallel ranks), PaddlePaddle/PaddleNLP#9426
(equal shards of row-parallel adapters), allenai/OLMo-core#307.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires
from syncheck.diagnose.selection import list_names
from syncheck.diagnose.statements import limit_facts
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from syncheck.findings import EqualShards

CODE = "SYN405"
SLUG = "equal-shards"
SEVERITY = "info"
CERTAINTY = "consistent"
_MOST = 3  # statements


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "The ranks were seeded with the same number, and each drew its own part of the tensor. Or the copies are "
        "intended: experts copied from one layer, shared weights, or a repeated smaller model."
    )
    FIX = (
        "Draw the whole tensor and divide it afterwards, or seed each position of the mesh before its parts are drawn: "
        "`torch.manual_seed(seed + tp_rank)`. If the copies are intended, no change is needed."
    )
    EQUAL = (
        "{count:count parameter} in {shards} shards: {equal} of the shards are bitwise equal, on {sets:sets}: "
        "{names:names}"
    )
    MORE = "{count:count more set} of equal shards"


def _has_equal_shards(case: Case) -> bool:
    """Whether shards at different positions are equal."""
    return bool(case.group.evidence.equal_shards)


@requires(_has_equal_shards)
def apply(case: Case) -> Match | None:
    """Report which shards are equal; cover no tensor. The ranks with equal shards are suspect."""
    equal_shards = case.group.evidence.equal_shards
    # Parameters of one layout usually have one statement.
    similar: dict[tuple[object, ...], list[EqualShards]] = defaultdict(list)
    suspects: set[int] = set()
    for tensor in equal_shards:
        similar[tensor.shards, tensor.equal, tensor.clusters].append(tensor)
        suspects.update(*tensor.clusters)

    facts = []
    for tensors in similar.values():
        first = tensors[0]
        fact = Text.EQUAL(
            count=len(tensors),
            shards=first.shards,
            equal=first.equal,
            sets=first.clusters,
            names=list_names(tensors),
        )
        facts.append(fact)

    return Match((), tuple(sorted(suspects)), limit_facts(facts, _MOST, Text.MORE))
