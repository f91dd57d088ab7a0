"""Stand-ins for the functions with which torch and numpy write tensors, arrays and plain containers, by name.

Unreadable tensors are counted, with a reason and the known properties.

Formats: torch/_utils.py and torch/_tensor.py of torch 2.6 to 2.15; numpy/_core/src/multiarray/methods.c
(array_reduce, array_setstate), scalartypes.c.src and descriptor.c of numpy 1.26 to 2.4, whose bytes are in the pickle.
`numpy.core` became `numpy._core` in numpy 2.
"""

from __future__ import annotations

import math
import pickle
import struct
from typing import TYPE_CHECKING, Any

from syncheck.messages import Refusal
from syncheck.readers.pickles.limits import check_nesting
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
    tensor_in_parts,
)
from syncheck.snapshots import MOST_ELEMENTS
from syncheck.tensors.dtypes import BY_STORAGE, DTYPES, NOT_READ, RAW_DTYPES, DType
from syncheck.text import brief

if TYPE_CHECKING:
    from syncheck.tensors.dtypes import DType

# numpy's codes of the dtypes that torch has; strings, objects, records and dates are not among them.
_CODES = {
    **{f"f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"i{size}": f"int{8 * size}" for size in (1, 2, 4, 8)},
    **{f"u{size}": f"uint{8 * size}" for size in (1, 2, 4, 8)},
    **{f"c{size}": f"complex{8 * size}" for size in (8, 16)},
    "b1": "bool",
    **{f"ml_dtypes.{row.numpy}": name for name, row in DTYPES.items() if row.numpy.startswith(("bfloat", "float8"))},
}
# The elements of a dtype's state after its byte order. Alignment and flags follow from the other elements.
_DETAILS = ("subarray", "names", "fields", "itemsize", "", "", "metadata")

# Storage classes of quantized tensors, with bytes per element and dtype.
QUANTIZED_STORAGES = {
    "QInt8Storage": (1, "qint8"),
    "QUInt8Storage": (1, "quint8"),
    "QInt32Storage": (4, "qint32"),
    "QUInt4x2Storage": (1, "quint4x2"),
    "QUInt2x4Storage": (1, "quint2x4"),
}
SCHEMES = ("tensor_affine", "channel_affine", "channel_affine_float_qparams", "tensor_symmetric", "channel_symmetric")


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
    return TensorLocation(storage, dtype, offset, shape, strides, ",".join(_list_pending(bits)))


def _list_pending(bits: Any) -> list[str]:
    """Return the operations that torch applies when the tensor is read. bits: by name."""
    return [name for name in ("conj", "neg") if isinstance(bits, dict) and bits.get(name)]


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
    if dtype.dtype is not None:
        return _tensor_in_storage(storage, offset, shape, strides, dtype.dtype, bits)
    reason, raw_dtype = Refusal.DTYPE(name=dtype.name), DTYPES.get(RAW_DTYPES.get(dtype.name, ""))
    if raw_dtype is None:
        return refused_tensor(reason, shape)
    # The numbers of other dtypes are unknown here, but equal bytes are equal numbers.
    raw = _tensor_in_storage(storage, offset, shape, strides, raw_dtype, None)
    lazy = ",".join(_list_pending(bits))
    return tensor_in_parts(reason, {"bytes": raw, "dtype": dtype, "pending": lazy}, shape)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_on_device(data: Any, dtype: Any = None, *_: Any) -> Any:
    """Stand in for a tensor on another device, saved as a CPU tensor or a numpy array, and its dtype on the device."""
    if not isinstance(data, TensorLocation) or not isinstance(dtype, DTypeName) or data.dtype is dtype.dtype:
        return data
    return tensor_in_parts(Refusal.AS_NUMPY(), {"data": data, "dtype": dtype}, data.shape, dtype.dtype)


def _rebuild_with_state(data: Any, _grad: Any = None, _hooks: Any = None, state: Any = None) -> Any:
    if not state:
        return data
    return Compound.wrap(data, state) if isinstance(data, TensorLocation) else [data, state]


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


def _rebuild_wrapper(kind: Any, dtype: Any = None, shape: Any = (), *_: Any) -> TensorLocation:
    """Stand in for a wrapper subclass, whose tensors are in the state of `_rebuild_from_type_v2`."""
    known = dtype.dtype if isinstance(dtype, DTypeName) else None
    return refused_tensor(Refusal.WRAPPER(), shape, known, {"class": kind})


def _rebuild_sparse(layout: Any, parts: Any, *_: Any) -> TensorLocation:
    """Stand in for a sparse tensor of indices, values and size; compressed layouts have two index tensors."""
    listed = list(parts) if isinstance(parts, (tuple, list)) else []
    at = next((i for i, part in enumerate(listed) if not isinstance(part, TensorLocation)), 0)
    if not 2 <= at <= 3:
        raise pickle.UnpicklingError(f"a sparse tensor of {at} tensors")
    names = ("indices", "values") if at == 2 else ("compressed_indices", "plain_indices", "values")
    inner: dict[str, Any] = dict(zip(names, listed[:at], strict=True))
    inner["layout"] = layout
    if at == 2:  # files of torch 2.0 and older lack the flag, and torch.load sets it to False
        inner["is_coalesced"] = listed[3] if len(listed) > 3 else False
    return tensor_in_parts(Refusal.SPARSE(), inner, listed[at], listed[at - 1].dtype)


def _rebuild_quantized(
    storage: Any, offset: Any, shape: Any, strides: Any = None, scheme: Any = None, *_: Any
) -> TensorLocation:
    """Stand in for a quantized tensor: its integers, and scales, zero points and axis in the scheme."""
    name = storage.quantized if isinstance(storage, Storage) else ""
    row = DTYPES.get(RAW_DTYPES.get(name, ""))
    if row is None:  # several numbers in a byte: the strides do not count bytes
        parts = {"storage": storage, "offset": offset, "strides": strides}
    else:
        parts = {"int_repr": _tensor_in_storage(storage, offset, shape, strides, row, None)}
    if isinstance(scheme, tuple):
        scheme = dict(zip(("scheme", "scale", "zero_point", "axis"), scheme, strict=False))
    return tensor_in_parts(Refusal.QUANTIZED(), {**parts, "quantizer": scheme, "dtype": name}, shape)


def _rebuild_nested(*parts: Any) -> TensorLocation:
    """Stand in for a nested tensor: its buffer, and the sizes, strides and offsets of its tensors."""
    names = ("buffer", "sizes", "strides", "offsets")
    return tensor_in_parts(Refusal.NESTED(), dict(zip(names, parts, strict=True)))


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
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": StandIn(_rebuild_on_device),
    "torch.storage.UntypedStorage": StorageType(None),
    "torch.UntypedStorage": StorageType(None),
    **{f"torch.{name}": StorageType(None, size, dtype) for name, (size, dtype) in QUANTIZED_STORAGES.items()},
    **{f"torch.{name}": StorageType(row, row.size) for name, row in BY_STORAGE.items()},
    **{f"torch.{name}": DTypeName(name) for name in (*DTYPES, *NOT_READ)},
    **{f"torch.{name}": TypeName(name) for name in ("Tensor", "nn.parameter.Parameter", "nn.parameter.Buffer")},
    **{f"torch.per_{scheme}": f"torch.per_{scheme}" for scheme in SCHEMES},
    "torch.device": StandIn(_describe),
    "torch.serialization._get_layout": StandIn(_describe),
    "torch._utils._rebuild_wrapper_subclass": StandIn(_rebuild_wrapper),
    "torch._utils._rebuild_qtensor": StandIn(_rebuild_quantized),
    "torch._utils._rebuild_sparse_tensor": StandIn(_rebuild_sparse),
    "torch._utils._rebuild_sparse_csr_tensor": StandIn(_rebuild_sparse),
    "torch._utils._rebuild_nested_tensor": StandIn(_rebuild_nested),
    "torch._utils._rebuild_meta_tensor_no_storage": StandIn(_refuse_meta),
    "torch._utils._rebuild_device_tensor_from_numpy": StandIn(_rebuild_on_device),
}


