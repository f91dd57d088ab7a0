"""Tensors of a base model with an adapter, computed while they are read, and the proof that a tensor is their merge.

A merged weight is W + scale * B @ A (peft/tuners/lora/layer.py). Weights are computed block by block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from threading import get_ident
from typing import TYPE_CHECKING, Any

from syncheck.conversion.casts import convert, round_values
from syncheck.conversion.recognition import is_readable
from syncheck.dtypes import DTYPES
from syncheck.kernel.blocks import ranges
from syncheck.logical import views
from syncheck.snapshots import Shard, Tensor, contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncheck.dtypes import DType
    from syncheck.kernel.blocks import Files
    from syncheck.snapshots import Sliced

# A factor of the product is fitted within this share, and so many standard deviations of rounding.
_SHARE, _SIGMAS = 0.02, 6.0
# The rounding of a product may be this share of the product at most, by root mean square over a block. Otherwise the
# bound would accept weights without the product.
_MOST_SLACK = 0.25
# Unit roundoff of float32, in which PEFT computes products.
_SINGLE = 2.0**-24


@dataclass(frozen=True, slots=True)
class LowRank:
    """The product that an adapter adds to a weight: scale * up @ down, in the C order of the weight.

    With `transposed` (embeddings, fan_in_fan_out), the product is transposed.
    """

    up: Tensor
    """lora_B: (rows, rank), or the addend of a bias."""
    down: Tensor | None
    """lora_A: (rank, columns) with any further dimensions of a convolution; None for a bias."""
    scale: float
    transposed: bool
    columns: int
    """Elements of the weight for each index of its first dimension."""
    files: Files

    @property
    def rank(self) -> int:
        """The number of terms of each element."""
        if self.down is None:
            return 1
        return self.down.shape[0]

    def read(self, start: int, count: int, *, magnitude: bool) -> Any:
        """Return elements `start` to `start + count` of the product as float64.

        magnitude: whether to return the sums of the absolute values of their terms instead.
        """
        import numpy as np

        first, last = start // self.columns, -(-(start + count) // self.columns)
        rows, columns = self._read_factors(first, last)
        scale = self.scale
        if magnitude:
            rows, columns, scale = np.abs(rows), np.abs(columns), abs(scale)
        skipped = start - first * self.columns
        with np.errstate(all="ignore"):  # infinities and NaNs of a factor belong to the result
            return scale * (rows @ columns).reshape(-1)[skipped : skipped + count]

    def _read_factors(self, first: int, last: int) -> tuple[Any, Any]:
        """Return the factors of some rows of the weight: (rows, rank) and (rank, columns)."""
        import numpy as np

        from syncheck.differences import read_float64

        slot = -get_ident()
        if self.down is None:
            return read_float64(self.up, self.files, first, last - first, slot).reshape(-1, 1), np.ones((1, 1))
        if self.transposed:
            down = read_float64(self.down, self.files, 0, self.down.numel, slot).reshape(self.rank, -1)
            up = read_float64(self.up, self.files, 0, self.up.numel, slot).reshape(-1, self.rank)
            return down[:, first:last].T, up.T
        up = read_float64(self.up, self.files, first * self.rank, (last - first) * self.rank, slot)
        down = read_float64(self.down, self.files, 0, self.down.numel, slot)
        return up.reshape(-1, self.rank), down.reshape(self.rank, -1)

    def convert(self, dtype: str) -> LowRank:
        """Return the product of factors that were converted before."""
        converted = replace(self, up=convert(self.up, (dtype,), self.files))
        if self.down is not None:
            converted = replace(converted, down=convert(self.down, (dtype,), self.files))
        return converted


@dataclass(frozen=True, slots=True)
class Merged:
    """The bytes of a base weight plus its adapter's product, in the dtype of the weight."""

    base: Tensor
    product: LowRank
    files: Files

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.base.shape

    def __getitem__(self, part: slice) -> bytes:
        from syncheck.differences import read_float64

        row = DTYPES[self.base.dtype]
        start, stop = part.start // row.size, part.stop // row.size
        step = max(1, (1 << 18) // self.product.columns) * self.product.columns
        blocks = []
        for first in range(start, stop, step):
            count = min(step, stop - first)
            weight = read_float64(self.base, self.files, first, count, -get_ident())
            total = weight + self.product.read(first, count, magnitude=False)
            blocks.append(round_values(total, (row,)).tobytes())
        return b"".join(blocks)


@dataclass(frozen=True, slots=True)
class Replaced:
    """The bytes of a tensor that the adapter stores instead of the base model's."""

    base: Tensor
    new: Tensor
    files: Files
    whole_name: str = ""
    """The name of a tensor that is replaced as a whole; empty for some rows. Then tied weights differ."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the new tensor."""
        return self.new.shape

    def __getitem__(self, part: slice) -> bytes:
        size = DTYPES[self.new.dtype].size
        start, stop = part.start // size, part.stop // size
        return bytes(self.files.read(self.new, start, stop - start, -get_ident()))


@dataclass(frozen=True, slots=True)
class _Stored:
    """The bytes of a tensor in C order."""

    tensor: Tensor
    files: Files

    def __getitem__(self, part: slice) -> bytes:
        size = DTYPES[self.tensor.dtype].size
        start, stop = part.start // size, part.stop // size
        return bytes(self.files.read(self.tensor, start, stop - start, -get_ident()))


@dataclass(frozen=True, slots=True)
class _Product:
    """The float64 bytes of a product, or of the sums of its absolute terms."""

    product: LowRank
    magnitude: bool

    def __getitem__(self, part: slice) -> bytes:
        start, stop = part.start // 8, part.stop // 8
        return bytes(self.product.read(start, stop - start, magnitude=self.magnitude).tobytes())


def make_adapted(name: str, data: Merged | Replaced) -> Tensor:
    """Return the tensor with computed data."""
    source = data.base
    if isinstance(data, Replaced):
        source = data.new
    strides = contiguous_strides(data.shape)
    return Tensor(name, source.dtype, data.shape, strides, source.path, 0, data=data)


def find_adapted(tensor: Tensor) -> Merged | Replaced | None:
    """Return the data of a tensor with an adapter, or of a view of it; None for other tensors."""
    boxes = views.list_boxes(tensor)
    if not boxes:
        return None
    data = boxes[0].tensor.data
    # Boxes of different tensors are not a view of one of them.
    if not isinstance(data, (Merged, Replaced)) or any(box.tensor.data is not data for box in boxes):
        return None
    return data


def are_comparable(tensor: Tensor, partner: Tensor) -> bool:
    """Whether two tensors have one shape, and readable numbers."""
    if tensor.shape != partner.shape:
        return False
    return is_readable(tensor) and is_readable(partner)


def view_base(tensor: Tensor, data: Merged | Replaced) -> Tensor | None:
    """Return the part of the base model that a tensor with an adapter is a view of; None for another shape."""
    base = data.base
    # A product may be added to a tensor that the adapter has replaced.
    while (inner := find_adapted(base)) is not None:
        base = inner.base
    if base.shape != data.shape:
        return None
    return _reread(tensor, base.dtype, _Stored(base, data.files))


def _reread(view: Tensor, dtype: str, data: Sliced) -> Tensor:
    """Return the same view of other data, whose elements have this dtype."""
    old, new = DTYPES[view.dtype].size, DTYPES[dtype].size
    if not view.shards:
        return replace(view, dtype=dtype, data=data, offset=view.offset // old * new)
    boxes = [Shard(_reread(box.tensor, dtype, data), box.start) for box in view.shards]
    return replace(view, dtype=dtype, shards=tuple(boxes))


def is_merge(tensor: Tensor, partner: Tensor, dtype: str | None, files: Files, *, to_partner: bool) -> bool | None:
    """Return whether a tensor is a possible result of a merge; None if rounding hides the product.

    tensor: of `Merged` data. partner: the tensor of the other model. dtype: of one accepted conversion; None without a
    conversion. to_partner: whether the partner is the converted copy; else it is the source.
    """
    data = find_adapted(tensor)
    if (
        not isinstance(data, Merged)
        or tensor.shape != partner.shape
        or not (is_readable(tensor) and is_readable(partner))
    ):
        return False
    if dtype is None and tensor.dtype != partner.dtype:
        return False
    merged = _Way(tensor, _reread(tensor, data.base.dtype, _Stored(data.base, data.files)), data.product)
    narrow = tensor.dtype
    if dtype is None:
        merged = replace(merged, rounding=(tensor.dtype,))
    elif to_partner:
        merged, narrow = replace(merged, rounding=(dtype, partner.dtype)), dtype
    else:
        merged = replace(merged, rounding=(tensor.dtype,), partner_rounding=(dtype, tensor.dtype))
    ways = [merged]
    if dtype is not None and to_partner:
        # Loaded in the other dtype, and then merged.
        ways.append(replace(merged, base=convert(merged.base, (dtype,), files)))
    if unit_roundoff(narrow) > unit_roundoff(data.product.up.dtype):
        # The adapter was loaded in this dtype, too.
        ways += [replace(way, product=way.product.convert(narrow)) for way in ways]
    results = []
    for way in ways:
        results.append(_agrees(way, partner, files))
        if results[-1]:
            return True
    # One way whose bounds are too wide leaves the merge possible.
    if None in results:
        return None
    return False


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to compute a merged tensor."""

    tensor: Tensor
    """A view of the merged weight."""
    base: Tensor
    """The same view of the weight without the adapter, after any conversion."""
    product: LowRank
    rounding: tuple[str, ...] = ()
    """The dtypes of the sum, in turn."""
    partner_rounding: tuple[str, ...] = ()
    """The dtypes to which the other tensor is converted before the comparison."""


def _agrees(way: _Way, partner: Tensor, files: Files) -> bool | None:
    """Return whether all elements are within the bounds of one way to merge; None if the bounds are too wide.

    Rounding keeps the order of numbers. So if the sum lies between two bounds, the rounded sum lies between the rounded
    bounds.
    """
    import numpy as np

    target, last = [DTYPES[name] for name in way.rounding], 2.0**-52
    if target[-1].size < 4:
        last = _SINGLE  # a sum may be rounded to float32 before it is rounded to a smaller dtype
    # PEFT rounds a product and its multiple to the dtype of the adapter, and the result to the dtype of the weight.
    weight_unit = max(unit_roundoff(way.base.dtype), unit_roundoff(way.rounding[0]))
    unit = (1 + unit_roundoff(way.product.up.dtype)) ** 2 * (1 + weight_unit) - 1
    for weight, delta, magnitude, value in _read_blocks(way.tensor, way.base, way.product, partner, files):
        rounded = _round(value, [DTYPES[name] for name in way.partner_rounding])
        with np.errstate(all="ignore"):
            expected = weight + delta
            noise = (way.product.rank + 4) * _SINGLE * magnitude
            slack = noise + unit * (np.abs(delta) + noise)
            finite = np.isfinite(expected) & np.isfinite(slack)
            if np.sum(slack[finite] ** 2) > _MOST_SLACK**2 * np.sum(delta[finite] ** 2):
                return None
            slack += last * np.abs(expected)
            is_within = finite & (_round(expected - slack, target) <= rounded)
            is_within &= rounded <= _round(expected + slack, target)
            # An infinity or a NaN of the sum is exactly that in the result, and a finite number is none of them.
            equal = (rounded == expected) | (np.isnan(rounded) & np.isnan(expected))
        if not (is_within | (~finite & equal)).all():
            return False
    return True


def _round(values: Any, dtypes: Sequence[DType]) -> Any:
    """Return float64 values, rounded to each of the dtypes in turn."""
    import numpy as np

    from syncheck.differences import widen

    if not dtypes:
        return values
    return widen(dtypes[-1], round_values(values, dtypes)).astype(np.float64)


def _read_blocks(
    tensor: Tensor, base: Tensor, product: LowRank, partner: Tensor, files: Files
) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield blocks of the weight, of the product, of the sums of its absolute terms, and of another tensor."""
    from syncheck.differences import read_float64

    delta, magnitude = (_reread(tensor, "float64", _Product(product, flag)) for flag in (False, True))
    sources = (base, delta, magnitude, partner)
    for start, count in ranges([delta]):
        weight, added, terms, value = (read_float64(t, files, start, count, i) for i, t in enumerate(sources))
        yield weight, added, terms, value


def fit_factor(tensor: Tensor, partner: Tensor, files: Files) -> float | None:
    """Return the multiple of the adapter's product that another tensor contains; None if no multiple fits.

    The factor is computed by least squares, so it explains a difference, but does not prove a merge. None as well if
    rounding hides the adapter, and if an element is not finite.
    """
    data = find_adapted(tensor)
    if (
        not isinstance(data, Merged)
        or tensor.shape != partner.shape
        or not (is_readable(tensor) and is_readable(partner))
    ):
        return None
    import numpy as np

    weight = _reread(tensor, data.base.dtype, _Stored(data.base, data.files))
    unit = max(unit_roundoff(data.base.dtype), unit_roundoff(partner.dtype))
    sums = np.zeros(3)
    with np.errstate(all="ignore"):
        for base, delta, _, value in _read_blocks(tensor, weight, data.product, partner, files):
            sums += ((value - base) @ delta, delta @ delta, base @ base)
        factor = float(sums[0] / sums[1])
        noise = float(_SIGMAS * unit * np.sqrt(sums[2] / sums[1] / tensor.numel))
    # Not finite without a product, and if an element is not finite.
    if not math.isfinite(factor) or not noise <= 0.5 or abs(factor - 1) <= _SHARE:
        return None
    with np.errstate(all="ignore"):
        for base, delta, terms, value in _read_blocks(tensor, weight, data.product, partner, files):
            expected = base + factor * delta
            bound = unit * (2 * np.abs(factor * delta) + 1.01 * np.abs(expected)) + noise * np.abs(delta)
            bound += (data.product.rank + 4) * _SINGLE * abs(factor) * terms + 1e-38
            if not (np.abs(value - expected) <= bound).all():
                return None
    return factor


def unit_roundoff(dtype: str) -> float:
    """Return the unit roundoff of a dtype: half the distance between 1 and the next number."""
    bits = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}
    return 2.0 ** -bits.get(dtype, 2)


def fits_weight(base: Tensor, up: Tensor, down: Tensor, most: int, *, transposed: bool) -> bool:
    """Whether all tensors are numbers, and the product of the factors has the shape of the weight.

    most: limit of the elements of a factor, which is read as a whole. Factors of a convolution have its kernel in
    `down`, and dimensions of length 1 in `up`.
    """
    if not all(is_readable(tensor) for tensor in (base, up, down)) or max(up.numel, down.numel) > most:
        return False
    if len({len(tensor.shape) for tensor in (base, up, down)}) > 1 or len(base.shape) < 2 or not base.numel:
        return False
    if up.shape[1] != down.shape[0] or set(up.shape[2:]) - {1}:
        return False
    product: Sequence[int] = (up.shape[0], *down.shape[1:])
    if transposed:
        return len(base.shape) == 2 and base.shape == (product[1], product[0])
    return base.shape == product
