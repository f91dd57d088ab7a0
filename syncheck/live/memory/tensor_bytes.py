"""One tensor in memory: its bytes, or why they cannot be compared.

Imports neither torch nor numpy but looks them up among the loaded modules: if a caller has a tensor, its library is
loaded, and programs without torch do not pay for its import.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from syncheck.layout.dtensors import is_whole
from syncheck.live.digest.parts import (
    array_bytes,
    as_bytes,
    as_plain_tensors,
    copy_in_c_order,
    has_storage,
    is_c_order,
    is_torch,
)
from syncheck.messages import SHARD_REFUSALS, Refusal
from syncheck.readers.pickles.stand_ins import TensorLocation
from syncheck.snapshots import Sharding, contiguous_strides
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.pieces import split_into_boxes

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from syncheck.messages import Message
    from syncheck.tensors.dtypes import DType

    Mesh = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[str, ...]]

# Cached, because listing the ranks of a mesh takes long, and all parameters of a model share a mesh or two.
_MESHES: MutableMapping[Any, Mesh] = WeakKeyDictionary()


def get_sharding(tensor: Any) -> Sharding:
    """Return the sharding of a DTensor. A placement that is neither replicated nor a shard counts as a partial sum."""
    sizes, ranks, coordinate, names = _describe_mesh(tensor.device_mesh)
    placements = tuple(map(_format_placement, tensor.placements))
    return Sharding(sizes, ranks, placements, tuple(tensor.shape), names, coordinate)


def _describe_mesh(mesh: Any) -> Mesh:
    """Return sizes, ranks in C order, this rank's coordinate and the dimension names of a mesh."""
    description = _MESHES.get(mesh)
    if description is None:
        at = mesh.get_coordinate()  # None on a rank outside the mesh
        ranks = mesh.mesh
        description = (
            tuple(ranks.shape),
            tuple(ranks.flatten().tolist()),
            tuple(at or ()),
            tuple(mesh.mesh_dim_names or ()),
        )
        _MESHES[mesh] = description
    return description


def _format_placement(placement: Any) -> str:
    """Format a placement as in `snapshots.Sharding`."""
    if placement.is_replicate():
        return "R"
    name = type(placement).__name__
    if name == "_StridedShard":
        return f"_S({placement.dim}, {placement.split_factor})"
    return f"S({placement.dim})" if placement.is_shard() else f"P({getattr(placement, 'reduce_op', 'sum')})"


class TensorBytes:
    """The bytes of a strided tensor or an array in C order, copied part by part when read.

    Copies are not cached: a tensor in another memory order, for example channels-last, is gathered again for each part.
    Tensors on a device are copied from the device part by part. source: the tensor or array; for a DTensor its local
    tensor.
    """

    __slots__ = ("_flat", "source")

    def __init__(self, source: Any) -> None:
        self.source = source
        self._flat: Any = None

    def __getitem__(self, part: slice) -> bytes:
        if self._flat is None and _is_c_order(self.source):
            self._flat = flat_bytes(self.source)
        return self._gather(part) if self._flat is None else _to_bytes(self._flat[part])

    def _gather(self, part: slice) -> bytes:
        source = self.source
        size = source.itemsize
        start, stop, _ = part.indices(math.prod(source.shape) * size)
        # Whole elements, because a window may start or end inside an element.
        first, last = start // size, -(-stop // size)
        with as_plain_tensors():
            row = b"".join(
                _to_bytes(flat_bytes(source[box])) for box in split_into_boxes(source.shape, first, last - first)
            )
        return row[start - first * size : stop - first * size]


