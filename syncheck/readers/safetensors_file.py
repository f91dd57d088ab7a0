"""safetensors files: 8 bytes of header length, a JSON header, then the tensors' bytes.

syncheck parses the header itself, because the safetensors package cannot return bfloat16 to numpy, and returns bytes
instead of their offsets. Specification: the format's README and safetensors/src/tensor.rs.
"""

from __future__ import annotations

import math
import os
import re
import struct
from typing import Any, BinaryIO

from syncheck.errors import MalformedFile
from syncheck.messages import Refusal
from syncheck.readers import untrusted
from syncheck.readers.metadata_block import KEY, parse_metadata
from syncheck.readers.untrusted import open_regular_file, parse_json_object
from syncheck.snapshots import (
    MOST_DIMENSIONS,
    MOST_ELEMENTS,
    Metadata,
    Snapshot,
    Tensor,
    are_naturals,
    contiguous_strides,
)
from syncheck.tensors.dtypes import BY_SAFETENSORS, DType
from syncheck.text import brief, make_unique_name

FORMAT = "safetensors"
# The header limit of safetensors itself (tensor.rs, MAX_HEADER_SIZE), in bytes.
MAX_HEADER = 100_000_000
_LENGTH = struct.Struct("<Q")
_FIELDS = {"dtype", "shape", "data_offsets"}
# Whole numbers that every format can store.
_NUMBER = r"[0-9]{1,18}"
_AGAIN = "it is cut short or damaged: save or copy the file again"


def matches(head: bytes) -> bool:
    """Whether the first bytes are a header length and the start of a JSON object."""
    return len(head) >= 9 and head[8:9] == b"{" and struct.unpack_from("<Q", head)[0] >= 2


def read(path: str) -> Snapshot:
    """Open a checkpoint without reading tensor data. String metadata becomes values.

    Raises MalformedFile for a header that is too long, invalid, or does not describe all bytes of the file.
    """
    with open_regular_file(path) as file:
        opened = os.fstat(file.fileno())
        raw = _read_header(file, path, opened.st_size)

    header = parse_json_object(raw, path, "header", _AGAIN, entry=b'"data_offsets"')
    strings = header.pop("__metadata__", {})
    if len(header) > untrusted.MOST_TENSORS:
        raise _malformed(
            path,
            "header",
            problem=f"{len(header)} tensors",
            needed=f"at most {untrusted.MOST_TENSORS}",
        )
    if not isinstance(strings, dict) or not untrusted.are_strings(list(strings.values())):
        raise _malformed(
            path,
            "__metadata__",
            problem="values that are not strings",
            needed="strings",
        )

    data_start = _LENGTH.size + len(raw)
    tensors = {name: _check_tensor(path, name, entry, data_start, opened) for name, entry in header.items()}
    refused_names = [name for name, tensor in tensors.items() if tensor.refused]
    for name in refused_names:
        # The bytes are compared in place of the numbers, which are unknown.
        bytes_name = make_unique_name(f"{name}.bytes", tensors)
        tensors[bytes_name] = _make_bytes(bytes_name, tensors[name], header[name]["data_offsets"], opened)

    _check_cover(path, header, opened.st_size - data_start)
    values = {name: _to_number(text) for name, text in strings.items() if name != KEY}
    return Snapshot(
        path=path,
        format=FORMAT,
        bytes=opened.st_size,
        tensors=tensors,
        values=values,
        stubs=(),
        metadata=_read_metadata(path, strings),
    )


def _read_header(file: BinaryIO, path: str, size: int) -> bytes:
    """Return the JSON header of a file of `size` bytes."""
    start = file.read(_LENGTH.size)
    # The file was truncated after the format was detected.
    if len(start) < _LENGTH.size:
        raise _malformed(
            path,
            "header",
            problem=f"{len(start)} bytes",
            needed=f"at least {_LENGTH.size}",
        )

    (length,) = _LENGTH.unpack(start)
    most = min(MAX_HEADER, size - _LENGTH.size)
    if length > most:
        raise _malformed(
            path,
            "header",
            problem=f"a length of {length} bytes",
            needed=f"at most {most}",
        )
    return file.read(length)