def restore_bytes(data: Any) -> Any:
    """Return the bytes of a byte string of Python 2, which the unpickler reads as text; other data as it is."""
    return data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data


class NumpyDType:
    """A numpy dtype: numpy.dtype('f8', False, True), then its byte order by BUILD. ml_dtypes passes a class.

    code: as numpy writes it, f8, or the name of a class: ml_dtypes.bfloat16.
    details: what the code does not contain, by name: the unit of a time, the fields of a record.
    """

    __slots__ = ("big_endian", "code", "details")
    details: dict[str, Any]

    def __init__(self, code: Any, *_: Any) -> None:
        code = getattr(code, "name", code)
        # `brief` limits the time for nested objects that contain each other many times.
        self.code, self.big_endian = code if isinstance(code, str) else brief(code), False
        self.details = {}

    def __repr__(self) -> str:
        return f"<numpy.dtype {self.code:.40}>"

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|"):
            raise pickle.UnpicklingError("invalid byte order of a numpy dtype")
        check_nesting(state)
        self.big_endian = state[1] == ">"
        self.details = {}
        for detail, value in zip(_DETAILS, state[2:], strict=False):
            # numpy writes None or -1 if the code determines the detail.
            is_default = value is None or value == -1
            if detail and not is_default:
                self.details[detail] = value

    @property
    def name(self) -> str:
        """The name of the dtype, with its byte order."""
        order = ">" if self.big_endian else ""
        return f"numpy.dtype {order}{self.code}"

    def list_parts(self) -> dict[str, Any]:
        """Return everything that distinguishes the dtype from others, by name."""
        return {"name": self.name, **self.details}

    @property
    def dtype(self) -> DType | None:
        """The torch dtype, or None if torch lacks it."""
        return DTYPES.get(_CODES.get(self.code, ""))


