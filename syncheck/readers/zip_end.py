"""The records at the end of a zip, which zipfile trusts and torch checks.

zipfile finds the entries of the directory by its size, and ignores their number; torch reads exactly this number of
entries. If they disagree, torch would load other tensors than syncheck compares.
Layout: PKWARE's APPNOTE.TXT, 4.3.14 to 4.3.16. torch's checks are in mz_zip_reader_read_central_dir of miniz.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Sequence

# The records from the last entry of the directory to the end of the file: a zip64 end record with its locator, if some
# number needs more than 2 or 4 bytes, and the old end record.
_ENTRY = struct.Struct("<28x3H12x")  # the lengths of name, extra field and comment
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_END_64_MAGIC, _LOCATOR_MAGIC, _END_MAGIC = b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06"
# Values of fields of 2 and 4 bytes whose number is in a zip64 record.
_SHORT_IN_ZIP_64, IN_ZIP_64 = 0xFFFF, 0xFFFFFFFF
_MOST_COMMENT = 0xFFFF  # bytes
_UTF_8 = 0x800  # the flag bit of an entry whose name is UTF-8


class Fault(NamedTuple):
    """The fault of a directory, and the expectation."""

    problem: str
    needed: str


_SEVERAL_DISKS = Fault("a multi-disk zip", "a single file")


class _End(NamedTuple):
    """The numbers in an end record."""

    disk: int
    first_disk: int
    entries_on_disk: int
    entries: int
    size: int
    """Of the directory, in bytes, as its offset."""
    offset: int


def find_fault(file: BinaryIO, infos: Sequence[zipfile.ZipInfo]) -> Fault | None:
    """Return the first fault of a zip's directory or its end records, or None.

    infos: zipfile's entries of this file.
    Raises ValueError or struct.error if the file became shorter.
    """
    end_offset = _find_end(file)
    offset_64 = end_offset - _LOCATOR.size - _END_64.size
    file.seek(max(0, offset_64))
    records_64 = file.read(min(end_offset, _LOCATOR.size + _END_64.size))
    _, *numbers, _ = _END.unpack(file.read(_END.size))
    end = _End(*numbers)
    has_further_disks = any(info.volume for info in infos)
    if has_further_disks or (end.disk, end.first_disk) != (0, 0):
        return _SEVERAL_DISKS

    locator = records_64[-_LOCATOR.size :]
    if not locator.startswith(_LOCATOR_MAGIC):
        return _check_directory(file, infos, end, end_offset)

    fault = _check_records_64(locator, records_64, offset_64)
    if fault is not None:
        return fault

    _, _, _, _, *numbers = _END_64.unpack_from(records_64)
    end_64 = _End(*numbers)
    # The zip64 record replaces numbers too large for the old record.
    return _compare_ends(end, end_64, len(infos)) or _check_directory(file, infos, end_64, offset_64)


def _find_end(file: BinaryIO) -> int:
    """Return the offset of the last end record, as zipfile finds it; a comment can follow the record."""
    size = file.seek(0, os.SEEK_END)
    file.seek(size - _END.size)
    last_bytes = file.read()
    has_no_comment = last_bytes.endswith(b"\0\0")
    if has_no_comment and last_bytes.startswith(_END_MAGIC):
        return size - _END.size

    start = max(0, size - _MOST_COMMENT - 1 - _END.size)
    file.seek(start)
    return start + file.read().rindex(_END_MAGIC)


def _check_records_64(locator: bytes, records_64: bytes, offset_64: int) -> Fault | None:
    """Return the first fault of the zip64 records themselves, or None.

    records_64: the zip64 end record and its locator.
    offset_64: where they must begin.
    """
    _, disk, start, disk_count = _LOCATOR.unpack(locator)
    if (disk, disk_count) != (0, 1):
        return _SEVERAL_DISKS
    if start != offset_64 or not records_64.startswith(_END_64_MAGIC):
        return Fault(f"a zip64 record at byte {start}", f"one at byte {offset_64}, before its locator")

    _, length, _, _, disk, first_disk, *_ = _END_64.unpack_from(records_64)
    if (disk, first_disk) != (0, 0):
        return _SEVERAL_DISKS

    # The length excludes the signature and itself.
    expected_length = _END_64.size - 12
    if length != expected_length:
        return Fault(f"a zip64 record of {length} bytes", str(expected_length))
    return None


def _compare_ends(end: _End, end_64: _End, count: int) -> Fault | None:
    """Return the first field of an end record that differs from its zip64 record and does not refer to it, or None."""
    fields = (
        (end.entries_on_disk, count, _SHORT_IN_ZIP_64),
        (end.entries, count, _SHORT_IN_ZIP_64),
        (end.size, end_64.size, IN_ZIP_64),
        (end.offset, end_64.offset, IN_ZIP_64),
    )
    for number, expected, reference in fields:
        if number not in (expected, reference):
            return Fault(f"{number} in the record before zip64", f"{expected}, or {reference}")
    return None


def _check_directory(file: BinaryIO, infos: Sequence[zipfile.ZipInfo], end: _End, directory_end: int) -> Fault | None:
    """Return the first contradiction between an end record and the directory before it, or None."""
    for count in (end.entries_on_disk, end.entries):
        if count != len(infos):
            return Fault(f"{len(infos)} records in a directory that lists {count}", "equal numbers")

    if end.size + end.offset != directory_end:
        problem = f"a directory of {end.size} bytes at byte {end.offset}"
        return Fault(problem, f"an end at byte {directory_end}")
    return _check_last_entry(file, infos[-1], directory_end) if infos else None


def _check_last_entry(file: BinaryIO, info: zipfile.ZipInfo, directory_end: int) -> Fault | None:
    """Check the length of the last entry, which zipfile does not."""
    encoding = "utf-8" if info.flag_bits & _UTF_8 else "cp437"
    name = info.orig_filename.encode(encoding)
    lengths = len(name), len(info.extra), len(info.comment)
    file.seek(directory_end - _ENTRY.size - sum(lengths))
    stated_lengths = _ENTRY.unpack(file.read(_ENTRY.size))
    if stated_lengths == lengths:
        return None
    return Fault(f"an entry of {sum(stated_lengths)} bytes with {sum(lengths)} left", "the length of the entry")