def _check_tensor(path: str, name: str, entry: Any, data_start: int, opened: os.stat_result) -> Tensor:
    """Check one entry and return its tensor. data_start: offset of the tensor data in the file."""
    label = f"tensor '{name}'"
    code, shape, (start, stop) = _check_fields(path, label, entry)
    strides = contiguous_strides(shape)
    elements = math.prod(shape)
    dtype: DType | None = BY_SAFETENSORS.get(code)
    if dtype is None:
        if elements > MOST_ELEMENTS:
            raise _malformed(
                path,
                label,
                problem=f"sizes {brief(shape)}",
                needed=f"at most {MOST_ELEMENTS} elements",
            )
        refused = Refusal.IN_PARTS(refusal=Refusal.DTYPE(name=f"{code:.60}"))
        return Tensor(
            name=name,
            dtype=code,
            shape=tuple(shape),
            strides=strides,
            path=path,
            offset=data_start + start,
            refused=refused,
        )

    size = elements * dtype.size
    if stop - start != size:
        needed = f"{brief(size)} for {dtype.name} {brief(shape)}"
        raise _malformed(
            path,
            label,
            problem=f"{stop - start} bytes",
            needed=needed,
        )
    return Tensor(
        name=name,
        dtype=dtype.name,
        shape=tuple(shape),
        strides=strides,
        path=path,
        offset=data_start + start,
        opened=opened,
    )


def _check_fields(path: str, label: str, entry: Any) -> tuple[str, list[int], list[int]]:
    """Return the dtype, the sizes and the offsets of an entry."""
    if not isinstance(entry, dict) or not entry.keys() >= _FIELDS:
        raise _malformed(
            path,
            label,
            problem="an incomplete entry",
            needed="dtype, shape and data_offsets",
        )

    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    has_right_types = isinstance(code, str) and _are_naturals(shape, MOST_DIMENSIONS)
    if not has_right_types or not _are_offsets(offsets):
        problem = f"{brief(code, 20)} {brief(shape)} {brief(offsets)}"
        needed = f"a dtype, sizes and two offsets in order, of at most {MOST_DIMENSIONS} dimensions and 64 bits"
        raise _malformed(
            path,
            label,
            problem=problem,
            needed=needed,
        )
    return code, shape, offsets


def _make_bytes(name: str, tensor: Tensor, offsets: list[int], opened: os.stat_result) -> Tensor:
    """Return the bytes of a tensor of an unknown dtype: equal bytes are equal numbers of any dtype."""
    start, stop = offsets
    return Tensor(
        name=name,
        dtype="uint8",
        shape=(stop - start,),
        strides=(1,),
        path=tensor.path,
        offset=tensor.offset,
        opened=opened,
    )


def _check_cover(path: str, header: dict[str, Any], size: int) -> None:
    """Check that tensors cover the data without a hole or overlap, which detects truncated and padded files."""
    end = 0
    for name, entry in sorted(header.items(), key=_data_order):
        start, stop = entry["data_offsets"]
        if start != end:
            problem = f"starts at byte {start} of the data"
            raise _malformed(
                path,
                f"tensor '{name}'",
                problem=problem,
                needed=f"{end}, the end of the previous tensor",
            )
        end = stop

    if end != size:
        raise _malformed(
            path,
            "data",
            problem=f"{size} bytes",
            needed=f"{end}, the end of the last tensor",
        )


def _data_order(item: tuple[str, Any]) -> Any:
    """Return the sort key of an entry of the header: its offsets."""
    _, entry = item
    return entry["data_offsets"]


def _are_naturals(value: Any, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most and are_naturals(value)


def _are_offsets(value: Any) -> bool:
    """Whether a value is the first byte of a tensor and the byte after its last."""
    if not _are_naturals(value, 2) or len(value) != 2:
        return False
    start, stop = value
    in_order: bool = start <= stop
    return in_order


def _to_number(text: str) -> Any:
    """Convert integers in string metadata to numbers, which other formats store."""
    return int(text) if re.fullmatch(_NUMBER, text) else text


def _read_metadata(path: str, strings: dict[str, str]) -> Metadata | None:
    if KEY not in strings:
        return None

    import json  # most files have no metadata of syncheck

    try:
        block = json.loads(strings[KEY])
    except (ValueError, RecursionError) as error:
        raise _malformed(
            path,
            f"__metadata__ '{KEY}'",
            problem=f"invalid JSON: {error!s:.100}",
            needed="a JSON object",
        ) from None
    return parse_metadata(block, path)


def _malformed(path: str, label: str, *, problem: str, needed: str) -> MalformedFile:
    return MalformedFile(
        path,
        place=label,
        found=problem,
        needed=needed,
        next_step=_AGAIN,
    )
