"""Stand-ins for the functions with which torch.save writes tensors and plain containers, by their names in the pickle.

Unreadable tensors are counted, with a reason and the known properties.

Formats: torch/_utils.py and torch/_tensor.py of torch 2.6 to 2.15.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from syncheck.dtypes import BY_STORAGE, DTYPES, NOT_READ
from syncheck.errors import brief
from syncheck.messages import Refusal
from syncheck.readers.pickles.stand_ins import (
    Complex,
    Compound,
    DTypeName,
    Inert,
    Ordered,
    StandIn,
    Storage,
    StorageType,
    TensorLocation,
    TypeName,
    check_sizes,
    make_frozenset,
    make_set,
    refused_tensor,
)
from syncheck.snapshots import MOST_ELEMENTS

if TYPE_CHECKING:
    from syncheck.dtypes import DType
    from syncheck.messages import Message


# Names of the encodings in which pickles of protocol 2 write bytes.
_ENCODINGS = ("latin1", "latin-1", "latin_1", "iso-8859-1", "utf-8", "utf8", "ascii")


def _tensor_in_storage(
    storage: Any, offset: Any, shape: Any, strides: Any, dtype: DType | None, bits: Any
) -> TensorLocation:
    if not isinstance(storage, Storage) or type(offset) is not int or not 0 <= offset <= MOST_ELEMENTS:
        raise pickle.UnpicklingError("a tensor without a storage, or with an offset out of range")
    shape, strides = check_sizes(shape), check_sizes(strides)
    if len(shape) != len(strides):
        raise pickle.UnpicklingError(f"{len(shape)} sizes but {len(strides)} strides")
    if storage.size != storage.numel:
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if dtype is not storage.dtype or (0 not in shape and offset + last >= storage.size):
            raise pickle.UnpicklingError(f"a tensor beyond the {storage.size} elements of its view of a storage")
        offset += storage.start
    lazy = ",".join(name for name in ("conj", "neg") if bits.get(name)) if isinstance(bits, dict) else ""
    return TensorLocation(storage, dtype, offset, shape, strides, lazy)


def _rebuild_tensor_v2(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _grad: Any = None,
    _hooks: Any = None,
    bits: Any = None,
) -> TensorLocation:
    return _tensor_in_storage(storage, offset, shape, strides, getattr(storage, "dtype", None), bits)


def _rebuild_tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, bits: Any = None
) -> TensorLocation:
    if not isinstance(dtype, DTypeName):
        return refused_tensor(Refusal.UNKNOWN_DTYPE(), shape)
    if dtype.dtype is None:
        return refused_tensor(Refusal.DTYPE(name=dtype.name), shape)
    return _tensor_in_storage(storage, offset, shape, strides, dtype.dtype, bits)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_with_state(data: Any, _grad: Any = None, _hooks: Any = None, state: Any = None) -> Any:
    return Compound.wrap(data, state) if state and isinstance(data, TensorLocation) else data


def _make_ordered(_factory: Any = None, *items: Any) -> Ordered:
    """Stand in for defaultdict."""
    return Ordered(*items)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Stand in for _codecs.encode, with which protocol 2 writes bytes."""
    # Other encodings, like zlib, could expand a few bytes without bound.
    if not isinstance(text, str) or not isinstance(encoding, str) or encoding.lower() not in _ENCODINGS:
        raise pickle.UnpicklingError("bytes in an unknown encoding")
    return text.encode(encoding)


def _make_bytes(*given: Any) -> bytes:
    """Stand in for bytes(), with which protocol 2 writes empty bytes; bytes(10**12) would allocate 1 TB."""
    if given:
        raise pickle.UnpicklingError("bytes() with arguments")
    return b""


def _reconstructor(kind: Any, _base: Any = None, state: Any = None) -> Any:
    """Stand in for copyreg._reconstructor, with which protocols 0 and 1 write plain objects.

    state: the content, if the class derives from a plain class such as dict.
    """
    if not isinstance(kind, type):
        return state
    if issubclass(kind, Inert):
        return kind(state)
    return kind(state) if issubclass(kind, Ordered) and isinstance(state, dict) else state


def _refuse(reason: Message) -> StandIn:
    def refuse(*given: Any) -> TensorLocation:
        return refused_tensor(reason, inner={str(i): x for i, x in enumerate(given) if isinstance(x, TensorLocation)})

    return StandIn(refuse)


