"""Tensors that an adapter stores as a whole (`modules_to_save`), or some of whose rows (`trainable_token_indices`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.conversion.casts import convert
from syncheck.conversion.merges import Replaced, make_adapted
from syncheck.conversion.recognition import is_readable
from syncheck.logical import views
from syncheck.messages import AdapterProblem
from syncheck.snapshots import Shard, Tensor, contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.kernel.blocks import Files
    from syncheck.messages import Message


def replace_tensor(name: str, base: Tensor, new: Tensor, partner: Tensor | None, files: Files) -> Tensor | Message:
    """Return a tensor that the adapter stores as a whole.

    It is loaded into the dtype of the base model, unless the tensor of the other model (partner) has its own dtype.
    """
    if not is_readable(base) or not is_readable(new):
        return AdapterProblem.SHAPES()
    # Libraries that load each tensor in its own dtype keep that of the adapter.
    keeps_dtype = partner is not None and partner.dtype == new.dtype
    if new.dtype != base.dtype and not keeps_dtype:
        new = convert(new, (base.dtype,), files)
    return make_adapted(name, Replaced(base, new, files, whole_name=name))


def replace_rows(base: Tensor, new: Tensor, rows: Sequence[int] | None, files: Files) -> Tensor | Message:
    """Return an embedding with some rows of the adapter. rows: their numbers, None if they are unknown."""
    if rows is None:
        return AdapterProblem.TOKENS()
    if not is_readable(base) or not is_readable(new) or len(base.shape) != 2:
        return AdapterProblem.SHAPES()
    expected_shape = (len(rows), base.shape[1])
    if new.shape != expected_shape or max(rows, default=0) >= base.shape[0]:
        return AdapterProblem.SHAPES()
    # PEFT copies the rows into the weight, which keeps its dtype.
    if new.dtype != base.dtype:
        new = convert(new, (base.dtype,), files)
    boxes = tuple(_list_boxes(base, new, rows))
    strides = contiguous_strides(base.shape)
    joined = Tensor(base.name, base.dtype, base.shape, strides, base.path, 0, shards=boxes)
    return make_adapted(base.name, Replaced(base, joined, files))


def _list_boxes(base: Tensor, new: Tensor, rows: Sequence[int]) -> list[Shard]:
    """Return the boxes of a matrix with replaced rows: rows of the adapter, and the rows of the base between them."""
    boxes: list[Shard] = []
    position = 0
    # In the order of the matrix, which need not be that of the adapter.
    for row, index in sorted(zip(rows, range(len(rows)), strict=True)):
        if row > position:
            boxes += _place_rows(views.narrow(base, 0, position, row - position), position)
        boxes += _place_rows(views.narrow(new, 0, index, 1), row)
        position = row + 1
    if position < base.shape[0]:
        boxes += _place_rows(views.narrow(base, 0, position, base.shape[0] - position), position)
    return boxes


def _place_rows(part: Tensor, position: int) -> list[Shard]:
    """Return the boxes of some rows at their position in the matrix."""
    boxes = []
    for box in views.list_boxes(part):
        start = (box.start[0] + position, *box.start[1:])
        boxes.append(Shard(box.tensor, start))
    return boxes
