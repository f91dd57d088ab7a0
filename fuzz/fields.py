"""The fields of an intact checkpoint file: the purpose of each byte, according to the specification of its format.

This module does not use syncheck. Layouts: PKWARE's APPNOTE.TXT, torch/serialization.py, the README of safetensors.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
from typing import Any, NamedTuple

DATA = "tensor data"
# Fields of a zip's headers, each with its size in bytes.
_LOCAL = "signature4 version2 flags2 method2 time2 date2 crc4 packed-size4 size4 name-length2 extra-length2"
_DIRECTORY = (
    "signature4 made-by2 version2 flags2 method2 time2 date2 crc4 packed-size4 size4 name-length2 extra-length2 "
    "comment-length2 disk2 attributes2 attributes4 offset4"
)
_END = "signature4 disk2 first-disk2 here2 records2 size4 offset4 comment-length2"
_END_64 = "signature4 length8 made-by2 version2 disk4 first-disk4 here8 records8 size8 offset8"
_LOCATOR = "signature4 disk4 offset8 disks4"
_RECORDS = {"data.pkl": "pickle", "byteorder": "byteorder"}
_UNUSED = "unused record"
# Optional records: if a file has no record of its byte order, the byte order is little-endian.
_OPTIONAL = (_UNUSED, "byteorder")


class Field(NamedTuple):
    """Bytes `start` to `stop` of a file."""

    start: int
    stop: int
    label: str


def find_fields(name: str, data: bytes) -> list[Field]:
    """Divide an intact file into fields without gaps. name: identifies formats without a magic number."""
    if name.endswith(".distcp"):
        return _concatenated_zips(data)
    if data.startswith(b"PK"):
        return zip_fields(data)
    if data.startswith(b"\x80\x02\x8a\x0a"):
        return _legacy_fields(data)
    if name.endswith(".safetensors"):
        length = 8 + struct.unpack_from("<Q", data)[0]
        text = len(data[:length].rstrip(b" "))
        ends = [(8, "header length"), (text, "header"), (length, "header's spaces"), (len(data), DATA)]
        return _fill_gaps([], ends)
    if b"syncheck_fingerprint" in data[:99]:
        value = rb'("[^"]*"|[^,"}\[{]+|\{[^}]*\}|\[[^]]*\])'
        pattern = rb'"(digest|min|max|mean|std|nonfinite|kind|source|stubs|notes)": ' + value
        fields = [Field(*match.span(), f"fingerprint's {match[1].decode()}") for match in re.finditer(pattern, data)]
        return _fill_gaps(fields, [(len(data), "json")])
    return [Field(0, len(data), "json" if name.endswith(".json") else "pickle")]


def _fill_gaps(fields: list[Field], ends: list[tuple[int, str]]) -> list[Field]:
    """Return fields in order, without gaps. ends: end offset and label of each section; gaps have its label."""
    filled, at = [], 0
    size = ends[-1][0]
    for field in [*sorted(fields), Field(size, size, "")]:
        while at < field.start:
            end, label = next((end, label) for end, label in ends if end > at)
            filled.append(Field(at, min(end, field.start), label))
            at = filled[-1].stop
        if field.start < field.stop:
            filled.append(field)
            at = field.stop
    return filled


def _header_fields(at: int, layout: str, label: str) -> list[Field]:
    fields = []
    for name in layout.split():
        size = int(name[-1])
        fields.append(Field(at, at + size, f"{label} {name[:-1]}"))
        at += size
    return fields


def zip_fields(data: bytes) -> list[Field]:
    """Divide an intact zip: headers, records, directory, end."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    fields = []
    names = [info.filename.partition("/")[2] for info in archive.infolist()]
    labels = [DATA if name.startswith("data/") else _RECORDS.get(name, _UNUSED) for name in names]
    for info, label in zip(archive.infolist(), labels, strict=True):
        at = info.header_offset
        name_length, extra = struct.unpack_from("<2H", data, at + 26)
        name_end = at + 30 + name_length
        header = [*_header_fields(at, _LOCAL, "local"), Field(at + 30, name_end, "local name")]
        fields += [field._replace(label=f"{label}'s header") for field in header] if label in _OPTIONAL else header
        start = name_end + extra
        fields += [Field(name_end, start, "padding"), Field(start, start + info.file_size, label)]
    at = archive.start_dir
    for label in labels:
        name_length, extra, comment = struct.unpack_from("<3H", data, at + 28)
        name_end = at + 46 + name_length
        end = name_end + extra + comment
        entry = [
            *_header_fields(at, _DIRECTORY, "directory"),
            Field(at + 46, name_end, "directory name"),
            Field(name_end, end, "directory extra"),
        ]
        fields += [field._replace(label=f"{label}'s entry") for field in entry] if label in _OPTIONAL else entry
        at = end
    if data[at : at + 4] == b"PK\x06\x06":
        fields += [*_header_fields(at, _END_64, "zip64"), *_header_fields(at + 56, _LOCATOR, "locator")]
        at += 76
    fields += _header_fields(at, _END, "end")
    return _fill_gaps([field for field in fields if field.start < field.stop], [(len(data), "descriptor")])


def _concatenated_zips(data: bytes) -> list[Field]:
    """Divide a file of torch.distributed.checkpoint, which is a sequence of zips."""
    fields, at = [], 0
    while at < len(data):
        end = data.index(b"PK\x05\x06", at) + 22
        fields += [Field(at + start, at + stop, label) for start, stop, label in zip_fields(data[at:end])]
        at = end
    return fields


class _StorageSizes(pickle.Unpickler):
    """Load the pickle of our own intact file without tensors, to collect the item sizes of its storages by key."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.item_sizes: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        return (lambda *_: None) if name.startswith("_rebuild") else super().find_class(module, name)

    def persistent_load(self, persistent_id: Any) -> None:
        _, storage_type, key, *_ = persistent_id
        self.item_sizes[key] = storage_type.dtype.itemsize


def _legacy_fields(data: bytes) -> list[Field]:
    """Divide a file of torch.save before torch 1.6: five pickles, then the length and the bytes of each storage."""
    file = io.BytesIO(data)
    ends: list[tuple[int, str]] = []
    pickles = {}
    for label in ("magic", "protocol version", "system information", "pickle", "pickle of keys"):
        start = file.tell()
        for _ in pickletools.genops(file):
            pass
        ends.append((file.tell(), label))
        pickles[label] = data[start : file.tell()]
    sizes = _StorageSizes(pickles["pickle"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these storages are deprecated
        sizes.load()
    for key in pickle.loads(pickles["pickle of keys"]):
        at = ends[-1][0]
        ends.append((at + 8, "count of elements"))
        ends.append((at + 8 + struct.unpack_from("<q", data, at)[0] * sizes.item_sizes[key], DATA))
    return _fill_gaps([], ends)
