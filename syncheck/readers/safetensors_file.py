"""safetensors files: 8 bytes of header length, a JSON header, then the tensors' bytes.

syncheck parses the header itself, because the safetensors package cannot return bfloat16 to numpy, and returns bytes
instead of their offsets. Specification: the format's README and safetensors/src/tensor.rs.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import replace
from typing import Any

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
        size = opened.st_size
        first = file.read(8)
        if len(first) < 8:  # the file was truncated after the format was detected
            raise _malformed(path, "header", f"{len(first)} bytes", "at least 8")
        (length,) = struct.unpack("<Q", first)
        if length > min(MAX_HEADER, size - 8):
            raise _malformed(path, "header", f"a length of {length} bytes", f"at most {min(MAX_HEADER, size - 8)}")
        raw = file.read(length)
    header = parse_json_object(raw, path, "header", _AGAIN, entry=b'"data_offsets"')
    strings = header.pop("__metadata__", {})
    if len(header) > untrusted.MOST_TENSORS:
        raise _malformed(path, "header", f"{len(header)} tensors", f"at most {untrusted.MOST_TENSORS}")
    if not isinstance(strings, dict) or not all(isinstance(text, str) for text in strings.values()):
        raise _malformed(path, "__metadata__", "values that are not strings", "strings")
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        tensors[name] = _check_tensor(path, name, entry, 8 + length, opened)
    for name in [name for name, tensor in tensors.items() if tensor.refused]:
        part = _list_bytes(tensors[name], header[name]["data_offsets"], opened)
        free = make_unique_name(part.name, tensors)
        tensors[free] = replace(part, name=free)
    _check_cover(path, header, size - 8 - length)
    values = {name: _to_number(text) for name, text in strings.items() if name != KEY}
    return Snapshot(path, FORMAT, size, tensors, values, (), _read_metadata(path, strings))


def _check_tensor(path: str, name: str, entry: Any, data: int, opened: os.stat_result) -> Tensor:
    """Check one entry and return its tensor. data: offset of the tensor data in the file."""
    place = f"tensor '{name}'"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _malformed(path, place, "an incomplete entry", "dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    right = isinstance(code, str) and _are_naturals(shape, MOST_DIMENSIONS) and _are_naturals(offsets, 2)
    if not right or len(offsets) != 2 or offsets[1] < offsets[0]:
        found = f"{brief(code, 20)} {brief(shape)} {brief(offsets)}"
        needed = f"a dtype, sizes and two offsets in order, of at most {MOST_DIMENSIONS} dimensions and 64 bits"
        raise _malformed(path, place, found, needed)
    dtype: DType | None = BY_SAFETENSORS.get(code)
    strides = contiguous_strides(shape)
    elements = math.prod(shape)
    if dtype is None and elements > MOST_ELEMENTS:
        raise _malformed(path, place, f"sizes {brief(shape)}", f"at most {MOST_ELEMENTS} elements")
    if dtype is None:
        refused = Refusal.IN_PARTS(refusal=Refusal.DTYPE(name=f"{code:.60}"))
        return Tensor(name, code, tuple(shape), strides, path, data + offsets[0], refused=refused)
    size = elements * dtype.size
    if offsets[1] - offsets[0] != size:
        found = f"{offsets[1] - offsets[0]} bytes"
        raise _malformed(path, place, found, f"{brief(size)} for {dtype.name} {brief(shape)}")
    return Tensor(name, dtype.name, tuple(shape), strides, path, data + offsets[0], opened=opened)


def _list_bytes(tensor: Tensor, offsets: list[int], opened: os.stat_result) -> Tensor:
    """Return the bytes of a tensor of an unknown dtype: equal bytes are equal numbers of any dtype."""
    size = offsets[1] - offsets[0]
    return Tensor(f"{tensor.name}.bytes", "uint8", (size,), (1,), tensor.path, tensor.offset, opened=opened)


def _check_cover(path: str, header: dict[str, Any], size: int) -> None:
    """Check that tensors cover the data without a hole or overlap, which detects truncated and padded files."""
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        if start != end:
            raise _malformed(
                path,
                f"tensor '{name}'",
                f"starts at byte {start} of the data",
                f"{end}, the end of the previous tensor",
            )
        end = stop
    if end != size:
        raise _malformed(path, "data", f"{size} bytes", f"{end}, the end of the last tensor")


def _are_naturals(value: Any, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most and are_naturals(value)


def _to_number(text: str) -> Any:
    """Convert integers in string metadata to numbers, which other formats store."""
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 19 else text


def _read_metadata(path: str, strings: dict[str, str]) -> Metadata | None:
    if KEY not in strings:
        return None
    try:
        block = json.loads(strings[KEY])
    except (ValueError, RecursionError) as error:
        raise _malformed(path, f"__metadata__ '{KEY}'", f"invalid JSON: {error!s:.100}", "a JSON object") from None
    return parse_metadata(block, path)


def _malformed(path: str, place: str, found: str, needed: str) -> MalformedFile:
    return MalformedFile(path, place=place, found=found, needed=needed, next_step=_AGAIN)
