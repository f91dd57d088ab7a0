"""Tensors that an adapter stores as a whole (`modules_to_save`), or some of whose rows (`trainable_token_indices`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.conversion.adapted_tensors import Replaced, make_adapted
from syncheck.conversion.adapter_problems import AdapterProblem
from syncheck.conversion.casts import convert
from syncheck.conversion.recognition import are_readable
from syncheck.layout import views
from syncheck.snapshots import Shard, Tensor, contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.messages import Message
    from syncheck.tensors.blocks import Files


def replace_tensor(name: str, base: Tensor, new: Tensor, partner: Tensor | None, files: Files) -> Tensor | Message:
    """Return a tensor that the adapter stores as a whole.

    It is loaded into the dtype of the base model, unless the tensor of the other model has the dtype of the adapter.

    name: of the tensor in the base model.
    base: the tensor of the base model.
    new: the tensor of the adapter.
    partner: the tensor of the other model; None if it has no tensor of this name.
    """
    if not are_readable(base, new):
        return AdapterProblem.SHAPES()
    # Libraries that load each tensor in its own dtype keep that of the adapter.
    keeps_dtype = partner is not None and partner.dtype == new.dtype
    if not keeps_dtype:
        new = _load_as(base, new, files)
    data = Replaced(
        base,
        new,
        files,
        whole_name=name,
    )
    return make_adapted(name, data)


def replace_rows(base: Tensor, new: Tensor, rows: Sequence[int] | None, files: Files) -> Tensor | Message:
    """Return an embedding with some rows of the adapter.

    base: the embedding of the base model.
    new: the rows of the adapter.
    rows: their numbers in the embedding; None if they are unknown.
    """
    if rows is None:
        return AdapterProblem.TOKENS()
    if not _fits_rows(base, new, rows):
        return AdapterProblem.SHAPES()
    # PEFT copies the rows into the weight, which keeps its dtype.
    new = _load_as(base, new, files)
    shards = _list_shards(base, new, rows)
    strides = contiguous_strides(base.shape)
    joined = Tensor(
        base.name,
        dtype=base.dtype,
        shape=base.shape,
        strides=strides,
        path=base.path,
        offset=0,
        shards=tuple(shards),
    )
    data = Replaced(base, joined, files)
    return make_adapted(base.name, data)


def _fits_rows(base: Tensor, new: Tensor, rows: Sequence[int]) -> bool:
    """Whether the adapter has one row for each number, and the matrix has rows of these numbers."""
    if len(base.shape) != 2 or not are_readable(base, new):
        return False
    length, columns = base.shape
    expected_shape = (len(rows), columns)
    # No row at all fits every matrix.
    last_row = max(rows, default=0)
    return new.shape == expected_shape and last_row < length


def _load_as(base: Tensor, new: Tensor, files: Files) -> Tensor:
    """Return a tensor of the adapter in the dtype of the base model."""
    return new if new.dtype == base.dtype else convert(new, (base.dtype,), files)


def _list_shards(base: Tensor, new: Tensor, rows: Sequence[int]) -> list[Shard]:
    """Return the shards of a matrix with replaced rows: rows of the adapter, and the rows of the base between them."""
    shards: list[Shard] = []
    position = 0
    # In the order of the matrix, which need not be that of the adapter.
    indices = range(len(rows))
    replaced_rows = sorted(zip(rows, indices, strict=True))
    for row, index in replaced_rows:
        shards += _copy_rows(base, position, row, position)
        shards += _copy_rows(new, index, index + 1, row)
        position = row + 1
    length = base.shape[0]
    shards += _copy_rows(base, position, length, position)
    return shards


def _copy_rows(source: Tensor, start: int, stop: int, position: int) -> list[Shard]:
    """Return the shards of the rows from `start` to `stop` of a matrix, none if there is no row between them.

    position: of the first row in the result.
    """
    shards: list[Shard] = []
    if start >= stop:
        return shards
    part = views.narrow(source, 0, start, stop - start)
    for shard in views.list_shards(part):
        first_row, *other_dimensions = shard.start
        moved = (first_row + position, *other_dimensions)
        shards.append(Shard(shard.tensor, moved))
    return shards
