"""Faults that the rounding of a dtype hides, so that a check cannot report a right program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.messages import Hint, Undecided
from syncheck.parity.measurements import CLEAR

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.messages import Message
    from syncheck.parity.measurements import TensorWeights
    from syncheck.parity.step import Step

_NEXT = {"float64": Hint.WITHOUT_LOW_PRECISION, "float32": Hint.IN_FLOAT64}


def find_doubt(
    tensors: Mapping[str, TensorWeights], steps: Mapping[int, Step], threshold: float, dtype: str
) -> Message | None:
    """Return why tensors within the threshold may be wrong by one percent; None if the check would see the fault.

    threshold: the largest error of a right gradient, relative to the whole gradient.
    """
    # A gradient below the threshold is zero as far as the dtype shows, and a note names the tensor.
    smallest = 0.0 if threshold > CLEAR else threshold
    hidden = [tensor.name for tensor in tensors.values() if smallest < tensor.size <= threshold / CLEAR]
    next_check = _NEXT.get(dtype, Hint.IN_FLOAT64_OR_32)()
    if hidden:
        return Undecided.PARITY_ROUNDING(dtype=dtype, threshold=threshold, names=hidden, check=next_check)
    largest = max([0.0, *(step.threshold for step in steps.values())])
    if largest > CLEAR:
        return Undecided.PARITY_STEP(dtype=dtype, threshold=largest, check=next_check)
    return None


def list_tiny(tensors: Mapping[str, TensorWeights], threshold: float) -> list[str]:
    """Return the names of tensors whose gradient is smaller than rounding."""
    return [tensor.name for tensor in tensors.values() if tensor.size <= threshold and not tensor.is_extra]
