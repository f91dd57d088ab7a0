"""The last records of a zip: whether the directory is as long, and has as many entries, as they say.

zipfile reads as many bytes of directory as they say, and ignores the number of entries; torch reads that many entries
and no others. Where the two do not agree, torch would load other tensors than those that are compared.
Layout: APPNOTE.TXT of PKWARE, 4.3.14 to 4.3.16; what torch looks at is in mz_zip_reader_read_central_dir of miniz,
caffe2/serialize.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO
    from zipfile import ZipInfo

Wrong = tuple[str, str]
"""What is found, and what is needed."""

_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<28x3H12x")  # the lengths of name, extra field and comment
_UTF_8 = 0x800
_LOCATOR = struct.Struct("<4sLQL")
# What stands in the old fields, of 2 and 4 bytes, of numbers that may be in the new ones.
_SHORT, _LONG = 0xFFFF, 0xFFFFFFFF
_ONE_DISK: Wrong = ("a part of a zip of several disks", "a whole one")


def fault(file: BinaryIO, infos: Sequence[ZipInfo]) -> Wrong | None:
    """Say what the directory, or its end, states wrongly, and what it ought to; None where nothing is wrong.

    infos: what zipfile has found in this file. Raises ValueError or struct.error where it is no longer there.
    """
    at = _place(file)
    place = at - _LOCATOR.size - _END_64.size
    file.seek(max(0, place))
    before, end = file.read(min(at, _LOCATOR.size + _END_64.size)), file.read(_END.size)
    _, disk, first_disk, here, count, size, offset, _ = _END.unpack(end)
    if disk or first_disk or any(info.volume for info in infos):
        return _ONE_DISK
    if not before[-_LOCATOR.size :].startswith(b"PK\x06\x07"):
        return _counts((here, count), (size, offset), len(infos), at) or _last(file, infos, at)
    _, disk, stated, disks = _LOCATOR.unpack(before[-_LOCATOR.size :])
    if disk or disks != 1:
        return _ONE_DISK
    if stated != place or not before.startswith(b"PK\x06\x06"):
        return f"a zip64 record at byte {stated}", f"one at byte {place}, before its locator"
    _, length, _, _, disk, first_disk, *counts, size_64, offset_64 = _END_64.unpack_from(before)
    if disk or first_disk:
        return _ONE_DISK
    if length != _END_64.size - 12:  # it does not count itself, nor the signature
        return f"a zip64 record of {length} bytes", str(_END_64.size - 12)
    for found, needed, instead in (
        *((number, len(infos), _SHORT) for number in (here, count)),
        *((number, new, _LONG) for number, new in ((size, size_64), (offset, offset_64))),
    ):
        if found not in (needed, instead):
            return f"{found} in the record before zip64", f"{needed}, or {instead}"
    return _counts((counts[0], counts[1]), (size_64, offset_64), len(infos), place) or _last(file, infos, place)


def _counts(counts: tuple[int, int], directory: tuple[int, int], records: int, place: int) -> Wrong | None:
    """Hold the numbers of records, and (size, offset) of the directory, against what is there; place: its end."""
    for count in counts:
        if count != records:
            return f"{records} records in a directory whose end says {count}", "the same number"
    if sum(directory) != place:
        return f"a directory of {directory[0]} bytes at byte {directory[1]}", f"that it ends at byte {place}"
    return None


def _last(file: BinaryIO, infos: Sequence[ZipInfo], place: int) -> Wrong | None:
    """Look whether the last entry is as long as it says: zipfile takes what is there of it. place: where it ends."""
    if not infos:
        return None
    name = infos[-1].orig_filename.encode("utf-8" if infos[-1].flag_bits & _UTF_8 else "cp437")
    found = len(name), len(infos[-1].extra), len(infos[-1].comment)
    file.seek(place - _ENTRY.size - sum(found))
    stated = _ENTRY.unpack(file.read(_ENTRY.size))
    if stated != found:
        return f"an entry of {sum(stated)} bytes where {sum(found)} are left", "as many as it says"
    return None


def _place(file: BinaryIO) -> int:
    """Return where the last record begins, as zipfile finds it; a comment, or anything, may be behind it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(size - _END.size)
    if (last := file.read()).startswith(b"PK\x05\x06") and last.endswith(b"\0\0"):
        return size - _END.size
    start = max(0, size - _SHORT - 1 - _END.size)
    file.seek(start)
    return start + file.read().rindex(b"PK\x05\x06")
