"""Supported dtypes in one table, by torch's names."""

from __future__ import annotations

from typing import Any, Literal

from syncheck.frozen import record

Family = Literal["float", "int", "uint", "bool", "complex"]


@record
class DType:
    """One row of the table.

    size: bytes per element. numpy: name of the dtype in numpy or ml_dtypes. storage: torch's typed storage class, empty
    if torch saves the dtype with `_rebuild_tensor_v3`. safetensors: the code in a safetensors header, empty if none.
    struct: the format character of Python's struct module, empty if none.
    """

    name: str
    family: Family
    size: int
    numpy: str
    storage: str = ""
    safetensors: str = ""
    struct: str = ""

    def dtype(self) -> Any:
        """Return the numpy dtype; import ml_dtypes only for dtypes that numpy lacks."""
        import numpy as np

        if self.numpy.startswith(("bfloat", "float8")):
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, self.numpy))

        return np.dtype(self.numpy)


_ROWS = (
    DType("float64", "float", 8, "float64", "DoubleStorage", "F64", "d"),
    DType("float32", "float", 4, "float32", "FloatStorage", "F32", "f"),
    DType("float16", "float", 2, "float16", "HalfStorage", "F16", "e"),
    DType("bfloat16", "float", 2, "bfloat16", "BFloat16Storage", "BF16"),
    DType("float8_e4m3fn", "float", 1, "float8_e4m3fn", "", "F8_E4M3"),
    DType("float8_e5m2", "float", 1, "float8_e5m2", "", "F8_E5M2"),
    DType("float8_e4m3fnuz", "float", 1, "float8_e4m3fnuz", "", "F8_E4M3FNUZ"),
    DType("float8_e5m2fnuz", "float", 1, "float8_e5m2fnuz", "", "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", "float", 1, "float8_e8m0fnu", "", "F8_E8M0"),
    DType("complex64", "complex", 8, "complex64", "ComplexFloatStorage", "C64"),
    DType("complex128", "complex", 16, "complex128", "ComplexDoubleStorage"),
    DType("int64", "int", 8, "int64", "LongStorage", "I64", "q"),
    DType("int32", "int", 4, "int32", "IntStorage", "I32", "i"),
    DType("int16", "int", 2, "int16", "ShortStorage", "I16", "h"),
    DType("int8", "int", 1, "int8", "CharStorage", "I8", "b"),
    DType("uint8", "uint", 1, "uint8", "ByteStorage", "U8", "B"),
    DType("uint16", "uint", 2, "uint16", "", "U16", "H"),
    DType("uint32", "uint", 4, "uint32", "", "U32", "I"),
    DType("uint64", "uint", 8, "uint64", "", "U64", "Q"),
    # Read as bytes: a bool other than 0 and 1 is damage, which a conversion would hide.
    DType("bool", "bool", 1, "uint8", "BoolStorage", "BOOL", "?"),
)

DTYPES = {row.name: row for row in _ROWS}
BY_STORAGE = {row.storage: row for row in _ROWS if row.storage}
# torch's other dtypes: their tensors are listed with name and shape, but not read.
NOT_READ = frozenset(
    "complex32 bcomplex32 float4_e2m1fn_x2 bit bits8 bits16 bits1x8 bits2x4 bits4x2 qint8 qint32 quint8 quint4x2 "
    "quint2x4 int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7".split()
)
# Dtypes whose elements have whole bytes: an integer dtype of the same size, to compare their bytes.
RAW_DTYPES = {
    "complex32": "uint32", "bcomplex32": "uint32", "float4_e2m1fn_x2": "uint8", "bits8": "uint8", "bits16": "uint16",
    "bits1x8": "uint8", "bits2x4": "uint8", "bits4x2": "uint8", "qint8": "int8", "quint8": "uint8", "qint32": "int32",
    **{f"{sign}int{bits}": "uint8" for sign in ("", "u") for bits in range(1, 8)},
}  # fmt: skip
BY_SAFETENSORS = {row.safetensors: row for row in _ROWS if row.safetensors}
