"""Tensors of a base model with an adapter, computed while they are read, and the proof that a tensor is their merge.

A merged weight is W + scale * B @ A (peft/tuners/lora/layer.py). Weights are computed block by block.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from threading import get_ident
from typing import TYPE_CHECKING, Any

from syncheck.conversion.casts import convert, round_values
from syncheck.conversion.recognition import are_readable
from syncheck.findings import Relation, RelationKind
from syncheck.layout import views
from syncheck.snapshots import Shard, Tensor, contiguous_strides
from syncheck.tensors.blocks import ranges
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncheck.conversion.model_pairs import Models
    from syncheck.snapshots import Sliced
    from syncheck.tensors.blocks import Files
    from syncheck.tensors.dtypes import DType

# A factor of the product is fitted within this share, and so many standard deviations of rounding.
_SHARE, _SIGMAS = 0.02, 6.0
# The rounding of a product may be this share of the product at most, by root mean square over a block. Otherwise the
# bound would accept weights without the product.
_MOST_SLACK = 0.25
# Unit roundoff of float32, in which PEFT computes products, and the distance of numbers of float64.
_SINGLE, _DOUBLE = 2.0**-24, 2.0**-52
# Bits of the significand by dtype; the fewest bits for a dtype of another kind.
_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}
_FEWEST_BITS = 2
# Elements that a computed weight reads at once.
_BLOCK = 1 << 18


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class _Stored:
    """The bytes of a tensor in C order."""

    tensor: Tensor
    files: Files

    def __getitem__(self, part: slice) -> bytes:
        return _read_bytes(self.tensor, self.files, part)


@dataclass(frozen=True, slots=True)
class _Product:
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
    return Tensor(name, source.dtype, data.shape, strides, source.path, 0, data=data)


def find_adapted(tensor: Tensor) -> Merged | Replaced | None:
    """Return the data of a tensor with an adapter, or of a view of it; None for other tensors."""
    sources = {id(shard.tensor.data): shard.tensor.data for shard in views.list_shards(tensor)}
    # Shards of different tensors are not a view of one of them.
    if len(sources) != 1:
        return None
    (data,) = sources.values()
    if isinstance(data, (Merged, Replaced)):
        return data
    return None


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
    return _reread(tensor, base.dtype, _Stored(base, data.files))


def _reread(view: Tensor, dtype: str, data: Sliced) -> Tensor:
    """Return the same view of other data, whose elements have this dtype."""
    old, new = DTYPES[view.dtype].size, DTYPES[dtype].size
    if not view.shards:
        return replace(view, dtype=dtype, data=data, offset=view.offset // old * new)
    shards = [Shard(_reread(shard.tensor, dtype, data), shard.start) for shard in view.shards]
    return replace(view, dtype=dtype, shards=tuple(shards))


def is_merge(tensor: Tensor, partner: Tensor, dtype: str | None, files: Files, *, to_partner: bool) -> bool | None:
    """Return whether a tensor is a possible result of a merge; None if rounding hides the product.

    tensor: of `Merged` data.
    partner: the tensor of the other model.
    dtype: of one accepted conversion; None without a conversion.
    to_partner: whether the partner is the converted copy; else it is the source.
    """
    data = find_adapted(tensor)
    if not isinstance(data, Merged) or not are_comparable(tensor, partner):
        return False
    if dtype is None and tensor.dtype != partner.dtype:
        return False
    copy = partner if to_partner else tensor
    if dtype is not None and unit_roundoff(copy.dtype) > unit_roundoff(dtype):
        # The dtype of the copy would round once more than the user accepts.
        return False
    computations = _list_computations(tensor, partner, data, dtype, files, to_partner=to_partner)
    results = set()
    for computation in computations:
        result = _agrees(computation, partner, files)
        if result:
            return True
        results.add(result)
    # One computation whose bounds are too wide leaves the merge possible.
    return None if None in results else False


@dataclass(frozen=True, slots=True)
class _Computation:
    """One of the ways to compute a merged tensor."""

    tensor: Tensor
    """A view of the merged weight."""
    base: Tensor
    """The same view of the weight without the adapter, after any conversion."""
    product: LowRank
    """The product of the factors, after any conversion of them."""
    rounding: tuple[str, ...]
    """The dtypes of the sum, in turn."""
    partner_rounding: tuple[str, ...] = ()
    """The dtypes to which the other tensor is converted before the comparison."""


def _list_computations(
    tensor: Tensor, partner: Tensor, data: Merged, dtype: str | None, files: Files, *, to_partner: bool
) -> list[_Computation]:
    """Return the ways to compute a merged tensor. Parameters are those of `is_merge`, and the data of the tensor."""
    bases = [_view_weight(tensor, data)]
    products = [data.product]
    rounding: tuple[str, ...] = (tensor.dtype,)
    partner_rounding: tuple[str, ...] = ()
    if dtype is not None and to_partner:
        rounding = (dtype, partner.dtype)
        # Loaded in the other dtype, and then merged.
        bases.append(convert(bases[0], (dtype,), files))
    elif dtype is not None:
        partner_rounding = (dtype, tensor.dtype)
    narrow = rounding[0]
    if unit_roundoff(narrow) > unit_roundoff(data.product.up.dtype):
        # The adapter was loaded in this dtype, too.
        products.append(data.product.convert(narrow))
    computations = []
    for product, base in itertools.product(products, bases):
        computations.append(_Computation(tensor, base, product, rounding, partner_rounding))
    return computations


def _view_weight(tensor: Tensor, data: Merged) -> Tensor:
    """Return the same view of the weight without the adapter."""
    return _reread(tensor, data.base.dtype, _Stored(data.base, data.files))


def _agrees(computation: _Computation, partner: Tensor, files: Files) -> bool | None:
    """Return whether all elements are within the bounds of a computation; None if the bounds are too wide.

    Rounding keeps the order of numbers. So if the sum lies between two bounds, the rounded sum lies between the rounded
    bounds.
    """
    import numpy as np

    product = computation.product
    target = [DTYPES[name] for name in computation.rounding]
    partner_target = [DTYPES[name] for name in computation.partner_rounding]
    # A sum may be rounded to float32 before it is rounded to a smaller dtype.
    last = _SINGLE if target[-1].size < 4 else _DOUBLE
    # PEFT rounds a product and its multiple to the dtype of the adapter, and the result to the dtype of the weight.
    weight_unit = max(unit_roundoff(computation.base.dtype), unit_roundoff(computation.rounding[0]))
    unit = (1 + unit_roundoff(product.up.dtype)) ** 2 * (1 + weight_unit) - 1
    blocks = _read_blocks(computation.tensor, computation.base, product, partner, files)
    for weight, delta, magnitude, value in blocks:
        rounded = _round(value, partner_target)
        with np.errstate(all="ignore"):
            expected = weight + delta
            noise = (product.rank + 4) * _SINGLE * magnitude
            slack = noise + unit * (np.abs(delta) + noise)
            finite = np.isfinite(expected) & np.isfinite(slack)
            total_slack, total_delta = np.sum(slack[finite] ** 2), np.sum(delta[finite] ** 2)
            if total_slack > _MOST_SLACK**2 * total_delta:
                return None
            slack += last * np.abs(expected)
            lower, upper = _round(expected - slack, target), _round(expected + slack, target)
            # A number beyond the range of the dtype became infinite, which is more than rounding.
            is_within = finite & np.isfinite(rounded) & (lower <= rounded) & (rounded <= upper)
            # An infinity or a NaN of the sum is exactly that in the result, and a finite number is none of them.
            equal = (rounded == expected) | (np.isnan(rounded) & np.isnan(expected))
            accepted = is_within | (~finite & equal)
        if not accepted.all():
            return False
    return True


def _round(values: Any, dtypes: Sequence[DType]) -> Any:
    """Return float64 values, rounded to each of the dtypes in turn."""
    import numpy as np

    from syncheck.tensors.differences import widen

    if not dtypes:
        return values
    return widen(dtypes[-1], round_values(values, dtypes)).astype(np.float64)


def _read_blocks(
    tensor: Tensor, base: Tensor, product: LowRank, partner: Tensor, files: Files
) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield blocks of the weight, of the product, of the sums of its absolute terms, and of another tensor."""
    from syncheck.tensors.differences import read_float64

    delta = _reread(tensor, "float64", _Product(product, magnitude=False))
    magnitude = _reread(tensor, "float64", _Product(product, magnitude=True))
    sources = (base, delta, magnitude, partner)
    # The products are float64, so blocks of their size fit into memory for all tensors.
    for start, count in ranges([delta]):
        weight, added, terms, value = (read_float64(t, files, start, count, i) for i, t in enumerate(sources))
        yield weight, added, terms, value


