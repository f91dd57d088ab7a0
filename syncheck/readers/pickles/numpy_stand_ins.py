"""Stand-ins for numpy arrays and scalars, whose bytes are in the pickle.

Formats: numpy/_core/src/multiarray/methods.c (array_reduce, array_setstate), scalartypes.c.src and descriptor.c of
numpy 1.26 to 2.4. `numpy.core` became `numpy._core` in numpy 2.
"""

from __future__ import annotations

import math
import pickle
import struct
from typing import Any

from syncheck.messages import Refusal
from syncheck.readers.pickles.limits import check_nesting
from syncheck.readers.pickles.stand_ins import Compound, StandIn, TensorLocation, TypeName, check_sizes
from syncheck.tensors.dtypes import DTYPES, DType
from syncheck.text import brief

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
