"""Distinguish the padding of a tensor from rows and columns with data, by its values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.conversion.rows import digest_rows
from syncheck.conversion.vocabularies import has_vocabulary
from syncheck.layout import views

if TYPE_CHECKING:
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Elements that are read at once.
_BLOCK = 1 << 18


def is_padding(tensor: Tensor, dim: int, length: int, files: Files) -> bool:
    """Whether the indices of a dimension from `length` on hold no data: zeros, or equal rows of a vocabulary."""
    further = views.narrow(tensor, dim, length, tensor.shape[dim] - length)
    # Equal values of other tensors are data: a norm begins with 1 everywhere.
    is_matrix_of_tokens = dim == 0 and len(tensor.shape) == 2 and has_vocabulary(tensor.name)
    return is_padding_of_tokens(further, files) if is_matrix_of_tokens else _is_zero(further, files)


def is_padding_of_tokens(rows: Tensor, files: Files) -> bool:
    """Whether rows of a vocabulary are zeros, or equal. A single row that is not zero may be a token."""
    if _is_zero(rows, files):
        return True
    count = rows.shape[0]
    return 1 == len(set(digest_rows(rows, files, count))) < count


def _is_zero(tensor: Tensor, files: Files) -> bool:
    """Whether all bytes of a tensor are zero. Negative zeros are data."""
    for start in range(0, tensor.numel, _BLOCK):
        block = files.read(tensor, start, min(_BLOCK, tensor.numel - start), 0)
        if any(memoryview(block)):
            return False
    return True
