"""Mutations of checkpoint files: random damage of every kind, and mutations inside an intact frame.

A zip or a header with a wrong size is refused at once. To reach the code behind these checks, `mutate_zip` and
`mutate_safetensors` change the contents and write a consistent frame around them.
"""

from __future__ import annotations

import io
import json
import struct
import warnings
import zipfile
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from fuzz.fields import Field, find_fields, zip_fields

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    Files = dict[str, bytes]
    Mutate = Callable[[bytes, int], bytes]
    """A mutation of bytes up to a maximum size, for example `atheris.Mutate`."""

KINDS = (
    "truncate", "flip a bit", "flip many", "insert", "delete", "swap", "zero", "0xff", "duplicate", "overwrite",
    "append", "edge",
)  # fmt: skip
_LARGEST_BLOCK = 4096
_LARGEST_CONTENT = 1 << 16
# Values at the limits of counts, sizes and offsets.
_EDGES = (0, 1, 2, 3, 8, 30, 45, 46, 63, 64, 255, 0xFFFE, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
_find_fields = lru_cache(64)(find_fields)  # few files, and many mutations of each file


def damage(random: Random, kind: str, data: bytes, fields: list[Field], other: bytes) -> bytes:
    """Return a copy with one damage. other: a similar file of another training run, the source of foreign bytes."""
    start = _choose_offset(random, data, fields)
    size = min(len(data) - start, int(_LARGEST_BLOCK ** random.random()))  # small blocks are as frequent as large ones
    head, block, tail = data[:start], data[start : start + size], data[start + size :]
    match kind:
        case "truncate":
            return head
        case "flip a bit":
            return _flip(random, data, [start])
        case "flip many":
            count = int(2 * 64 ** random.random())
            return _flip(random, data, [_choose_offset(random, data, fields) for _ in range(count)])
        case "insert":
            return head + random.randbytes(size) + block + tail
        case "delete":
            return head + tail
        case "swap":
            return _swap(random, data, fields, start, size)
        case "zero":
            return head + bytes(size) + tail
        case "0xff":
            return head + b"\xff" * size + tail
        case "duplicate":
            return head + block + block + tail
        case "overwrite":
            at = start if random.random() < 0.5 else random.randrange(len(other))
            piece = other[at : at + size]
            return head + piece + data[start + len(piece) :]
        case "append":
            return data + (other[-size:] if random.random() < 0.3 else random.randbytes(size))
        case "edge":
            return _write_edge(random, data, fields)
    raise ValueError(kind)


def _choose_offset(random: Random, data: bytes, fields: list[Field]) -> int:
    """Choose any byte, or with equal probability a byte of any field, to hit small fields as often as large ones."""
    if random.random() < 0.5:
        return random.randrange(len(data))
    field = random.choice(fields)
    return random.randrange(field.start, field.stop)


def _flip(random: Random, data: bytes, offsets: list[int]) -> bytes:
    flipped = bytearray(data)
    for at in offsets:
        flipped[at] ^= 1 << random.randrange(8)
    return bytes(flipped)


def _swap(random: Random, data: bytes, fields: list[Field], start: int, size: int) -> bytes:
    """Swap two blocks, or two fields with equal label and size, for example the records of two tensors."""
    similar: dict[tuple[str, int], list[Field]] = {}
    for field in fields:
        similar.setdefault((field.label, field.stop - field.start), []).append(field)
    pairs = [group for group in similar.values() if len(group) > 1]
    if pairs and random.random() < 0.5:
        first, second = sorted(random.sample(random.choice(pairs), 2))
        one, two, size = first.start, second.start, first.stop - first.start
    else:
        one, two = sorted((start, _choose_offset(random, data, fields)))
        size = min(size, two - one, len(data) - two)
    a, b = data[one : one + size], data[two : two + size]
    return data[:one] + b + data[one + size : two] + a + data[two + size :]


def _write_edge(random: Random, data: bytes, fields: list[Field]) -> bytes:
    """Write a limit value, or a value close to the present value, into a small field, for example an offset."""
    numbers = [field for field in fields if field.stop - field.start in (2, 4, 8)]
    start, stop, _ = random.choice(numbers or fields)
    size = min(stop - start, 8)
    present = int.from_bytes(data[start : start + size], "little")
    value = random.choice((*_EDGES, present + 1, present - 1, len(data), start))
    return data[:start] + (value % (1 << 8 * size)).to_bytes(size, "little") + data[start + size :]


def damage_checkpoint(random: Random, kind: str, files: Files, other: Files) -> Files:
    """Return a checkpoint with one damage: in one file, or two of its files swapped."""
    while True:
        if kind == "swap" and len(files) > 1 and random.random() < 0.25:
            one, two = random.sample(sorted(files), 2)
            damaged = {**files, one: files[two], two: files[one]}
        else:
            name = random.choice(sorted(files))
            data = files[name]
            damaged = {**files, name: damage(random, kind, data, _find_fields(name, data), other.get(name, data))}
        if damaged != files:
            return damaged


def damaged_labels(before: Files, after: Files) -> set[str]:
    """Return the labels of the damaged fields. If bytes moved, all fields after the first change are damaged."""
    labels = set()
    for name, data in before.items():
        new = after[name]
        if data == new:
            continue
        fields = _find_fields(name, data)
        if len(data) == len(new):
            changed = np.flatnonzero(np.frombuffer(data, np.uint8) != np.frombuffer(new, np.uint8))
            stops = np.array([field.stop for field in fields])
            labels |= {fields[i].label for i in np.unique(np.searchsorted(stops, changed, "right"))}
        elif new.startswith(data):
            labels.add("behind the end")
        else:
            first = next((i for i, (a, b) in enumerate(zip(data, new, strict=False)) if a != b), len(new))
            label = next(field.label for field in fields if field.stop > first)
            labels.add(f"{label} and all behind it")
    return labels


def read_records(data: bytes) -> list[tuple[str, bytes]]:
    """Return name and contents of each record of a zip; an empty list if it is not an intact zip."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # noqa: BLE001 - the fuzzer's data can break zipfile in any way
        return []


def write_zip(records: list[tuple[str, bytes]]) -> bytes:
    """Write uncompressed records, as torch.save does."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # duplicate names are intended
        for name, content in records:
            archive.writestr(zipfile.ZipInfo(name.encode(errors="replace").decode()), content)
    return file.getvalue()


def mutate_zip(data: bytes, mutate: Mutate, random: Random) -> bytes:
    """Mutate the pickle, a record, the list of records, or header fields, and keep the rest consistent."""
    records = read_records(data)
    if not records or random.random() < 0.1:
        return mutate(data, _LARGEST_CONTENT)
    choice = random.random()
    at = random.randrange(len(records))
    name, content = records[at]
    if choice < 0.5:
        at = next((i for i, (name, _) in enumerate(records) if name.endswith("data.pkl")), 0)
        records[at] = (records[at][0], mutate(records[at][1], _LARGEST_CONTENT))
    elif choice < 0.6:
        records[at] = (name, mutate(content, _LARGEST_BLOCK))
    elif choice < 0.65:
        records[at] = (random.choice(records)[0], content)
    elif choice < 0.7:
        del records[at]
    written = write_zip(records)
    if choice >= 0.7:
        fields = zip_fields(written)
        for _ in range(random.choice((1, 1, 2, 3))):
            written = _write_edge(random, written, fields)
    return written


def mutate_safetensors(data: bytes, mutate: Mutate, random: Random) -> bytes:
    """Mutate the JSON header and write its length. Usually adapt the size of the file to the header too."""
    if len(data) < 9 or random.random() < 0.1:
        return mutate(data, _LARGEST_CONTENT)
    length = struct.unpack_from("<Q", data)[0]
    header, rest = mutate(data[8 : 8 + length], 8192), data[8 + length :]
    if random.random() < 0.75:
        rest = bytes(_data_size(header, len(rest)))
    return struct.pack("<Q", len(header)) + header + rest


def _data_size(header: bytes, default: int) -> int:
    """Return the size of the tensor data that a header states."""
    try:
        entries = json.loads(header).values()
        end: object = max(entry["data_offsets"][1] for entry in entries if "data_offsets" in entry)
    except Exception:  # noqa: BLE001 - a mutated header can have any type anywhere
        return default
    return end if isinstance(end, int) and 0 <= end <= _LARGEST_CONTENT else default
