"""The zip of a torch.save file: its directory, its records, and the tensors in them.

syncheck reads the directory and the pickle; tensor bytes stay on disk. Their offset comes from the record's local
header, because its extra field, which pads the data to 64 bytes, has another length than in the directory. Layout:
caffe2/serialize/inline_container.cc of torch 2.6 to 2.15.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from typing import IO, TYPE_CHECKING, BinaryIO, cast

from syncheck.errors import MalformedFile, NotACheckpoint, UnsupportedFormat
from syncheck.readers.pickles.locate import Record, locate_tensor
from syncheck.readers.pickles.unpickle import Pickled, unpickle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.readers.pickles.stand_ins import Storage, TensorLocation
    from syncheck.snapshots import Tensor

MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
# Flag bits of records: encrypted, patched, strongly encrypted, masked.
_NOT_STORED = 0x2061
# Limit of the directory in bytes, for more than a million records. Parsed, each takes ten times as much memory.
_MOST_DIRECTORY = 1 << 27
# An MS-DOS attribute. torch.load reads a record with it, or with 0 stored bytes, as empty, and leaves uninitialized
# memory in the tensor: mz_zip_reader_extract_to_mem of miniz, torch's zip reader.
_IS_FOLDER = 0x10
# Records that torch.load reads besides the pickle and the data, if present. _NUMBERS contain an integer.
_NUMBERS, _BESIDE = ("version", ".data/version", ".storage_alignment"), (".data/serialization_id", ".format_version")
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<28x3H12x")  # the lengths of name, extra field and comment
_UTF_8 = 0x800
_LOCATOR = struct.Struct("<4sLQL")
# Values of the old 2- and 4-byte fields if the number is in the zip64 record.
_SHORT, _LONG = 0xFFFF, 0xFFFFFFFF
_ONE_DISK = ("a multi-disk zip", "a single file")
_AGAIN = "save or copy the file again"
_STRANGE = "no library writes this; check the origin of the file"


class _Bounded:
    """A file that limits how much zipfile reads at once."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, size: int = -1) -> bytes:
        if size > _MOST_DIRECTORY:
            raise ValueError(f"a directory of {size} bytes")
        return self._file.read(size)


