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
    is_instance,
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
    placements = tuple(_format_placement(placement) for placement in tensor.placements)
    return Sharding(
        mesh=sizes,
        ranks=ranks,
        placements=placements,
        shape=tuple(tensor.shape),
        names=names,
        coordinate=coordinate,
    )


def _describe_mesh(mesh: Any) -> Mesh:
    """Return sizes, ranks in C order, this rank's coordinate and the dimension names of a mesh."""
    description = _MESHES.get(mesh)
    if description is None:
        coordinate = mesh.get_coordinate()  # None on a rank outside the mesh
        ranks = mesh.mesh
        description = (
            tuple(ranks.shape),
            tuple(ranks.flatten().tolist()),
            tuple(coordinate or ()),
            tuple(mesh.mesh_dim_names or ()),
        )
        _MESHES[mesh] = description

    return description


def _format_placement(placement: Any) -> str:
    """Format a placement as in `snapshots.Sharding`."""
    if placement.is_replicate():
        return "R"

    if type(placement).__name__ == "_StridedShard":
        return f"_S({placement.dim}, {placement.split_factor})"

    if placement.is_shard():
        return f"S({placement.dim})"

    operation = getattr(placement, "reduce_op", "sum")
    return f"P({operation})"


class TensorBytes:
    """The bytes of a strided tensor or an array in C order, copied part by part when read.

    Copies are not cached: a tensor in another memory order, for example channels-last, is gathered again for each part.
    Tensors on a device are copied from the device part by part.

    source: the tensor or array; for a DTensor its local tensor.
    """

    __slots__ = ("_flat", "source")

    def __init__(self, source: Any) -> None:
        self.source = source
        self._flat: Any = None

    def __getitem__(self, part: slice) -> bytes:
        if not _is_c_order(self.source):
            return self._gather(part)

        if self._flat is None:
            self._flat = flat_bytes(self.source)

        return _to_bytes(self._flat[part])

    def _gather(self, part: slice) -> bytes:
        source = self.source
        size = source.itemsize
        start, stop, _ = part.indices(math.prod(source.shape) * size)
        # Whole elements, because a window may start or end inside an element.
        first, last = start // size, -(-stop // size)
        boxes = split_into_boxes(source.shape, first, last - first)
        with as_plain_tensors():
            row = b"".join([_to_bytes(flat_bytes(source[box])) for box in boxes])

        return row[start - first * size : stop - first * size]


class MemoryTensor(TensorLocation):
    """A tensor in memory, with the interface of a tensor in a file that `readers.pickles.tree` expects."""

    __slots__ = ("content",)
    content: TensorBytes | None

    def __init__(
        self,
        dtype: DType | None,
        shape: tuple[int, ...],
        content: TensorBytes | None,
        refused: Message | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        super().__init__(
            None,
            dtype,
            0,
            shape,
            contiguous_strides(shape),
            refused=refused,
            sharding=sharding,
        )
        object.__setattr__(self, "content", content)

    def refuse(self, reason: Message) -> MemoryTensor:
        """Return the tensor with a reason not to compare it."""
        # The first reason is about the tensor itself.
        if self.refused:
            return self

        return MemoryTensor(
            self.dtype,
            self.shape,
            content=None,
            refused=reason,
        )


def make_refused(reason: Message) -> MemoryTensor:
    """Return a tensor of which only the reason not to compare it is known."""
    return MemoryTensor(
        None,
        (),
        content=None,
        refused=reason,
    )


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor or a numpy array."""
    return is_torch(value) or is_instance(value, "numpy", "ndarray")


def describe_tensor(value: Any) -> MemoryTensor:
    """Return the bytes of a tensor or array, or the reason why they cannot be compared.

    For a DTensor, the bytes of the local tensor and its sharding.
    """
    if not is_torch(value):
        return _describe_array(value)

    torch: Any = sys.modules["torch"]
    if _is_plain_tensor(value, torch):  # the common case
        dtype = _get_dtype(value.dtype)
        if dtype is not None:
            return MemoryTensor(dtype, tuple(value.shape), TensorBytes(value))

    if type(value).__name__ == "ShardedTensor":
        return MemoryTensor(
            _get_dtype(value.dtype),
            tuple(value.shape),
            content=None,
            refused=Refusal.SHARDED_TENSOR(),
        )

    sharding = None
    if hasattr(value, "placements") and hasattr(value, "device_mesh"):
        sharding = get_sharding(value)
        with torch.no_grad():
            value = value.to_local()

    refused = _find_refusal(value, torch)
    if refused:
        shape: tuple[int, ...] = ()
        # Asking for the shape of such a tensor raises.
        if refused.code not in (Refusal.NESTED, Refusal.LAZY):
            shape = tuple(value.shape)
        return MemoryTensor(
            _get_dtype(value.dtype),
            shape,
            content=None,
            refused=refused,
            sharding=sharding,
        )

    return MemoryTensor(
        _get_dtype(value.dtype),
        tuple(value.shape),
        content=TensorBytes(value),
        refused=None,
        sharding=sharding,
    )


def _describe_array(array: Any) -> MemoryTensor:
    """Return the bytes of an array, or the reason why they cannot be compared."""
    # Arrays of objects and texts have no bytes of their own.
    dtype = DTYPES.get(array.dtype.name)
    if dtype is None:
        refused = Refusal.NUMPY_DTYPE(name=f"{array.dtype.str[1:]:.20}")
        return MemoryTensor(
            dtype,
            tuple(array.shape),
            content=None,
            refused=refused,
        )

    return MemoryTensor(dtype, tuple(array.shape), TensorBytes(array))


def _is_plain_tensor(value: Any, torch: Any) -> bool:
    """Whether a tensor is of torch's own classes, in one piece of memory, and its bytes can be read."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return False

    has_no_bytes = any((value.is_meta, value.is_quantized, value.is_nested))
    return not has_no_bytes and has_storage(value)


@cache
def _get_dtype(dtype: Any) -> DType | None:
    """Return the record of a torch dtype."""
    return DTYPES.get(str(dtype).removeprefix("torch."))


def holds_shard(value: Any) -> bool:
    """Whether this rank holds only a shard of a tensor."""
    if not hasattr(value, "placements") and type(value).__name__ != "ShardedTensor":
        return False

    description = describe_tensor(value)
    if description.refused is not None:
        return description.refused.code in SHARD_REFUSALS

    return description.sharding is not None and not is_whole(description.sharding)


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

    layout = str(value.layout)
    if value.layout != torch.strided:
        return Refusal.SPARSE() if "sparse" in layout else Refusal.LAYOUT(layout=layout)

    if not has_storage(value):
        return Refusal.FREED()

    if _get_dtype(value.dtype) is None:
        return Refusal.DTYPE(name=str(value.dtype).removeprefix("torch."))

    return None


def flat_bytes(source: Any) -> Any:
    """Return all bytes as one uint8 array or tensor, without a copy if the memory is in C order."""
    if not is_torch(source):
        return array_bytes(source)

    with as_plain_tensors():
        ordered = source if is_c_order(source) else copy_in_c_order(source)
        row = as_bytes(ordered)
        return row.numpy() if row.device.type == "cpu" else row


def _is_c_order(source: Any) -> bool:
    """Whether all bytes can be viewed as one row without a copy."""
    if is_torch(source):
        return is_c_order(source)

    return bool(source.flags.c_contiguous and source.dtype.isnative)


def _to_bytes(row: Any) -> bytes:
    """Return a uint8 row, possibly on a device, as bytes."""
    if is_torch(row):
        row = row.cpu().numpy()

    return bytes(memoryview(row))