class _NumpyArray(Compound):
    """A numpy array: created empty by _reconstruct; BUILD sets shape, dtype, order and bytes."""

    def __init__(self, *_: Any) -> None:
        super().__init__(None, None, 0, (), (), refused=Refusal.EMPTY_NUMPY())

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise pickle.UnpicklingError("invalid state of a numpy array")
        _, shape, kind, fortran, stored = state
        data = restore_bytes(stored)
        shape = check_sizes(shape)
        dtype = kind.dtype if isinstance(kind, NumpyDType) else None
        if dtype is None or not isinstance(data, bytes):
            code = kind.code if isinstance(kind, NumpyDType) else "?"
            refusal = Refusal.NUMPY_DTYPE(name=f"{code:.40}")
            parts: dict[str, Any] = {"elements": data}  # objects, which may contain tensors
            if isinstance(data, bytes):  # texts, records and times are compared as bytes
                parts = {"bytes": TensorLocation(None, DTYPES["uint8"], 0, (len(data),), (1,), data=data)}
            if isinstance(kind, NumpyDType):  # equal bytes are another time in another unit
                parts["dtype"] = kind
            self._fill(shape=shape, refused=Refusal.IN_PARTS(refusal=refusal), inner=parts)
            return
        if len(data) != math.prod(shape) * dtype.size:
            raise pickle.UnpicklingError(f"a numpy array of {len(data)} bytes for {dtype.name} {list(shape)}")
        dims = range(len(shape))
        strides = tuple(math.prod(shape[:i] if fortran else shape[i + 1 :]) for i in dims)
        self._fill(shape=shape, strides=strides, dtype=dtype, data=data, big_endian=kind.big_endian, refused=None)


def _from_buffer(buffer: Any, kind: Any, shape: Any, order: Any = "C", *_: Any) -> _NumpyArray:
    """Stand in for numpy's _frombuffer, which protocol 5 uses."""
    if not isinstance(buffer, (bytes, bytearray)) or order not in ("C", "F"):
        raise pickle.UnpicklingError(f"a numpy array in the order {brief(order)}")
    array = _NumpyArray()
    array.__setstate__((1, shape, kind, order == "F", bytes(buffer)))
    return array


def _read_scalar(kind: Any, data: Any = None) -> Any:
    """Return a numpy scalar as a Python number, or its bytes if it has no Python equivalent.

    Bytes of a time or a record are returned with the dtype, because it determines their meaning.
    """
    data = restore_bytes(data)
    if not isinstance(kind, NumpyDType) or not isinstance(data, bytes):
        return None
    dtype = kind.dtype
    if dtype is None or not dtype.struct or len(data) != dtype.size:
        has_own_dtype = "metadata" in kind.details or "fields" in kind.details
        return {"bytes": data, "dtype": kind} if has_own_dtype else data
    return struct.unpack((">" if kind.big_endian else "<") + dtype.struct, data)[0]


NUMPY: dict[str, Any] = {
    "numpy.dtype": StandIn(NumpyDType),
    "numpy.ndarray": StandIn(lambda *_: None),
    **{code: TypeName(code) for code in _CODES if code.startswith("ml_dtypes.")},
    **{f"numpy.{core}.numeric._frombuffer": StandIn(_from_buffer) for core in ("_core", "core")},
    **{
        f"numpy.{core}.multiarray.{name}": StandIn(call)
        for core in ("_core", "core")
        for name, call in (("_reconstruct", _NumpyArray), ("scalar", _read_scalar))
    },
}