class Directory:
    """The records of a zip, of which only the directory has been read.

    path: for error messages. start: where `file` begins in the file at `path`.
    """

    def __init__(self, file: BinaryIO, path: str, start: int = 0) -> None:
        self.opened, self.start = os.fstat(file.fileno()), start
        self.file, self.path = file, path
        self.size = file.seek(0, os.SEEK_END)
        self.locations: dict[str, tuple[int, int]] = {}
        self.records = self._read_directory()

    def _read_directory(self) -> dict[str, zipfile.ZipInfo]:
        """Return the records by name. Raises MalformedFile for a directory that torch.save would not write."""
        place = "zip directory"
        try:
            infos = zipfile.ZipFile(cast("IO[bytes]", _Bounded(self.file))).infolist()
            wrong = _find_fault(self.file, infos)
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, struct.error) as error:
            needed = "a directory at the end of the file"
            raise self.malformed(place, str(error), needed, f"it is cut short or damaged: {_AGAIN}") from None
        if any(info.filename != info.orig_filename for info in infos):  # a NUL, which ends the name for other readers
            raise self.malformed(place, "a record with two names", "one", _STRANGE)
        records = {info.filename: info for info in infos}
        if len(records) != len(infos):
            raise self.malformed(place, "two records with the same name", "", _AGAIN)
        first = min((info.header_offset for info in infos), default=0)
        if first:  # several concatenated zips: the directory at the end belongs to the last zip
            folder = "if it belongs to a torch.distributed.checkpoint folder, pass the folder"
            raise self.malformed(place, f"the records begin at byte {first}", "byte 0", folder)
        if wrong:
            raise self.malformed(place, *wrong, _AGAIN)
        return records

    def locate(self, name: str) -> tuple[int, int]:
        """Return (offset, size) in bytes of a record's data."""
        if name in self.locations:
            return self.locations[name]
        info = self.records.get(name)
        if info is None:
            raise self.malformed(name, "no such record", "", _AGAIN)
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _NOT_STORED:
            raise self._unsupported(name)
        if info.external_attr & _IS_FOLDER:
            raise self.malformed(name, "a record that is marked as a folder", "a file's attributes", _AGAIN)
        if info.compress_size != info.file_size:
            found = f"{info.compress_size} bytes stored of {info.file_size}"
            raise self.malformed(name, found, "equal sizes, because records are not compressed", _AGAIN)
        if info.header_offset > self.size:  # the offset may exceed the range of seek()
            raise self.malformed(name, "a record beyond the file's end", "a local header", _AGAIN)
        self.file.seek(info.header_offset)
        head = self.file.read(_LOCAL_HEADER.size)
        if len(head) < _LOCAL_HEADER.size or not head.startswith(MAGIC):
            raise self.malformed(name, "no record at the offset in the directory", "a local header", _AGAIN)
        _, _, flags, method, _, _, _, compressed, size, name_length, extra_length = _LOCAL_HEADER.unpack(head)
        if method != zipfile.ZIP_STORED or flags & _NOT_STORED:
            raise self._unsupported(name)
        if not {size, compressed} <= {0, 0xFFFFFFFF, info.file_size}:  # 0 if the sizes follow the data
            found = f"{info.file_size} bytes in the directory, {size} before the record"
            raise self.malformed(name, found, "one size", _AGAIN)
        offset = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if self.file.read(name_length) != info.orig_filename.encode("utf-8"):
            raise self.malformed(name, "its local header has another name than the directory", "the same name", _AGAIN)
        if offset + info.file_size > self.size:
            raise self.malformed(
                name,
                f"ends at byte {offset + info.file_size}",
                f"at most {self.size}, the file's size",
                _AGAIN,
            )
        self.locations[name] = offset, info.file_size
        return self.locations[name]

    def read_record(self, name: str) -> bytes:
        """Return a record's data. Raises MalformedFile if it is missing or does not match its CRC-32.

        A flipped bit can turn a pickle into another valid pickle. A stored CRC-32 of 0 is not checked.
        """
        offset, size = self.locate(name)
        self.file.seek(offset)
        data = self.file.read(size)
        stored = self.records[name].CRC
        if stored and stored != zlib.crc32(data):  # 0 if checksums were disabled when saving
            raise self.malformed(name, "the bytes do not match the CRC-32 stored for them", "what was saved", _AGAIN)
        return data

    def check_overlaps(self) -> None:
        """Raise MalformedFile if two records overlap, because a small file could then claim a huge amount of data."""
        end, before = 0, ""
        for (start, size), name in sorted((location, name) for name, location in self.locations.items()):
            if start < end and size:
                raise self.malformed(name, f"it begins at byte {start}, within {before}", "separate records", _STRANGE)
            end, before = max(end, start + size), name

    def _unsupported(self, name: str) -> UnsupportedFormat:
        return UnsupportedFormat(
            self.path, place=name, found="a compressed or encrypted record",
            needed="an uncompressed record, as torch.save writes", next_step="unpack it, or save again with torch.save",
        )  # fmt: skip

    def malformed(self, record: str, found: str, needed: str, next_step: str) -> MalformedFile:
        """Return the error of a record."""
        return MalformedFile(self.path, place=record, found=found, needed=needed, next_step=next_step)


