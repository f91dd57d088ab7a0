"""A few elements of many tensors, read at once: they show a factor between ranks, and most tensors with NaN.

A pass over all elements would take as long as the digest of the tensors.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

# The number for each tensor.
_ELEMENTS = 8
# The distance of elements as a part of the tensor: by the golden ratio, they are in different columns.
_STRIDE = (5**0.5 - 2) / 2
# A tensor with up to so many elements is summed: a bias gets the NaN of its layer.
_MOST_SUMMED = 4096


class Samples(NamedTuple):
    """What was read of some tensors."""

    elements: dict[int, list[float]]
    """A few elements, by the key of the tensor."""
    not_finite: list[int]
    """The keys of tensors that hold NaN or infinity; of large tensors, only these elements are known."""


def sample(tensors: Mapping[int, Any]) -> Samples:
    """Return elements of the tensors of floats among some tensors; tensors without elements have none."""
    torch: Any = sys.modules["torch"]
    samples = Samples({}, [])
    # One read for each device waits for it once.
    batches: dict[Any, dict[int, Any]] = defaultdict(dict)
    for key, tensor in tensors.items():
        # Floats of 8 bits cannot be joined.
        if tensor.is_floating_point() and tensor.element_size() > 1:
            batches[tensor.device, tensor.dtype][key] = tensor.detach()
    for batch in batches.values():
        parts = []
        for tensor in batch.values():
            parts += [_view_few(tensor), _sum_small(tensor)]
        values = torch.cat(parts).tolist()
        for key, few, total in zip(batch, parts[::2], parts[1::2], strict=True):
            count = len(few)
            samples.elements[key], values = values[:count], values[count:]
            totals, values = values[: len(total)], values[len(total) :]
            if not all(map(math.isfinite, (*samples.elements[key], *totals))):
                samples.not_finite.append(key)
    return samples


def _view_few(tensor: Any) -> Any:
    """Return a few elements of different rows and columns, in no copy: units without input have gradients of zero."""
    if tensor.is_contiguous():
        line = tensor.view(-1)
    else:
        # In a convolution, the elements in the middle of the kernels.
        while tensor.ndim > 2:
            tensor = tensor[..., tensor.shape[-1] // 2]
        line = tensor.diagonal() if tensor.ndim == 2 else tensor
    return line[:: max(1, int(len(line) * _STRIDE))][:_ELEMENTS]


def _sum_small(tensor: Any) -> Any:
    """Return the sum of a small tensor that is finite for finite elements, as one element; of others, nothing."""
    if tensor.numel() > _MOST_SUMMED:
        return tensor.new_empty(0)
    # Finite elements become zeros, and others NaN, so that no sum overflows.
    return (tensor * 0).sum().reshape(1)
