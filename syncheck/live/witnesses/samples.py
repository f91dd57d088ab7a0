"""A few elements of many tensors, read at once: they show a factor between ranks, and most tensors with NaN.

A pass over all elements would take as long as the digest of the tensors.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

# The number for each tensor: a change of a tenth of a tensor is seen in 97 of 100 cases.
_ELEMENTS = 32
# The distance of elements as a part of the tensor: by the golden ratio, they are in different columns.
_STRIDE = (5**0.5 - 2) / 8
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
            batches[tensor.device, tensor.dtype][key] = tensor
    with torch.no_grad():
        for batch in batches.values():
            elements, total = _read_few(batch)
            samples.elements.update(elements)
            # At most steps all are finite, which one sum tells.
            sums = {} if math.isfinite(total) else _sum_small(batch)
            for key in batch:
                if not all(map(math.isfinite, (*elements[key], sums.get(key, 0.0)))):
                    samples.not_finite.append(key)
    return samples


def _read_few(tensors: Mapping[int, Any]) -> tuple[dict[int, list[float]], float]:
    """Return a few elements of each tensor by its key, and a number: finite if the small tensors are."""
    torch: Any = sys.modules["torch"]
    views = []
    small = []
    for tensor in tensors.values():
        views.append(_view_few(tensor))
        if tensor.numel() <= _MOST_SUMMED:
            small.append(tensor.reshape(-1))
    # Finite elements become zeros, and others NaN, so that no sum overflows.
    total = (torch.cat(small) * 0).sum().reshape(1) if small else views[0].new_zeros(1)
    values = iter(torch.cat([*views, total]).tolist())
    elements = {}
    for key, view in zip(tensors, views, strict=True):
        elements[key] = list(islice(values, view.numel()))
    return elements, next(values)


def _sum_small(tensors: Mapping[int, Any]) -> dict[int, float]:
    """Return the sum of each small tensor by its key, of which finite elements count as zero."""
    sums = {}
    for key, tensor in tensors.items():
        if tensor.numel() <= _MOST_SUMMED:
            sums[key] = (tensor * 0).sum().item()
    return sums


def _view_few(tensor: Any) -> Any:
    """Return a few elements of different rows and columns, in no copy: units without input have gradients of zero."""
    if tensor.is_contiguous():
        stride = max(1, int(tensor.numel() * _STRIDE))
        count = min(_ELEMENTS, -(-tensor.numel() // stride))
        return tensor.as_strided((count,), (stride,))
    # In a convolution, the elements in the middle of the kernels.
    while tensor.ndim > 2:
        tensor = tensor[..., tensor.shape[-1] // 2]
    line = tensor.diagonal() if tensor.ndim == 2 else tensor
    return line[:: max(1, int(len(line) * _STRIDE))][:_ELEMENTS]