class Archive:
    """A torch.save zip, of which only the directory has been read. Raises NotACheckpoint for another kind of zip."""

    def __init__(self, directory: Directory) -> None:
        self.directory, self.path = directory, directory.path
        self.big_endian = False
        self._key_prefix = ""
        pickles = [name for name in directory.records if is_pickle(name)]
        if len(pickles) != 1:
            found = f"a zip with {len(pickles)} records data.pkl"
            raise NotACheckpoint(self.path, found=found, needed="one, as torch.save writes")
        self.stem = pickles[0].removesuffix("data.pkl")
        for name in _NUMBERS:
            self._check_number(name)
        for name in _BESIDE:
            if self.stem + name in directory.records:
                directory.locate(self.stem + name)

    def _check_number(self, name: str) -> None:
        """Check a record that torch.load reads as a number, if it is present."""
        name = self.stem + name
        if name in self.directory.records:
            number = self.directory.read_record(name)
            if not number.strip().isdigit():
                raise self.directory.malformed(name, repr(number[:20]), "a whole number", _AGAIN)

    def unpickle(self, key_prefix: str = "") -> Pickled:
        """Read the pickle and the byte order. Raises as `pickles.unpickle`, and MalformedFile.

        key_prefix: distinguishes the storages of several archives.
        """
        self._key_prefix = key_prefix
        pickled = self.unpickle_record("data.pkl")
        self.big_endian = self._is_big_endian()
        return pickled

    def unpickle_record(self, name: str) -> Pickled:
        """Read the pickle in a record. name: without the stem. Raises as `pickles.unpickle`, and MalformedFile."""
        name = self.stem + name
        return unpickle(self.directory.read_record(name), self.path, name, key_prefix=self._key_prefix)

    def read_text(self, name: str) -> str:
        """Return the text in a record, which may be compressed. name: with the stem. Raises as `zipfile` does."""
        directory = self.directory
        with zipfile.ZipFile(directory.file) as archive:  # whose directory has been checked
            return archive.read(directory.records[name]).decode("utf-8", "replace")

    def _is_big_endian(self) -> bool:
        """Whether tensors are stored big-endian; files before torch 2.1 lack the record and are little-endian."""
        name = self.stem + "byteorder"
        if name not in self.directory.records:
            return False
        order = self.directory.read_record(name)
        if order not in (b"little", b"big"):
            raise self.directory.malformed(name, repr(order[:20]), "little or big", _AGAIN)
        return order == b"big"

    def tensor(self, name: str, location: TensorLocation, folder: str = "data") -> Tensor:
        """Check that a tensor is within its record, and return it with its offset in the file.

        folder: of the records; TorchScript has another one for the constants of its code.
        """
        directory = self.directory

        def locate_record(storage: Storage) -> Record:
            record = f"{self.stem}{folder}/{storage.key.removeprefix(self._key_prefix)}"
            start, size = directory.locate(record)
            return Record(record, directory.start + start, size, directory.records[record].CRC)

        return locate_tensor(name, location, self.path, locate_record, directory.opened, big_endian=self.big_endian)


def is_pickle(name: str) -> bool:
    """Whether a record is the pickle of a torch.save zip."""
    return name == "data.pkl" or name.endswith("/data.pkl")


def _find_fault(file: BinaryIO, infos: Sequence[zipfile.ZipInfo]) -> tuple[str, str] | None:
    """Return the first fault of a zip's directory or its end records, as found and needed, or None.

    zipfile trusts the directory size in the end records and ignores the number of entries; torch reads exactly this
    number of entries. If they disagree, torch would load other tensors than syncheck compares.
    Layout: PKWARE's APPNOTE.TXT, 4.3.14 to 4.3.16. torch's checks are in mz_zip_reader_read_central_dir of miniz.
    infos: zipfile's entries of this file. Raises ValueError or struct.error if the file became shorter.
    """
    end = _find_end(file)  # of the directory, unless zip64 records follow it
    start_64 = end - _LOCATOR.size - _END_64.size
    file.seek(max(0, start_64))
    before, last = file.read(min(end, _LOCATOR.size + _END_64.size)), file.read(_END.size)
    _, disk, first_disk, *counts, size, offset, _ = _END.unpack(last)
    if disk or first_disk or any(info.volume for info in infos):
        return _ONE_DISK
    locator = before[-_LOCATOR.size :]
    if locator.startswith(b"PK\x06\x07"):
        _, disk, stated, disks = _LOCATOR.unpack(locator)
        if disk or disks != 1:
            return _ONE_DISK
        if stated != start_64 or not before.startswith(b"PK\x06\x06"):
            return f"a zip64 record at byte {stated}", f"one at byte {start_64}, before its locator"
        old = (*counts, size, offset)
        _, length, _, _, disk, first_disk, *counts, size, offset = _END_64.unpack_from(before)
        if disk or first_disk:
            return _ONE_DISK
        if length != _END_64.size - 12:  # the length excludes the signature and itself
            return f"a zip64 record of {length} bytes", str(_END_64.size - 12)
        new = (len(infos), len(infos), size, offset)
        for found, needed, instead in zip(old, new, (_SHORT, _SHORT, _LONG, _LONG), strict=True):
            if found not in (needed, instead):
                return f"{found} in the record before zip64", f"{needed}, or {instead}"
        end = start_64
    for count in counts:
        if count != len(infos):
            return f"{len(infos)} records in a directory that lists {count}", "equal numbers"
    if size + offset != end:
        return f"a directory of {size} bytes at byte {offset}", f"an end at byte {end}"
    return _check_last_entry(file, infos[-1], end) if infos else None


def _check_last_entry(file: BinaryIO, info: zipfile.ZipInfo, end: int) -> tuple[str, str] | None:
    """Check the length of the last entry, which zipfile does not. end: of the directory."""
    name = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF_8 else "cp437")
    found = len(name), len(info.extra), len(info.comment)
    file.seek(end - _ENTRY.size - sum(found))
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
