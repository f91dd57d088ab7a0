"""A tensor has different shapes or dtypes on different ranks.

Signature: the name is present in every file, but its shape or dtype differs. syncheck does not compare the values of
these tensors.

Cause: one rank built the model from another configuration (vocabulary, number of classes, width) or in another
precision, or the files hold shards of one tensor instead of replicas. When DDP wraps a model, it checks the shapes of
trainable parameters. It does not check frozen parameters, buffers or dtypes.

Fix: build the model from one configuration on all ranks, and cast it before wrapping on every rank. If the files hold
tensor-parallel or FSDP shards, compare only along the replicate dimension.

Incidents: pytorch/pytorch#75870 (requests this check), deepspeedai/DeepSpeed#7525 (length check added).
"""

from __future__ import annotations

from syncheck.diagnose.case import Case, Match, limit_facts, relation_of
from syncheck.diagnose.history import suspects
from syncheck.findings import RelationKind
from syncheck.messages import Sentence

CODE = "SYN102"
SLUG = "shape-or-dtype-mismatch"
SEVERITY = "error"
CERTAINTY = "proved"
_MOST = 2  # tensors with their shapes or dtypes


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = (
        "The ranks built the model from different configurations or in different precisions, or the files hold shards "
        "instead of replicas."
    )
    DIFF_CAUSE = (
        "A and B have tensors of different shapes or dtypes: a conversion changed them, or they are other models."
    )
    DIFF_FIX = (
        "Check the code that converts or saves these tensors. If B was converted to another dtype on purpose, pass "
        "{cast:option DTYPE}."
    )
    DIFF_FIX_CAST = (
        "The conversion with {cast:option} does not explain these tensors: their values differ, too. Check the code "
        "that converts or saves them."
    )
    DIFF_SHAPES = "{tensors:count tensor} {tensors:verb has|have} different shapes"
    DIFF_DTYPES = "{tensors:count tensor} {tensors:verb has|have} different dtypes"
    DIFF_SHAPES_AND_DTYPES = "{tensors:count tensor} {tensors:verb has|have} different shapes or dtypes"
    FIX = (
        "Build and cast the model from one configuration on all ranks before wrapping it. If the files hold shards, "
        "compare them along the replicate dimension only."
    )
    SHAPES = "The ranks hold {tensors:count tensor} with different shapes"
    DTYPES = "The ranks hold {tensors:count tensor} with different dtypes"
    SHAPES_AND_DTYPES = "The ranks hold {tensors:count tensor} with different shapes or dtypes"
    TENSOR = "{name} is {detail}"
    MORE = "{count:count more tensor}"


def apply(case: Case) -> Match | None:
    """Match every tensor whose shape or dtype differs."""
    mismatched = (diff for diff in case.tensors if diff.reason in ("shape", "dtype"))
    # A single element that the conversion does not explain has its own rule.
    tensors = tuple(diff for diff in mismatched if relation_of(diff) is not RelationKind.LOCAL)
    if not tensors:
        return None
    reasons = {diff.reason for diff in tensors}
    first = Text.SHAPES_AND_DTYPES if len(reasons) > 1 else Text.SHAPES if "shape" in reasons else Text.DTYPES
    details = [Text.TENSOR(name=diff.name, detail=diff.detail) for diff in tensors]
    facts = [first(tensors=len(tensors)), *limit_facts(details, _MOST, Text.MORE)]
    # An option that the user has passed is no fix.
    fix = Text.DIFF_FIX_CAST if case.group.evidence.cast and reasons == {"dtype"} else None
    return Match(tensors, suspects(tensors, case.group), facts, fix=fix)
