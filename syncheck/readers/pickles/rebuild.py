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
from syncheck.readers.pickles.limits import check_nesting, is_count, require
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
from syncheck.snapshots import contiguous_strides
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

_NO_STORAGE = "a tensor without a storage, or with an offset out of range"
# Names of the encodings in which pickles of protocol 2 write bytes.
_ENCODINGS = ("latin1", "latin-1", "latin_1", "iso-8859-1", "utf-8", "utf8", "ascii")


def _tensor_in_storage(
    storage: Any, offset: Any, shape: Any, strides: Any, dtype: DType | None, bits: Any
) -> TensorLocation:
    require(isinstance(storage, Storage), _NO_STORAGE)
    require(is_count(offset), _NO_STORAGE)
    shape, strides = check_sizes(shape), check_sizes(strides)
    require(len(shape) == len(strides), "{} sizes but {} strides", len(shape), len(strides))
    if storage.size != storage.numel:
        _check_view(storage, offset, shape, strides, dtype)
        offset += storage.start
    return TensorLocation(storage, dtype, offset, shape, strides, ",".join(_list_pending(bits)))


def _check_view(
    view: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType | None
) -> None:
    """Check that a tensor is within a view of a storage."""
    problem = "a tensor beyond the {} elements of its view of a storage"
    # A view counts elements of its own dtype.
    require(dtype is view.dtype, problem, view.size)
    if 0 in shape:
        return

    last = offset
    for size, stride in zip(shape, strides, strict=True):
        last += (size - 1) * stride

    require(last < view.size, problem, view.size)


def _list_pending(bits: Any) -> list[str]:
    """Return the operations that torch applies when the tensor is read. bits: by name."""
    if not isinstance(bits, dict):
        return []
    return [name for name in ("conj", "neg") if bits.get(name)]


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
    # The storage is untyped, so the dtype is an argument.
    if dtype.dtype is not None:
        return _tensor_in_storage(storage, offset, shape, strides, dtype.dtype, bits)

    reason = Refusal.DTYPE(name=dtype.name)
    raw_dtype = DTYPES.get(RAW_DTYPES.get(dtype.name, ""))
    if raw_dtype is None:
        return refused_tensor(reason, shape)

    # The numbers of other dtypes are unknown here, but equal bytes are equal numbers.
    raw = _tensor_in_storage(storage, offset, shape, strides, raw_dtype, None)
    pending = ",".join(_list_pending(bits))
    return tensor_in_parts(reason, {"bytes": raw, "dtype": dtype, "pending": pending}, shape)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_on_device(data: Any, dtype: Any = None, *_: Any) -> Any:
    """Stand in for a tensor on another device, saved as a CPU tensor or a numpy array, and its dtype on the device."""
    if not isinstance(data, TensorLocation) or not isinstance(dtype, DTypeName):
        return data
    if data.dtype is dtype.dtype:
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
    problem = "bytes in an unknown encoding"
    require(isinstance(text, str), problem)
    require(isinstance(encoding, str), problem)
    # Other encodings, like zlib, could expand a few bytes without bound.
    require(encoding.lower() in _ENCODINGS, problem)
    encoded: bytes = text.encode(encoding)
    return encoded


def _make_bytes(*arguments: Any) -> bytes:
    """Stand in for bytes(), with which protocol 2 writes empty bytes; bytes(10**12) would allocate 1 TB."""
    require(not arguments, "bytes() with arguments")
    return b""


def _reconstructor(kind: Any, _base: Any = None, state: Any = None) -> Any:
    """Stand in for copyreg._reconstructor, with which protocols 0 and 1 write plain objects.

    state: the content, if the class derives from a plain class such as dict.
    """
    if not isinstance(kind, type):
        return state
    if issubclass(kind, Inert):
        return kind(state)
    if issubclass(kind, Ordered) and isinstance(state, dict):
        return kind(state)
    return state


def _rebuild_wrapper(kind: Any, dtype: Any = None, shape: Any = (), *_: Any) -> TensorLocation:
    """Stand in for a wrapper subclass, whose tensors are in the state of `_rebuild_from_type_v2`."""
    return refused_tensor(Refusal.WRAPPER(), shape, _find_dtype(dtype), {"class": kind})


def _find_dtype(dtype_name: Any) -> DType | None:
    """Return the dtype of a pickled argument, or None if it is unknown."""
    return dtype_name.dtype if isinstance(dtype_name, DTypeName) else None


def _rebuild_sparse(layout: Any, parts: Any, *_: Any) -> TensorLocation:
    """Stand in for a sparse tensor of indices, values and size; compressed layouts have two index tensors."""
    components = list(parts) if isinstance(parts, (tuple, list)) else []
    tensor_count = _count_first_tensors(components)
    require(2 <= tensor_count <= 3, "a sparse tensor of {} tensors", tensor_count)
    tensors = components[:tensor_count]
    shape, *flags = components[tensor_count:]
    if tensor_count == 3:
        inner = dict(zip(("compressed_indices", "plain_indices", "values"), tensors, strict=True))
        inner["layout"] = layout
    else:
        inner = dict(zip(("indices", "values"), tensors, strict=True))
        inner["layout"] = layout
        # Files of torch 2.0 and older lack the flag, and torch.load sets it to False.
        inner["is_coalesced"] = flags[0] if flags else False
    return tensor_in_parts(Refusal.SPARSE(), inner, shape, tensors[-1].dtype)


