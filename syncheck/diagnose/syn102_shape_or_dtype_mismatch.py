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

from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.features import with_reason
from syncheck.diagnose.history import suspects
from syncheck.diagnose.measures import relation_of
from syncheck.diagnose.statements import limit_facts
from syncheck.diagnose.stored_forms import is_in_other_form, list_forms, list_parts
from syncheck.findings import RelationKind
from syncheck.messages import Refusal, Sentence

if TYPE_CHECKING:
    from syncheck.records import TensorDiff

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
        "is built under `torch.device('meta')` or `init_empty_weights()` has no weights until then."
    )
    CAUSE_STORED = (
        "A tensor is stored in another form in one copy only (quantized, sparse or nested), so its bytes cannot be "
        "compared. The values may be equal."
    )
    FIX_STORED = (
        "Compare the plain values: save `tensor.dequantize()` or `tensor.to_dense()`. If the form is not intended, "
        "check the code that converts or saves these tensors."
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


class _Mismatch(NamedTuple):
    """The tensors of different shapes or dtypes."""

    tensors: list[TensorDiff]
    forms: list[TensorDiff]
    """Those in another form on some ranks."""
    have_shapes: bool
    """Whether any shapes differ."""
    have_dtypes: bool
    """Whether any dtypes differ."""


# By whether any shapes and any dtypes differ.
_SUMMARIES = {
    (True, True): Text.SHAPES_AND_DTYPES,
    (True, False): Text.SHAPES,
    (False, True): Text.DTYPES,
}


def apply(case: Case) -> Match | None:
    """Match every tensor whose shape, dtype or form differs, with the parts of tensors in another form."""
    mismatched = with_reason(case.tensors, "shape", "dtype")
    # A single element that the conversion does not explain has its own rule.
    tensors = [diff for diff in mismatched if relation_of(diff) is not RelationKind.LOCAL]
    if not tensors:
        return None
    mismatch = _Mismatch(
        tensors,
        forms=list(filter(is_in_other_form, tensors)),
        have_shapes=bool(with_reason(tensors, "shape")),
        have_dtypes=bool(with_reason(tensors, "dtype")),
    )
    summary = _choose_summary(mismatch)
    details = []
    for diff in tensors:
        details.append(Text.TENSOR(name=diff.name, detail=diff.detail))
    cause, fix = _choose_cause(case, mismatch)
    parts, values = list_parts(case)
    return Match(
        tensors=(*tensors, *parts),
        ranks=suspects(tensors, case.group),
        facts=[summary(tensors=len(tensors)), *limit_facts(details, _MOST, Text.MORE)],
        values=values,
        cause=cause,
        fix=fix,
    )


def _choose_summary(mismatch: _Mismatch) -> Sentence:
    """Return the sentence for what differs: forms, shapes, dtypes, or both."""
    if len(mismatch.forms) == len(mismatch.tensors):
        return Text.FORMS
    return _SUMMARIES[mismatch.have_shapes, mismatch.have_dtypes]


def _choose_cause(case: Case, mismatch: _Mismatch) -> tuple[Sentence | None, Sentence | None]:
    """Return the cause and the fix; None for different dtypes and shapes."""
    if mismatch.forms:
        # Meta tensors have a shape and a dtype, and nothing to compare.
        if all(map(_has_no_values, mismatch.forms)):
            return Text.CAUSE_NO_VALUES, Text.FIX_NO_VALUES
        return Text.CAUSE_STORED, Text.FIX_STORED
    if not case.group.is_pair:
        return None, None
    if not mismatch.have_dtypes:
        return None, Text.DIFF_FIX_SHAPES
    # An option that the user has passed is no fix.
    is_cast_alone = bool(case.group.evidence.cast) and not mismatch.have_shapes
    if is_cast_alone:
        return None, Text.DIFF_FIX_CAST
    return None, None


def _has_no_values(diff: TensorDiff) -> bool:
    """Whether a copy is a meta tensor."""
    return str(Refusal.META()) in list_forms(diff)
