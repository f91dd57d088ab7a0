"""One tensor in memory: where its bytes are, or why they cannot be compared.

Neither torch nor numpy is imported here. Who holds a tensor has loaded its library, so both are looked up among the
loaded modules, and a program without torch never pays for it.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from syncheck.comparison.replica_groups import is_whole
from syncheck.dtypes import DTYPES
from syncheck.kernel.pieces import split_into_boxes
from syncheck.live.digest.parts import (
    as_bytes,
    as_plain_tensors,
    copied,
    is_torch,
    lies_in_order,
    row_of,
    storage_holds,
)
from syncheck.live.memory.sharded import sharding_of
from syncheck.messages import SHARD_REFUSALS, Refusal
from syncheck.readers.pickles.stand_ins import TensorLocation
from syncheck.snapshots import contiguous_strides

if TYPE_CHECKING:
    from syncheck.dtypes import DType
    from syncheck.messages import Message
    from syncheck.snapshots import Sharding


class Held:
    """The bytes of a strided tensor or an array in C order, read a part at a time and copied only when read.

    Nothing is kept of what was copied: a tensor that lies otherwise, as all of a channels-last model do, is gathered
    anew for each part. Parts of a tensor on a device are copied from it one by one.
    source: the tensor or array itself; of a DTensor its local tensor.
    """

    __slots__ = ("_flat", "source")

    def __init__(self, source: Any) -> None:
        self.source = source
        self._flat: Any = None

    def __getitem__(self, part: slice) -> bytes:
        if self._flat is None and _lies_in_order(self.source):
            self._flat = flat_bytes(self.source)
        return self._gathered(part) if self._flat is None else _bytes(self._flat[part])

    def _gathered(self, part: slice) -> bytes:
        source = self.source
        size = source.itemsize
        start, stop, _ = part.indices(math.prod(source.shape) * size)
        # Whole elements: of a window the ends may lie within one.
        first, last = start // size, -(-stop // size)
        with as_plain_tensors():
            row = b"".join(
                _bytes(flat_bytes(source[box])) for box in split_into_boxes(source.shape, first, last - first)
            )
        return row[start - first * size : stop - first * size]


class HeldPlace(TensorLocation):
    """A tensor in memory, in the shape in which `readers.pickles.tree` expects one of a file."""

    held: Held | None

    def __init__(
        self,
        dtype: DType | None,
        shape: tuple[int, ...],
        held: Held | None,
        refused: Message | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        # A live check makes some hundred of these every time.
        self.__dict__.update(
            storage=None, dtype=dtype, offset=0, shape=shape, strides=contiguous_strides(shape), refused=refused,
            sharding=sharding, held=held,
        )  # fmt: skip

    def refuse(self, reason: Message) -> HeldPlace:
        """Return the same place with a reason not to compare it."""
        return self if self.refused else HeldPlace(self.dtype, self.shape, None, reason)


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch or an array of numpy."""
    numpy = sys.modules.get("numpy")
    return is_torch(value) or (numpy is not None and isinstance(value, numpy.ndarray))


def place_of(value: Any) -> HeldPlace:
    """Say where the bytes of a tensor or array are, or why they cannot be compared. value: one of `is_tensor`.

    Of a DTensor it is the local tensor, with how it is laid over the mesh.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        dtype = DTYPES.get(value.dtype.name)
        refused = None if dtype else Refusal.NUMPY_DTYPE(name=f"{value.dtype.str[1:]:.20}")
        return HeldPlace(dtype, tuple(value.shape), None if refused else Held(value), refused)
    kind = type(value)
    if (kind is torch.Tensor or kind is torch.nn.Parameter) and value.layout is torch.strided:  # as nearly all
        dtype = _dtype_of(value.dtype)
        has_bytes = not (value.is_meta or value.is_quantized or value.is_nested) and storage_holds(value)
        if dtype is not None and has_bytes:
            return HeldPlace(dtype, tuple(value.shape), Held(value))
    refused = Refusal.SHARDED_TENSOR() if type(value).__name__ == "ShardedTensor" else None
    sharding = None
    if not refused and hasattr(value, "placements") and hasattr(value, "device_mesh"):
        sharding = sharding_of(value)
        with torch.no_grad():
            value = value.to_local()
    refused = refused or _refused(value, torch)
    dtype = _dtype_of(value.dtype)
    if dtype is None and not refused:
        refused = Refusal.DTYPE(name=str(value.dtype).removeprefix("torch."))
    shape = () if refused and refused.code in (Refusal.NESTED, Refusal.LAZY) else tuple(value.shape)
    return HeldPlace(dtype, shape, None if refused else Held(value), refused, sharding)


@cache
def _dtype_of(dtype: Any) -> DType | None:
    """Return what is known of a dtype of torch."""
    return DTYPES.get(str(dtype).removeprefix("torch."))


def holds_shard(value: Any) -> bool:
    """Whether this rank holds a part of a tensor only."""
    plain = not hasattr(value, "placements") and type(value).__name__ != "ShardedTensor"
    return not plain and is_shard(place_of(value))


def is_shard(place: HeldPlace) -> bool:
    """Whether a rank holds a part of the tensor only."""
    if place.refused is not None:
        return place.refused.code in SHARD_REFUSALS
    return place.sharding is not None and not is_whole(place.sharding)


def _refused(value: Any, torch: Any) -> Message | None:
    """Return why the bytes of a tensor are unavailable."""
    if value.is_nested:
        return Refusal.NESTED()
    if hasattr(value, "cls_to_become"):  # torch.nn.UninitializedParameter and its buffer
        return Refusal.LAZY()
    if value.is_quantized:
        return Refusal.QUANTIZED()
    # What has one of its own wraps other tensors, and has no bytes itself.
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return Refusal.WRAPPER()
    if value.device.type == "meta":
        return Refusal.META()
    if value.layout != torch.strided:
        return Refusal.SPARSE() if "sparse" in str(value.layout) else Refusal.LAYOUT(layout=str(value.layout))
    return None if storage_holds(value) else Refusal.FREED()


def flat_bytes(source: Any) -> Any:
    """Return all bytes as one row: an array or tensor of uint8, without a copy where C order allows it."""
    if not is_torch(source):
        return row_of(source)
    with as_plain_tensors():
        row = as_bytes(source if lies_in_order(source) else copied(source))
        return row.numpy() if row.device.type == "cpu" else row


def _lies_in_order(source: Any) -> bool:
    """Whether all bytes can be seen as one row without a copy."""
    if is_torch(source):
        return lies_in_order(source)
    return bool(source.flags.c_contiguous and source.dtype.isnative)


def _bytes(row: Any) -> bytes:
    """Return a row of uint8, which may be on a device, as bytes."""
    return bytes(memoryview(row.cpu().numpy() if is_torch(row) else row))
