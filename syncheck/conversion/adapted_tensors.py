"""Tensors of a base model with an adapter, computed while they are read.

A merged weight is W + scale * B @ A (peft/tuners/lora/layer.py). Weights are computed block by block.
"""

from __future__ import annotations

from dataclasses import replace
from threading import get_ident
from typing import TYPE_CHECKING, Any

from syncheck.conversion.casts import convert, round_values
from syncheck.conversion.recognition import are_readable
from syncheck.frozen import record
from syncheck.layout import views
from syncheck.snapshots import Shard, Tensor, contiguous_strides
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from syncheck.snapshots import Sliced
    from syncheck.tensors.blocks import Files

# Elements that a computed weight reads at once.
_BLOCK = 1 << 18


@record
class LowRank:
    """The product that an adapter adds to a weight: scale * up @ down, in the C order of the weight."""

    up: Tensor
    """lora_B: (rows, rank), or the addend of a bias."""
    down: Tensor | None
    """lora_A: (rank, columns) with any further dimensions of a convolution; None for a bias."""
    scale: float
    """lora_alpha divided by the rank, or by its root."""
    transposed: bool
    """Whether the weight gets the transposed product, as embeddings and layers with fan_in_fan_out do."""
    columns: int
    """Elements of the weight for each index of its first dimension."""
    files: Files

    @property
    def rank(self) -> int:
        """The number of terms of each element."""
        return 1 if self.down is None else self.down.shape[0]

    def read(self, start: int, count: int, *, magnitude: bool) -> Any:
        """Return some elements of the product as float64.

        start: the first element.
        count: the number of elements.
        magnitude: whether to return the sums of the absolute values of their terms instead.
        """
        import numpy as np

        first = start // self.columns
        last = -(-(start + count) // self.columns)
        rows, columns = self._read_factors(first, last)
        scale = self.scale
        if magnitude:
            rows, columns, scale = np.abs(rows), np.abs(columns), abs(scale)
        skipped = start - first * self.columns
        with np.errstate(all="ignore"):  # infinities and NaNs of a factor belong to the result
            block = (rows @ columns).reshape(-1)
            return scale * block[skipped : skipped + count]

    def _read_factors(self, first: int, last: int) -> tuple[Any, Any]:
        """Return the factors of some rows of the weight: (rows, rank) and (rank, columns)."""
        import numpy as np

        from syncheck.tensors.differences import read_float64

        # A comparison of two tensors uses slots from 0 on in each of its threads.
        slot = -get_ident()
        count = last - first
        if self.down is None:
            addend = read_float64(self.up, self.files, first, count, slot)
            return addend.reshape(-1, 1), np.ones((1, 1))
        down = read_float64(self.down, self.files, 0, self.down.numel, slot).reshape(self.rank, -1)
        if self.transposed:
            up = read_float64(self.up, self.files, 0, self.up.numel, slot).reshape(-1, self.rank)
            return down[:, first:last].T, up.T
        up = read_float64(self.up, self.files, first * self.rank, count * self.rank, slot)
        return up.reshape(-1, self.rank), down

    def convert(self, dtype: str) -> LowRank:
        """Return the product of factors that were converted before."""
        converted = replace(self, up=convert(self.up, (dtype,), self.files))
        if self.down is not None:
            converted = replace(converted, down=convert(self.down, (dtype,), self.files))
        return converted


@record
class Merged:
    """The bytes of a base weight plus its adapter's product, in the dtype of the weight."""

    base: Tensor
    """The weight without the adapter."""
    product: LowRank
    """The product that is added to it."""
    files: Files

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.base.shape

    def __getitem__(self, part: slice) -> bytes:
        from syncheck.tensors.differences import read_float64

        dtype = DTYPES[self.base.dtype]
        start, count = _find_elements(part, dtype.size)
        stop = start + count
        # Whole rows, at least one of them.
        rows = max(1, _BLOCK // self.product.columns)
        step = rows * self.product.columns
        blocks = []
        for first in range(start, stop, step):
            length = min(step, stop - first)
            weight = read_float64(self.base, self.files, first, length, -get_ident())
            total = weight + self.product.read(first, length, magnitude=False)
            blocks.append(round_values(total, (dtype,)).tobytes())
        return b"".join(blocks)


@record
class Replaced:
    """The bytes of a tensor that the adapter stores instead of the base model's."""

    base: Tensor
    """The tensor without the adapter."""
    new: Tensor
    """The tensor of the adapter, or shards of both tensors if only some rows are replaced."""
    files: Files
    whole_name: str = ""
    """The name of a tensor that is replaced as a whole; empty for some rows. Then tied weights differ."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the new tensor."""
        return self.new.shape

    def __getitem__(self, part: slice) -> bytes:
        return _read_bytes(self.new, self.files, part)


@record
class _Stored:
    """The bytes of a tensor in C order."""

    tensor: Tensor
    files: Files

    def __getitem__(self, part: slice) -> bytes:
        return _read_bytes(self.tensor, self.files, part)


@record
class Product:
    """The float64 bytes of a product, or of the sums of its absolute terms."""

    product: LowRank
    magnitude: bool

    def __getitem__(self, part: slice) -> bytes:
        start, count = _find_elements(part, 8)
        return bytes(self.product.read(start, count, magnitude=self.magnitude).tobytes())


def _find_elements(part: slice, size: int) -> tuple[int, int]:
    """Return the first element and the number of elements of a range of bytes. size: of an element."""
    start, stop = part.start // size, part.stop // size
    return start, stop - start


def _read_bytes(tensor: Tensor, files: Files, part: slice) -> bytes:
    """Return a range of the bytes of a tensor in C order."""
    size = DTYPES[tensor.dtype].size
    start, count = _find_elements(part, size)
    return bytes(files.read(tensor, start, count, -get_ident()))


def make_adapted(name: str, data: Merged | Replaced) -> Tensor:
    """Return the tensor with computed data."""
    source = data.new if isinstance(data, Replaced) else data.base
    strides = contiguous_strides(data.shape)
    return Tensor(
        name,
        dtype=source.dtype,
        shape=data.shape,
        strides=strides,
        path=source.path,
        offset=0,
        data=data,
    )


def find_adapted(tensor: Tensor) -> Merged | Replaced | None:
    """Return the data of a tensor with an adapter, or of a view of it; None for other tensors."""
    sources = {id(shard.tensor.data): shard.tensor.data for shard in views.list_shards(tensor)}
    # Shards of different tensors are not a view of one of them.
    if len(sources) != 1:
        return None
    (data,) = sources.values()
    return data if isinstance(data, (Merged, Replaced)) else None


def find_merged(tensor: Tensor, partner: Tensor) -> Merged | None:
    """Return the data of a weight with an adapter's product; None if it cannot be compared with a tensor."""
    data = find_adapted(tensor)
    if not isinstance(data, Merged) or not are_comparable(tensor, partner):
        return None
    return data


def are_comparable(tensor: Tensor, partner: Tensor) -> bool:
    """Whether two tensors have one shape, and readable numbers."""
    return tensor.shape == partner.shape and are_readable(tensor, partner)


def view_base(tensor: Tensor, data: Merged | Replaced) -> Tensor | None:
    """Return the part of the base model that a tensor with an adapter is a view of; None for another shape."""
    base = data.base
    # A product may be added to a tensor that the adapter has replaced.
    while (inner := find_adapted(base)) is not None:
        base = inner.base
    if base.shape != data.shape:
        return None
    return reread(tensor, base.dtype, _Stored(base, data.files))


def reread(view: Tensor, dtype: str, data: Sliced) -> Tensor:
    """Return the same view of other data, whose elements have this dtype."""
    old, new = DTYPES[view.dtype].size, DTYPES[dtype].size
    if not view.shards:
        return replace(
            view,
            dtype=dtype,
            data=data,
            offset=view.offset // old * new,
        )
    shards = [Shard(reread(shard.tensor, dtype, data), shard.start) for shard in view.shards]
    return replace(view, dtype=dtype, shards=tuple(shards))


def view_weight(tensor: Tensor, data: Merged) -> Tensor:
    """Return the same view of the weight without the adapter."""
    return reread(tensor, data.base.dtype, _Stored(data.base, data.files))


def fits_weight(base: Tensor, up: Tensor, down: Tensor, most: int, *, transposed: bool) -> bool:
    """Whether all tensors are numbers, and the product of the factors has the shape of the weight.

    Factors of a convolution have its kernel in `down`, and dimensions of length 1 in `up`.

    base: the weight.
    up: lora_B.
    down: lora_A.
    most: limit of the elements of a factor, which is read as a whole.
    transposed: whether the weight gets the transposed product.
    """
    tensors = (base, up, down)
    if not are_readable(*tensors):
        return False
    largest = max(up.numel, down.numel)
    if largest > most or not base.numel:
        return False
    dimensions = {len(tensor.shape) for tensor in tensors}
    if len(dimensions) > 1 or min(dimensions) < 2:
        return False
    kernel_dimensions = len(base.shape) - 2
    rank, *columns = down.shape
    rows = up.shape[0]
    expected_up = (rows, rank, *(1,) * kernel_dimensions)
    product = (rows, *columns)
    # Only matrices are transposed: the shape of a convolution has more than two dimensions.
    if transposed:
        product = (columns[0], rows)
    return (up.shape, base.shape) == (expected_up, product)