def _count_first_tensors(components: list[Any]) -> int:
    """Return the number of tensors before the first other component; 0 if there is no other component."""
    for count, component in enumerate(components):
        if not isinstance(component, TensorLocation):
            return count
    return 0


def _rebuild_quantized(
    storage: Any, offset: Any, shape: Any, strides: Any = None, scheme: Any = None, *_: Any
) -> TensorLocation:
    """Stand in for a quantized tensor: its integers, and scales, zero points and axis in the scheme."""
    dtype_name = storage.quantized if isinstance(storage, Storage) else ""
    raw_dtype = DTYPES.get(RAW_DTYPES.get(dtype_name, ""))
    if raw_dtype is None:
        # There are several numbers in a byte: the strides do not count bytes.
        parts = {"storage": storage, "offset": offset, "strides": strides}
    else:
        parts = {"int_repr": _tensor_in_storage(storage, offset, shape, strides, raw_dtype, None)}
    if isinstance(scheme, tuple):
        scheme = dict(zip(("scheme", "scale", "zero_point", "axis"), scheme, strict=False))
    return tensor_in_parts(Refusal.QUANTIZED(), {**parts, "quantizer": scheme, "dtype": dtype_name}, shape)


def _rebuild_nested(*parts: Any) -> TensorLocation:
    """Stand in for a nested tensor: its buffer, and the sizes, strides and offsets of its tensors."""
    names = ("buffer", "sizes", "strides", "offsets")
    return tensor_in_parts(Refusal.NESTED(), dict(zip(names, parts, strict=True)))


def _refuse_meta(dtype: Any, shape: Any, *_: Any) -> TensorLocation:
    return refused_tensor(Refusal.META(), shape, _find_dtype(dtype))


def _describe(*parts: Any) -> str:
    """Return a description as torch prints it: torch.device('cuda', 1) is cuda:1."""
    texts = []
    for part in parts:
        require(isinstance(part, (str, int)), "a device or layout of {}", parts)
        texts.append(brief(part) if isinstance(part, int) else part)
    return ":".join(texts)


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
        if not isinstance(code, str):
            # `brief` limits the time for nested objects that contain each other many times.
            code = brief(code)
        self.code = code
        self.big_endian = False
        self.details = {}

    def __repr__(self) -> str:
        return f"<numpy.dtype {self.code:.40}>"

    def __setstate__(self, state: Any) -> None:
        problem = "invalid byte order of a numpy dtype"
        require(isinstance(state, tuple), problem)
        require(len(state) >= 2, problem)
        require(state[1] in ("<", ">", "|"), problem)
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

    def unpack(self, data: bytes) -> Any:
        """Return the bytes of one element as a Python number, or None if it has no Python equivalent."""
        dtype = self.dtype
        if dtype is None or not dtype.struct or len(data) != dtype.size:
            return None
        byte_order = ">" if self.big_endian else "<"
        (number,) = struct.unpack(byte_order + dtype.struct, data)
        return number


class _NumpyArray(Compound):
    """A numpy array: created empty by _reconstruct; BUILD sets shape, dtype, order and bytes."""

    def __init__(self, *_: Any) -> None:
        super().__init__(None, None, 0, (), (), refused=Refusal.EMPTY_NUMPY())

    def __setstate__(self, state: Any) -> None:
        require(isinstance(state, tuple), "invalid state of a numpy array")
        require(len(state) == 5, "invalid state of a numpy array")
        _, pickled_shape, kind, is_fortran, pickled_data = state
        data = restore_bytes(pickled_data)
        shape = check_sizes(pickled_shape)
        dtype = kind.dtype if isinstance(kind, NumpyDType) else None
        if dtype is None or not isinstance(data, bytes):
            self._fill_parts(shape, kind, data)
            return

        if len(data) != math.prod(shape) * dtype.size:
            raise pickle.UnpicklingError(f"a numpy array of {len(data)} bytes for {dtype.name} {list(shape)}")

        strides = contiguous_strides(shape)
        if is_fortran:
            strides = tuple(math.prod(shape[:i]) for i in range(len(shape)))
        self._fill(shape=shape, strides=strides, dtype=dtype, data=data, big_endian=kind.big_endian, refused=None)

    def _fill_parts(self, shape: tuple[int, ...], kind: Any, data: Any) -> None:
        """Set the content of an array without a dtype of torch, which is compared in parts."""
        # Objects, which may contain tensors.
        parts: dict[str, Any] = {"elements": data}
        if isinstance(data, bytes):
            # Texts, records and times are compared as bytes.
            parts = {"bytes": TensorLocation(None, DTYPES["uint8"], 0, (len(data),), (1,), data=data)}
        code = "?"
        if isinstance(kind, NumpyDType):
            code = kind.code
            # Equal bytes are another time in another unit.
            parts["dtype"] = kind
        refusal = Refusal.NUMPY_DTYPE(name=f"{code:.40}")
        self._fill(shape=shape, refused=Refusal.IN_PARTS(refusal=refusal), inner=parts)


def _from_buffer(buffer: Any, kind: Any, shape: Any, order: Any = "C", *_: Any) -> _NumpyArray:
    """Stand in for numpy's _frombuffer, which protocol 5 uses."""
    problem = "a numpy array in the order {}"
    require(isinstance(buffer, (bytes, bytearray)), problem, order)
    require(order in ("C", "F"), problem, order)
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

    number = kind.unpack(data)
    if number is not None:
        return number

    has_own_details = not kind.details.keys().isdisjoint(("metadata", "fields"))
    return {"bytes": data, "dtype": kind} if has_own_details else data


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