def _refuse_sparse(_layout: Any, parts: Any) -> TensorLocation:
    """Stand in for a sparse tensor of indices, values and size; compressed layouts have two index tensors."""
    listed = list(parts) if isinstance(parts, (tuple, list)) else []
    at = next((i for i, part in enumerate(listed) if not isinstance(part, TensorLocation)), 0)
    values = listed[at - 1] if at else None
    names = ("indices", "values") if at == 2 else ("compressed_indices", "plain_indices", "values")
    inner = dict(zip(names, listed[:at], strict=False))
    return refused_tensor(Refusal.SPARSE(), listed[at] if at else (), getattr(values, "dtype", None), inner)


def _refuse_quantized(
    storage: Any, _offset: Any, shape: Any, _strides: Any = None, scheme: Any = None, *_: Any
) -> TensorLocation:
    return refused_tensor(Refusal.QUANTIZED(), shape, inner={"storage": storage, "quantizer": scheme})


def _refuse_meta(dtype: Any, shape: Any, *_: Any) -> TensorLocation:
    known = dtype.dtype if isinstance(dtype, DTypeName) else None
    return refused_tensor(Refusal.META(), shape, known)


def _describe(*parts: Any) -> str:
    """Return a description as torch prints it: torch.device('cuda', 1) is cuda:1."""
    if not all(isinstance(part, (str, int)) for part in parts):
        raise pickle.UnpicklingError(f"a device or layout of {brief(parts)}")
    return ":".join(brief(part) if isinstance(part, int) else part for part in parts)


REBUILT: dict[str, Any] = {
    "collections.OrderedDict": Ordered,
    "collections.defaultdict": StandIn(_make_ordered),
    "builtins.set": StandIn(make_set),
    "builtins.frozenset": StandIn(make_frozenset),
    "builtins.complex": StandIn(Complex),
    "builtins.bytes": StandIn(_make_bytes),
    "_codecs.encode": StandIn(_encode),
    "copyreg._reconstructor": StandIn(_reconstructor),
    "torch.Size": StandIn(check_sizes),
    "torch._utils._rebuild_tensor": StandIn(_rebuild_tensor_v2),
    "torch._utils._rebuild_tensor_v2": StandIn(_rebuild_tensor_v2),
    "torch._utils._rebuild_tensor_v3": StandIn(_rebuild_tensor_v3),
    "torch._utils._rebuild_parameter": StandIn(_rebuild_parameter),
    "torch._utils._rebuild_parameter_with_state": StandIn(_rebuild_with_state),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": StandIn(_rebuild_parameter),
    "torch.storage.UntypedStorage": StorageType(None),
    "torch.UntypedStorage": StorageType(None),
    "torch.QInt32Storage": StorageType(None, 4),
    **{f"torch.{name}Storage": StorageType(None) for name in ("QInt8", "QUInt8", "QUInt4x2", "QUInt2x4")},
    **{f"torch.{name}": StorageType(row, row.size) for name, row in BY_STORAGE.items()},
    **{f"torch.{name}": DTypeName(name) for name in (*DTYPES, *NOT_READ)},
    **{f"torch.{name}": TypeName(name) for name in ("Tensor", "nn.parameter.Parameter", "nn.parameter.Buffer")},
    **{f"torch.per_{scheme}": f"torch.per_{scheme}" for scheme in ("tensor_affine", "channel_affine")},
    "torch.device": StandIn(_describe),
    "torch.serialization._get_layout": StandIn(_describe),
    "torch._utils._rebuild_wrapper_subclass": _refuse(Refusal.WRAPPER()),
    "torch._utils._rebuild_qtensor": StandIn(_refuse_quantized),
    "torch._utils._rebuild_sparse_tensor": StandIn(_refuse_sparse),
    "torch._utils._rebuild_sparse_csr_tensor": StandIn(_refuse_sparse),
    "torch._utils._rebuild_nested_tensor": _refuse(Refusal.NESTED()),
    "torch._utils._rebuild_meta_tensor_no_storage": StandIn(_refuse_meta),
    "torch._utils._rebuild_device_tensor_from_numpy": _refuse(Refusal.AS_NUMPY()),
}
