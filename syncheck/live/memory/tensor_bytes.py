"""One tensor in memory: where its bytes are, or why they cannot be compared.

Neither torch nor numpy is imported here. Who holds a tensor has loaded its library, so both are looked up among the
loaded modules, and a program without torch never pays for it.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from syncheck.comparison.replica_groups import is_whole
from syncheck.dtypes import DTYPES
from syncheck.kernel.pieces import boxes
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
from syncheck.readers.pickles.stand_ins import TensorPlace
from syncheck.snapshots import Sharding, in_c_order

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from syncheck.dtypes import DType
    from syncheck.messages import Message

    Mesh = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[str, ...]]

# All parameters of a model share a mesh or two; to list the ranks of one anew for each takes long.
_MESHES: MutableMapping[Any, Mesh] = WeakKeyDictionary()


def get_sharding(tensor: Any) -> Sharding:
    """Return how a DTensor is laid out. Whatever is no copy and no shard is taken for a part of a sum."""
    sizes, ranks, coordinate, names = _describe_mesh(tensor.device_mesh)
    placements = tuple(map(_format_placement, tensor.placements))
    return Sharding(sizes, ranks, placements, tuple(tensor.shape), names, coordinate)


def _describe_mesh(mesh: Any) -> Mesh:
    """Return sizes, ranks in C order, this rank's coordinate and the names of a mesh's dimensions."""
    found = _MESHES.get(mesh)
    if found is None:
        at = mesh.get_coordinate()  # None on a rank that is not in it
        ranks = mesh.mesh
        found = tuple(ranks.shape), tuple(ranks.flatten().tolist()), tuple(at or ()), tuple(mesh.mesh_dim_names or ())
        _MESHES[mesh] = found
    return found


def _format_placement(placement: Any) -> str:
    """Write a placement as `snapshots.Sharding` has it."""
    if placement.is_replicate():
        return "R"
    name = type(placement).__name__
    if name == "_StridedShard":
        return f"_S({placement.dim}, {placement.split_factor})"
    return f"S({placement.dim})" if placement.is_shard() else f"P({getattr(placement, 'reduce_op', 'sum')})"


class TensorBytes:
    """The bytes of a strided tensor or an array in C order, read a part at a time and copy_in_c_order only when read.

    Nothing is kept of what was copy_in_c_order: a tensor that lies otherwise, as all of a channels-last model do, is gathered
    anew for each part. Parts of a tensor on a device are copy_in_c_order from it one by one.
    source: the tensor or array itself; of a DTensor its local tensor.
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
        # Whole elements: of a window the ends may lie within one.
        first, last = start // size, -(-stop // size)
        with as_plain_tensors():
            row = b"".join(_to_bytes(flat_bytes(source[box])) for box in boxes(source.shape, first, last - first))
        return row[start - first * size : stop - first * size]


class MemoryTensor(TensorPlace):
    """A tensor in memory, in the shape in which `readers.pickles.tree` expects one of a file."""

    held: TensorBytes | None

    def __init__(
        self,
        dtype: DType | None,
        shape: tuple[int, ...],
        held: TensorBytes | None,
        refused: Message | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        # A live check makes some hundred of these every time.
        self.__dict__.update(
            storage=None, dtype=dtype, offset=0, shape=shape, strides=in_c_order(shape), refused=refused,
            sharding=sharding, held=held,
        )  # fmt: skip

    def refuse(self, reason: Message) -> MemoryTensor:
        """Return the same place with a reason not to compare it."""
        return self if self.refused else MemoryTensor(self.dtype, self.shape, None, reason)


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch or an array of numpy."""
    numpy = sys.modules.get("numpy")
    return is_torch(value) or (numpy is not None and isinstance(value, numpy.ndarray))


def describe_tensor(value: Any) -> MemoryTensor:
    """Say where the bytes of a tensor or array are, or why they cannot be compared. value: one of `is_tensor`.

    Of a DTensor it is the local tensor, with how it is laid over the mesh.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        dtype = DTYPES.get(value.dtype.name)
        refused = None if dtype else Refusal.NUMPY_DTYPE(name=f"{value.dtype.str[1:]:.20}")
        return MemoryTensor(dtype, tuple(value.shape), None if refused else TensorBytes(value), refused)
    kind = type(value)
    if (kind is torch.Tensor or kind is torch.nn.Parameter) and value.layout is torch.strided:  # as nearly all
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
    """Return what is known of a dtype of torch."""
    return DTYPES.get(str(dtype).removeprefix("torch."))


def holds_shard(value: Any) -> bool:
    """Whether this rank holds a part of a tensor only."""
    plain = not hasattr(value, "placements") and type(value).__name__ != "ShardedTensor"
    return not plain and is_shard(describe_tensor(value))


def is_shard(place: MemoryTensor) -> bool:
    """Whether a rank holds a part of the tensor only."""
    if place.refused is not None:
        return place.refused.code in SHARD_REFUSALS
    return place.sharding is not None and not is_whole(place.sharding)


def _find_refusal(value: Any, torch: Any) -> Message | None:
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
    return None if has_storage(value) else Refusal.FREED()


def flat_bytes(source: Any) -> Any:
    """Return all bytes as one row: an array or tensor of uint8, without a copy where C order allows it."""
    if not is_torch(source):
        return array_bytes(source)
    with as_plain_tensors():
        row = as_bytes(source if is_c_order(source) else copy_in_c_order(source))
        return row.numpy() if row.device.type == "cpu" else row


def _is_c_order(source: Any) -> bool:
    """Whether all bytes can be seen as one row without a copy."""
    if is_torch(source):
        return is_c_order(source)
    return bool(source.flags.c_contiguous and source.dtype.isnative)


def _to_bytes(row: Any) -> bytes:
    """Return a row of uint8, which may be on a device, as bytes."""
    return bytes(memoryview(row.cpu().numpy() if is_torch(row) else row))
