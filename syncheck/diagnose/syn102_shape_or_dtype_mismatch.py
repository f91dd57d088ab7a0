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

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.history import suspects
from syncheck.diagnose.measures import relation_of
from syncheck.diagnose.statements import limit_facts
from syncheck.diagnose.stored_forms import is_in_other_form, list_forms, list_parts
from syncheck.findings import RelationKind
from syncheck.messages import Refusal, Sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Reason, TensorDiff

CODE = "SYN102"
SLUG = "shape-or-dtype-mismatch"
SEVERITY = "error"
CERTAINTY = "proved"
_MOST = 2  # tensors with their shapes or dtypes


class Text(Sentence, topic=CODE):
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
    CAUSE_NO_VALUES = (
        "A copy was saved before its weights were loaded or initialized: the file holds meta tensors, which have no "
        "values."
    )
    FIX_NO_VALUES = (
        "Load the weights before saving: `model.to_empty(device=device)`; `model.load_state_dict(state)`. A model that "
        "is built under torch.device('meta') or `init_empty_weights()` has no weights until then."
    )
    CAUSE_STORED = (
        "A tensor is stored in another form in one copy only (quantized, sparse or nested), so its bytes cannot be "
        "compared. The values may be equal."
    )
    FIX_STORED = (
        "Compare the plain values: save tensor.dequantize() or `tensor.to_dense()`. If the form is not intended, check "
        "the code that converts or saves these tensors."
    )
    FIX = (
        "Build and cast the model from one configuration on all ranks before wrapping it. If the files hold shards, "
        "compare them along the replicate dimension only."
    )
    SHAPES = "The ranks hold {tensors:count tensor} with different shapes"
    DTYPES = "The ranks hold {tensors:count tensor} with different dtypes"
    SHAPES_AND_DTYPES = "The ranks hold {tensors:count tensor} with different shapes or dtypes"
    FORMS = "The ranks hold {tensors:count tensor} in different forms"
    DIFF_FORMS = "{tensors:count tensor} {tensors:verb has|have} different forms"
    DIFF_FIX_SHAPES = "Check the code that converts or saves these tensors, and the configurations of both models."
    TENSOR = "{name:name} is {detail}"
    MORE = "{count:count more tensor}"


def apply(case: Case) -> Match | None:
    """Match every tensor whose shape, dtype or form differs, with the parts of tensors in another form."""
    mismatched = [diff for diff in case.tensors if diff.reason in ("shape", "dtype")]
    # A single element that the conversion does not explain has its own rule.
    tensors = [diff for diff in mismatched if relation_of(diff) is not RelationKind.LOCAL]
    if not tensors:
        return None
    reasons = {diff.reason for diff in tensors}
    details = [Text.TENSOR(name=diff.name, detail=diff.detail) for diff in tensors]
    summary = _choose_summary(tensors, reasons)
    facts = [summary(tensors=len(tensors)), *limit_facts(details, _MOST, Text.MORE)]
    cause, fix = _choose_cause(case, tensors, reasons)
    parts, values = list_parts(case)
    return Match((*tensors, *parts), suspects(tensors, case.group), facts, values, cause=cause, fix=fix)


def _choose_summary(tensors: Sequence[TensorDiff], reasons: set[Reason | None]) -> Sentence:
    """Return the sentence for what differs: forms, shapes, dtypes, or both."""
    if all(map(is_in_other_form, tensors)):
        return Text.FORMS
    if len(reasons) > 1:
        return Text.SHAPES_AND_DTYPES
    return Text.SHAPES if "shape" in reasons else Text.DTYPES


def _choose_cause(
    case: Case, tensors: Sequence[TensorDiff], reasons: set[Reason | None]
) -> tuple[Sentence | None, Sentence | None]:
    """Return the cause and the fix; None for different dtypes and shapes."""
    forms = list(filter(is_in_other_form, tensors))
    if forms:
        # Meta tensors have a shape and a dtype, and nothing to compare.
        if all(map(_has_no_values, forms)):
            return Text.CAUSE_NO_VALUES, Text.FIX_NO_VALUES
        return Text.CAUSE_STORED, Text.FIX_STORED
    if not case.group.is_pair:
        return None, None
    if "dtype" not in reasons:
        return None, Text.DIFF_FIX_SHAPES
    # An option that the user has passed is no fix.
    if case.group.evidence.cast and reasons == {"dtype"}:
        return None, Text.DIFF_FIX_CAST
    return None, None


def _has_no_values(diff: TensorDiff) -> bool:
    """Whether a copy is a meta tensor."""
    return str(Refusal.META()) in list_forms(diff)
