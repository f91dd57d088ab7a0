"""safetensors files: 8 bytes of header length, a JSON header, then the tensors' bytes.

The header is read here rather than by the safetensors package, whose numpy face cannot give bfloat16 and which reads
bytes where places are needed. Rules: the format's README and safetensors/src/tensor.rs.
"""

from __future__ import annotations

import json
import math
import os
import struct
from typing import Any

from syncheck.dtypes import BY_SAFETENSORS, DType
from syncheck.errors import MalformedFile, brief
from syncheck.messages import Refusal
from syncheck.metadata_block import KEY, parse
from syncheck.readers import bounds
from syncheck.readers.json_text import NotTheObject, json_object
from syncheck.readers.opening import regular
from syncheck.snapshots import MOST_DIMENSIONS, MOST_ELEMENTS, Metadata, Snapshot, Tensor, are_naturals, in_c_order

FORMAT = "safetensors"
# The bound of safetensors' own reader (tensor.rs, MAX_HEADER_SIZE), in bytes.
MAX_HEADER = 100_000_000
_AGAIN = "save or copy the file again"


def matches(head: bytes) -> bool:
    """Whether the first bytes are a length and the start of a JSON object."""
    return len(head) >= 9 and head[8:9] == b"{" and struct.unpack_from("<Q", head)[0] >= 2


def read(path: str) -> Snapshot:
    """Open a checkpoint: its tensors' names and places, string metadata as values, and the metadata block.

    Raises MalformedFile for a header that is too long, no JSON, or whose tensors do not tile the file exactly.
    """
    with regular(path) as file:
        opened = os.fstat(file.fileno())
        size = opened.st_size
        first = file.read(8)
        if len(first) < 8:  # it was longer when its format was told
            raise _malformed(path, "header", f"{len(first)} bytes", "at least 8")
        (length,) = struct.unpack("<Q", first)
        if length > min(MAX_HEADER, size - 8):
            raise _malformed(path, "header", f"a length of {length} bytes", f"at most {min(MAX_HEADER, size - 8)}")
        raw = file.read(length)
    try:
        header = json_object(raw, entry=b'"data_offsets"')
    except NotTheObject as wrong:
        raise _malformed(path, "header", wrong.found, wrong.needed) from None
    strings = header.pop("__metadata__", {})
    if len(header) > bounds.MOST_TENSORS:
        raise _malformed(path, "header", f"{len(header)} tensors", f"at most {bounds.MOST_TENSORS}")
    if not isinstance(strings, dict) or not all(isinstance(text, str) for text in strings.values()):
        raise _malformed(path, "__metadata__", "values that are no strings", "strings")
    tensors = {name: _tensor(path, name, entry, 8 + length, opened) for name, entry in header.items()}
    _check_cover(path, header, size - 8 - length)
    values = {name: _number(text) for name, text in strings.items() if name != KEY}
    return Snapshot(path, FORMAT, size, tensors, values, (), _metadata(path, strings))


def _tensor(path: str, name: str, entry: Any, data: int, opened: os.stat_result) -> Tensor:
    """Check one entry and return its tensor. data: where the tensors' bytes start in the file."""
    place = f"tensor '{name}'"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _malformed(path, place, "an incomplete entry", "dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    right = isinstance(code, str) and _naturals(shape, MOST_DIMENSIONS) and _naturals(offsets, 2)
    if not right or len(offsets) != 2 or offsets[1] < offsets[0]:
        found = f"{brief(code, 20)} {brief(shape)} {brief(offsets)}"
        needed = f"a dtype, sizes and two offsets in order, of at most {MOST_DIMENSIONS} dimensions and 64 bits"
        raise _malformed(path, place, found, needed)
    dtype: DType | None = BY_SAFETENSORS.get(code)
    strides = in_c_order(shape)
    elements = math.prod(shape)
    if dtype is None and elements > MOST_ELEMENTS:
        raise _malformed(path, place, f"sizes {brief(shape)}", f"at most {MOST_ELEMENTS} elements")
    if dtype is None:
        refused = Refusal.DTYPE(name=f"{code:.60}")
        return Tensor(name, code, tuple(shape), strides, path, data + offsets[0], refused=refused)
    size = elements * dtype.size
    if offsets[1] - offsets[0] != size:
        found = f"{offsets[1] - offsets[0]} bytes"
        raise _malformed(path, place, found, f"{brief(size)} for {dtype.name} {brief(shape)}")
    return Tensor(name, dtype.name, tuple(shape), strides, path, data + offsets[0], opened=opened)


def _check_cover(path: str, header: dict[str, Any], size: int) -> None:
    """Tensors must tile the data without a hole or an overlap: that is how a cut or padded file shows."""
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        if start != end:
            raise _malformed(
                path,
                f"tensor '{name}'",
                f"starts at byte {start} of the data",
                f"{end}, where the one before ends",
            )
        end = stop
    if end != size:
        raise _malformed(path, "data", f"{size} bytes", f"{end}, where the last tensor ends")


def _naturals(value: Any, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most and are_naturals(value)


def _number(text: str) -> Any:
    """Metadata strings that are integers are compared as numbers, as in the other formats."""
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 19 else text


def _metadata(path: str, strings: dict[str, str]) -> Metadata | None:
    if KEY not in strings:
        return None
    try:
        block = json.loads(strings[KEY])
    except (ValueError, RecursionError) as error:
        raise _malformed(path, f"__metadata__ '{KEY}'", f"no JSON: {error!s:.100}", "a JSON object") from None
    return parse(block, path)


def _malformed(path: str, place: str, found: str, needed: str) -> MalformedFile:
    return MalformedFile(
        path, place=place, found=found, needed=needed, next_step=f"it is cut short or damaged: {_AGAIN}"
    )
