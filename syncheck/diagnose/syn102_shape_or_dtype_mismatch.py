"""A tensor has another shape or dtype on some replicas.

Signature: the name is in every file, its shape or dtype is not the same. Such tensors are not compared by value.

Cause: one rank was built from another configuration (vocabulary, number of classes, width), keeps the model in
another precision, or the files are shards of one tensor rather than replicas of it. DDP checks shapes of trainable
parameters when it wraps a model; it checks neither frozen parameters, nor buffers, nor dtypes.

Fix: build the model from one configuration on all ranks; cast it before the wrap, on every rank. If the files are
tensor-parallel or FSDP shards, compare along the replicate dimension only.

Incidents: pytorch/pytorch#75870 (asks for such a check), deepspeedai/DeepSpeed#7525 (length check added).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, counted
from syncheck.evidence.suspects import suspects
from syncheck.messages import names_text

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity

CODE = "SYN102"
SLUG = "shape-or-dtype-mismatch"
SEVERITY: Severity = "error"
CAUSE = (
    "The ranks hold the tensor in another shape or dtype: another configuration, another precision, or shards "
    "that are no replicas."
)
FIX = (
    "Build and cast the model from one configuration on all ranks before wrapping it; if these are shards, "
    "compare them along the replicate dimension only."
)


def apply(case: Case) -> Match | None:
    """Fit every tensor whose shape or dtype is not the same everywhere."""
    unlike = tuple(diff for diff in case.tensors if diff.reason in ("shape", "dtype"))
    if not unlike:
        return None
    names = names_text([f"{diff.name} ({diff.detail})" for diff in unlike], most=2)
    return Match(unlike, suspects(unlike, case.group), f"{counted(len(unlike), 'tensor')}: {names}")
