"""Mutations that know a format's frame, so that what is inside is reached: checks of the frame stop all others.

A mutator takes (data, mutate, random numbers) and returns new data; `mutate` is the fuzzer's own, which knows nothing.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    Mutate = Callable[[bytes, int], bytes]

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_EDGES = (0, 1, 2, 3, 8, 30, 45, 46, 63, 64, 255, 0xFFFE, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
_MOST_DATA = 1 << 16

Record = tuple[str, bytes]


def records_of(data: bytes) -> list[Record] | None:
    """Return the records of a zip in their order; None where it is none."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # noqa: BLE001 - the input of a fuzzer; whatever is wrong with it
        return None


def zip_of(records: list[Record]) -> bytearray:
    """Write records as torch.save does: stored, without padding."""
    data, directory = bytearray(), bytearray()
    for name, content in records:
        coded, crc, size, at = name.encode(errors="replace"), zlib.crc32(content), len(content), len(data)
        data += _LOCAL.pack(b"PK\x03\x04", 20, 0x800, 0, 0, 0, crc, size, size, len(coded), 0) + coded + content
        directory += _CENTRAL.pack(
            b"PK\x01\x02", 20, 20, 0x800, 0, 0, 0, crc, size, size, len(coded), 0, 0, 0, 0, 0, at
        )
        directory += coded
    end = _END.pack(b"PK\x05\x06", 0, 0, len(records), len(records), len(directory), len(data), 0)
    return data + directory + end


def zipped(data: bytes, mutate: Mutate, numbers: random.Random) -> bytes:
    """Mutate the pickle, a record, the list of records, or a field of a header, and keep the rest in order."""
    records = records_of(data)
    if not records or numbers.random() < 0.1:
        return mutate(data, _MOST_DATA)
    choice = numbers.random()
    if choice < 0.5:
        at = next((i for i, (name, _) in enumerate(records) if name.endswith("data.pkl")), 0)
        records[at] = (records[at][0], mutate(records[at][1], _MOST_DATA))
    elif choice < 0.6:
        at = numbers.randrange(len(records))
        records[at] = (records[at][0], mutate(records[at][1], 4096))
    elif choice < 0.7:
        at, other = numbers.randrange(len(records)), numbers.randrange(len(records))
        if numbers.random() < 0.5:
            records[at] = (records[other][0], records[at][1])
        else:
            del records[at]
    written = zip_of(records)
    if choice >= 0.7:
        for _ in range(numbers.choice((1, 1, 2, 3))):
            _damage(written, numbers)
    return bytes(written)


def _damage(data: bytearray, numbers: random.Random) -> None:
    """Put an edge of its range, or a number near its own, into a field of some header."""
    magic, layout = numbers.choice(((b"PK\x03\x04", _LOCAL), (b"PK\x01\x02", _CENTRAL), (b"PK\x05\x06", _END)))
    places = [i for i in range(len(data) - layout.size + 1) if data.startswith(magic, i)]
    if not places:
        return
    at = numbers.choice(places)
    values = list(layout.unpack_from(data, at))
    field = numbers.randrange(1, len(values))
    values[field] = numbers.choice((*_EDGES, values[field] + 1, values[field] - 1, len(data), at))
    try:
        layout.pack_into(data, at, *values)
    except struct.error:  # beyond the field's width
        values[field] = 0xFFFF
        layout.pack_into(data, at, *values)


def safetensors(data: bytes, mutate: Mutate, numbers: random.Random) -> bytes:
    """Mutate the JSON header, then mostly write its true length and give the file the bytes that it asks for."""
    if len(data) < 9 or numbers.random() < 0.1:
        return mutate(data, _MOST_DATA)
    length = struct.unpack_from("<Q", data)[0]
    header, rest = data[8 : 8 + length], data[8 + length :]
    header = mutate(header, 8192)
    if numbers.random() < 0.75:
        rest = bytes(_asked_for(header, len(rest)))
    return struct.pack("<Q", len(header)) + header + rest


def _asked_for(header: bytes, otherwise: int) -> int:
    """Return where the last tensor ends by the header's own words."""
    try:
        entries = json.loads(header).values()
        end: object = max(entry["data_offsets"][1] for entry in entries if "data_offsets" in entry)
    except Exception:  # noqa: BLE001 - as above
        return otherwise
    return end if isinstance(end, int) and 0 <= end <= _MOST_DATA else otherwise
