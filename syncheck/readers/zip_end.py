"""Check the end records of a zip against its directory.

zipfile trusts the directory size in the end records and ignores the number of entries; torch reads exactly this number
of entries. If they disagree, torch would load other tensors than syncheck compares.
Layout: PKWARE's APPNOTE.TXT, 4.3.14 to 4.3.16. torch's checks are in mz_zip_reader_read_central_dir of miniz
(caffe2/serialize).
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO
    from zipfile import ZipInfo

Fault = tuple[str, str]
"""Found and needed, as in MalformedFile."""

_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<28x3H12x")  # the lengths of name, extra field and comment
_UTF_8 = 0x800
_LOCATOR = struct.Struct("<4sLQL")
# Values of the old 2- and 4-byte fields if the number is in the zip64 record.
_SHORT, _LONG = 0xFFFF, 0xFFFFFFFF
_ONE_DISK: Fault = ("a multi-disk zip", "a single file")


def find_fault(file: BinaryIO, infos: Sequence[ZipInfo]) -> Fault | None:
    """Return the first fault of the directory or its end records, or None.

    infos: zipfile's entries of this file. Raises ValueError or struct.error if the file became shorter.
    """
    end_offset = _find_end(file)
    end_of_directory = end_offset - _LOCATOR.size - _END_64.size
    file.seek(max(0, end_of_directory))
    before, end = file.read(min(end_offset, _LOCATOR.size + _END_64.size)), file.read(_END.size)
    _, disk, first_disk, on_disk, count, size, offset, _ = _END.unpack(end)
    if disk or first_disk or any(info.volume for info in infos):
        return _ONE_DISK
    if not before[-_LOCATOR.size :].startswith(b"PK\x06\x07"):
        return _check_counts((on_disk, count), (size, offset), len(infos), end_offset) or _check_last_entry(
            file, infos, end_offset
        )
    _, disk, stated, disks = _LOCATOR.unpack(before[-_LOCATOR.size :])
    if disk or disks != 1:
        return _ONE_DISK
    if stated != end_of_directory or not before.startswith(b"PK\x06\x06"):
        return f"a zip64 record at byte {stated}", f"one at byte {end_of_directory}, before its locator"
    _, length, _, _, disk, first_disk, *counts, size_64, offset_64 = _END_64.unpack_from(before)
    if disk or first_disk:
        return _ONE_DISK
    if length != _END_64.size - 12:  # the length excludes the signature and itself
        return f"a zip64 record of {length} bytes", str(_END_64.size - 12)
    for found, needed, instead in (
        *((number, len(infos), _SHORT) for number in (on_disk, count)),
        *((number, new, _LONG) for number, new in ((size, size_64), (offset, offset_64))),
    ):
        if found not in (needed, instead):
            return f"{found} in the record before zip64", f"{needed}, or {instead}"
    return _check_counts(
        (counts[0], counts[1]), (size_64, offset_64), len(infos), end_of_directory
    ) or _check_last_entry(file, infos, end_of_directory)


def _check_counts(
    counts: tuple[int, int], directory: tuple[int, int], records: int, end_of_directory: int
) -> Fault | None:
    """Compare counts of records, and (size, offset) of the directory, with the file. end_of_directory: its offset."""
    for count in counts:
        if count != records:
            return f"{records} records in a directory that lists {count}", "equal numbers"
    if sum(directory) != end_of_directory:
        return f"a directory of {directory[0]} bytes at byte {directory[1]}", f"an end at byte {end_of_directory}"
    return None


def _check_last_entry(file: BinaryIO, infos: Sequence[ZipInfo], end_of_directory: int) -> Fault | None:
    """Check the length of the last entry, which zipfile does not. end_of_directory: its offset."""
    if not infos:
        return None
    name = infos[-1].orig_filename.encode("utf-8" if infos[-1].flag_bits & _UTF_8 else "cp437")
    found = len(name), len(infos[-1].extra), len(infos[-1].comment)
    file.seek(end_of_directory - _ENTRY.size - sum(found))
    stated = _ENTRY.unpack(file.read(_ENTRY.size))
    if stated != found:
        return f"an entry of {sum(stated)} bytes with {sum(found)} left", "the length of the entry"
    return None


def _find_end(file: BinaryIO) -> int:
    """Return the offset of the last end record, as zipfile finds it; a comment can follow the record."""
    size = file.seek(0, os.SEEK_END)
    file.seek(size - _END.size)
    if (last := file.read()).startswith(b"PK\x05\x06") and last.endswith(b"\0\0"):
        return size - _END.size
    start = max(0, size - _SHORT - 1 - _END.size)
    file.seek(start)
    return start + file.read().rindex(b"PK\x05\x06")