def relate_merge(name: str, models: Models) -> dict[str, Relation]:
    """Find another multiple of the product of the adapter of A."""
    factor = fit_factor(models.a[name], models.b[name], models.files)
    if factor is None:
        return {}
    return {name: Relation(RelationKind.ADAPTER, {"factor": factor})}


def fit_factor(tensor: Tensor, partner: Tensor, files: Files) -> float | None:
    """Return the multiple of the adapter's product that another tensor contains; None if no multiple fits.

    The factor is computed by least squares, so it explains a difference, but does not prove a merge. None as well if
    rounding hides the adapter, and if an element is not finite.
    """
    data = find_adapted(tensor)
    if not isinstance(data, Merged) or not are_comparable(tensor, partner):
        return None
    weight = _view_weight(tensor, data)
    unit = max(unit_roundoff(data.base.dtype), unit_roundoff(partner.dtype))
    factor, noise = _fit_least_squares(tensor, weight, data.product, partner, unit, files)
    is_precise = math.isfinite(factor) and noise <= 0.5
    # A factor of about 1 is the adapter as it is, which explains nothing.
    if not is_precise or abs(factor - 1) <= _SHARE:
        return None
    import numpy as np

    smallest = 1e-38
    for base, delta, terms, value in _read_blocks(tensor, weight, data.product, partner, files):
        with np.errstate(all="ignore"):
            multiple = factor * delta
            expected = base + multiple
            bound = unit * (2 * np.abs(multiple) + 1.01 * np.abs(expected)) + noise * np.abs(delta)
            bound += (data.product.rank + 4) * _SINGLE * abs(factor) * terms + smallest
            fits = np.abs(value - expected) <= bound
        if not fits.all():
            return None
    return factor


def _fit_least_squares(
    tensor: Tensor, weight: Tensor, product: LowRank, partner: Tensor, unit: float, files: Files
) -> tuple[float, float]:
    """Return the factor of a product in another tensor, and the uncertainty of the factor by rounding.

    Both are not finite without a product. The factor is not finite if an element is not finite.

    tensor: of `Merged` data.
    weight: the same view of the weight without the adapter.
    unit: the unit roundoff of the weights.
    """
    import numpy as np

    sums = np.zeros(3)
    with np.errstate(all="ignore"):
        for base, delta, _, value in _read_blocks(tensor, weight, product, partner, files):
            sums += ((value - base) @ delta, delta @ delta, base @ base)
        factor = float(sums[0] / sums[1])
        noise = float(_SIGMAS * unit * np.sqrt(sums[2] / sums[1] / tensor.numel))
    return factor, noise


def unit_roundoff(dtype: str) -> float:
    """Return the unit roundoff of a dtype: half the distance between 1 and the next number."""
    return 2.0 ** -_BITS.get(dtype, _FEWEST_BITS)


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
    return up.shape == expected_up and base.shape == product