class MemoryTensor(TensorLocation):
    """A tensor in memory, with the interface of a tensor in a file that `readers.pickles.tree` expects."""

    content: TensorBytes | None

    def __init__(
        self,
        dtype: DType | None,
        shape: tuple[int, ...],
        content: TensorBytes | None,
        refused: Message | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        # Without the constructor of the base class: a live check creates hundreds of instances.
        self.__dict__.update(
            storage=None, dtype=dtype, offset=0, shape=shape, strides=contiguous_strides(shape), refused=refused,
            sharding=sharding, content=content,
        )  # fmt: skip

    def refuse(self, reason: Message) -> MemoryTensor:
        """Return the tensor with a reason not to compare it."""
        return self if self.refused else MemoryTensor(self.dtype, self.shape, None, reason)


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor or a numpy array."""
    numpy = sys.modules.get("numpy")
    return is_torch(value) or (numpy is not None and isinstance(value, numpy.ndarray))


def describe_tensor(value: Any) -> MemoryTensor:
    """Return the bytes of a tensor or array, or the reason why they cannot be compared.

    For a DTensor, the bytes of the local tensor and its sharding.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        dtype = DTYPES.get(value.dtype.name)
        refused = None if dtype else Refusal.NUMPY_DTYPE(name=f"{value.dtype.str[1:]:.20}")
        return MemoryTensor(dtype, tuple(value.shape), None if refused else TensorBytes(value), refused)
    kind = type(value)
    if (kind is torch.Tensor or kind is torch.nn.Parameter) and value.layout is torch.strided:  # the common case
        dtype = _get_dtype(value.dtype)
        has_bytes = not (value.is_meta or value.is_quantized or value.is_nested) and has_storage(value)
        if dtype is not None and has_bytes:
            return MemoryTensor(dtype, tuple(value.shape), TensorBytes(value))
    refused = Refusal.SHARDED_TENSOR() if type(value).__name__ == "ShardedTensor" else None
    sharding = None
    if not refused and hasattr(value, "placements") and hasattr(value, "device_mesh"):
        sharding = get_sharding(value)
        with torch.no_grad():
            value = value.to_local()
    refused = refused or _find_refusal(value, torch)
    dtype = _get_dtype(value.dtype)
    if dtype is None and not refused:
        refused = Refusal.DTYPE(name=str(value.dtype).removeprefix("torch."))
    shape = () if refused and refused.code in (Refusal.NESTED, Refusal.LAZY) else tuple(value.shape)
    return MemoryTensor(dtype, shape, None if refused else TensorBytes(value), refused, sharding)


@cache
def _get_dtype(dtype: Any) -> DType | None:
    """Return the record of a torch dtype."""
    return DTYPES.get(str(dtype).removeprefix("torch."))


def holds_shard(value: Any) -> bool:
    """Whether this rank holds only a shard of a tensor."""
    if not hasattr(value, "placements") and type(value).__name__ != "ShardedTensor":
        return False
    place = describe_tensor(value)
    if place.refused is not None:
        return place.refused.code in SHARD_REFUSALS
    return place.sharding is not None and not is_whole(place.sharding)


def _find_refusal(value: Any, torch: Any) -> Message | None:
    """Return why the bytes of a tensor are unavailable."""
    if value.is_nested:
        return Refusal.NESTED()
    if hasattr(value, "cls_to_become"):  # torch.nn.UninitializedParameter and UninitializedBuffer
        return Refusal.LAZY()
    if value.is_quantized:
        return Refusal.QUANTIZED()
    # A subclass with its own __torch_dispatch__ wraps other tensors and has no bytes itself.
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return Refusal.WRAPPER()
    if value.device.type == "meta":
        return Refusal.META()
    if value.layout != torch.strided:
        return Refusal.SPARSE() if "sparse" in str(value.layout) else Refusal.LAYOUT(layout=str(value.layout))
    return None if has_storage(value) else Refusal.FREED()


def flat_bytes(source: Any) -> Any:
    """Return all bytes as one uint8 array or tensor, without a copy if the memory is in C order."""
    if not is_torch(source):
        return array_bytes(source)
    with as_plain_tensors():
        row = as_bytes(source if is_c_order(source) else copy_in_c_order(source))
        return row.numpy() if row.device.type == "cpu" else row


def _is_c_order(source: Any) -> bool:
    """Whether all bytes can be viewed as one row without a copy."""
    if is_torch(source):
        return is_c_order(source)
    return bool(source.flags.c_contiguous and source.dtype.isnative)


def _to_bytes(row: Any) -> bytes:
    """Return a uint8 row, possibly on a device, as bytes."""
    return bytes(memoryview(row.cpu().numpy() if is_torch(row) else row))
