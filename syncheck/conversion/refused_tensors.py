"""Refuse tensors of two models without a comparison: the reason is not a difference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.records import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.messages import Message
    from syncheck.records import Comparison


def refuse_tensors(comparison: Comparison, details: Mapping[str, Message]) -> Comparison:
    """Return a comparison in which some tensors are refused instead of missing or of another shape.

    details: why, by the name of the tensor.
    """
    diffs = []
    for diff in comparison.tensors:
        if diff.name in details:
            diff = replace(
                diff,
                reason=Reason.REFUSED,
                detail=details[diff.name],
                minority=(),
            )
        diffs.append(diff)

    return replace(comparison, tensors=tuple(diffs))
