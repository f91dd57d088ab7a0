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
from syncheck.readers.zip_end import IN_ZIP_64, find_fault

if TYPE_CHECKING:
    from syncheck.readers.pickles.stand_ins import Storage, TensorLocation
    from syncheck.snapshots import Tensor

MAGIC = b"PK\x03\x04"
PICKLE = "data.pkl"
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
_LABEL = "zip directory"
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
        try:
            infos = zipfile.ZipFile(cast("IO[bytes]", _Bounded(self.file))).infolist()
            fault = find_fault(self.file, infos)
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, struct.error) as error:
            needed = "a directory at the end of the file"
            raise self.malformed(
                _LABEL,
                problem=str(error),
                needed=needed,
                next_step=f"it is cut short or damaged: {_AGAIN}",
            ) from None

        records: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            # A NUL ends the name for other readers.
            if info.filename != info.orig_filename:
                raise self.malformed(
                    _LABEL,
                    problem="a record with two names",
                    needed="one",
                    next_step=_STRANGE,
                )
            records[info.filename] = info

        if len(records) != len(infos):
            raise self.malformed(
                _LABEL,
                problem="two records with the same name",
                next_step=_AGAIN,
            )

        first = min((info.header_offset for info in infos), default=0)
        # Several concatenated zips: the directory at the end belongs to the last zip.
        if first != 0:
            next_step = "if it belongs to a torch.distributed.checkpoint folder, pass the folder"
            raise self.malformed(
                _LABEL,
                problem=f"the records begin at byte {first}",
                needed="byte 0",
                next_step=next_step,
            )
        if fault is not None:
            raise self.malformed(
                _LABEL,
                problem=fault.problem,
                needed=fault.needed,
                next_step=_AGAIN,
            )
        return records

    def locate(self, name: str) -> tuple[int, int]:
        """Return (offset, size) in bytes of a record's data."""
        if name not in self.locations:
            info = self._check_info(name)
            data_offset = self._check_local_header(name, info)
            data_end = data_offset + info.file_size
            if data_end > self.size:
                raise self.malformed(
                    name,
                    problem=f"ends at byte {data_end}",
                    needed=f"at most {self.size}, the file's size",
                    next_step=_AGAIN,
                )
            self.locations[name] = data_offset, info.file_size
        return self.locations[name]

    def _check_info(self, name: str) -> zipfile.ZipInfo:
        """Return the entry of a record in the directory. Raises CheckpointError if its data cannot be read."""
        info = self.records.get(name)
        if info is None:
            raise self.malformed(
                name,
                problem="no such record",
                next_step=_AGAIN,
            )

        self._check_stored(name, info.compress_type, info.flag_bits)
        if info.external_attr & _IS_FOLDER:
            raise self.malformed(
                name,
                problem="a record that is marked as a folder",
                needed="a file's attributes",
                next_step=_AGAIN,
            )
        if info.compress_size != info.file_size:
            problem = f"{info.compress_size} bytes stored of {info.file_size}"
            raise self.malformed(
                name,
                problem=problem,
                needed="equal sizes, because records are not compressed",
                next_step=_AGAIN,
            )
        # The offset may exceed the range of seek().
        if info.header_offset > self.size:
            raise self.malformed(
                name,
                problem="a record beyond the file's end",
                needed="a local header",
                next_step=_AGAIN,
            )
        return info

    def _check_local_header(self, name: str, info: zipfile.ZipInfo) -> int:
        """Return the offset of a record's data. Raises CheckpointError if its local header differs from its entry."""
        self.file.seek(info.header_offset)
        header = self.file.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or not header.startswith(MAGIC):
            raise self.malformed(
                name,
                problem="no record at the offset in the directory",
                needed="a local header",
                next_step=_AGAIN,
            )

        _, _, flags, method, _, _, _, compressed, size, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        self._check_stored(name, method, flags)
        # The sizes are 0 if they follow the data, and the maximum if the extra field contains them.
        if not {size, compressed} <= {0, IN_ZIP_64, info.file_size}:
            problem = f"{info.file_size} bytes in the directory, {size} before the record"
            raise self.malformed(
                name,
                problem=problem,
                needed="one size",
                next_step=_AGAIN,
            )
        if self.file.read(name_length) != info.orig_filename.encode("utf-8"):
            raise self.malformed(
                name,
                problem="its local header has another name than the directory",
                needed="the same name",
                next_step=_AGAIN,
            )

        data_offset: int = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        return data_offset

    def _check_stored(self, name: str, method: int, flags: int) -> None:
        """Raise UnsupportedFormat for a record that is compressed or encrypted."""
        if method == zipfile.ZIP_STORED and not flags & _NOT_STORED:
            return
        raise UnsupportedFormat(
            self.path,
            place=name,
            found="a compressed or encrypted record",
            needed="an uncompressed record, as torch.save writes",
            next_step="unpack it, or save again with torch.save",
        )

    def read_record(self, name: str) -> bytes:
        """Return a record's data. Raises MalformedFile if it is missing or does not match its CRC-32.

        A flipped bit can turn a pickle into another valid pickle. A stored CRC-32 of 0 is not checked.
        """
        offset, size = self.locate(name)
        self.file.seek(offset)
        data = self.file.read(size)
        checksum = self.records[name].CRC
        # The checksum is 0 if checksums were disabled when saving.
        if checksum and checksum != zlib.crc32(data):
            raise self.malformed(
                name,
                problem="the bytes do not match the CRC-32 stored for them",
                needed="what was saved",
                next_step=_AGAIN,
            )
        return data

    def check_overlaps(self) -> None:
        """Raise MalformedFile if two records overlap, because a small file could then claim a huge amount of data."""
        end = 0
        previous_name = ""
        for name in sorted(self.locations, key=self._location_order):
            start, size = self.locations[name]
            if start < end and size > 0:
                problem = f"it begins at byte {start}, within {previous_name}"
                raise self.malformed(
                    name,
                    problem=problem,
                    needed="separate records",
                    next_step=_STRANGE,
                )
            end = max(end, start + size)
            previous_name = name

    def _location_order(self, name: str) -> tuple[tuple[int, int], str]:
        return self.locations[name], name

    def malformed(self, record: str, *, problem: str, next_step: str, needed: str = "") -> MalformedFile:
        """Return the error of a record."""
        return MalformedFile(
            self.path,
            place=record,
            found=problem,
            needed=needed,
            next_step=next_step,
        )


class Archive:
    """A torch.save zip, of which only the directory has been read. Raises NotACheckpoint for another kind of zip.

    key_prefix: distinguishes the storages of several archives.
    """

    def __init__(self, directory: Directory, key_prefix: str = "") -> None:
        self.directory, self.path = directory, directory.path
        self._key_prefix = key_prefix
        pickles = [name for name in directory.records if is_pickle(name)]
        if len(pickles) != 1:
            raise NotACheckpoint(
                self.path,
                found=f"a zip with {len(pickles)} records data.pkl",
                needed="one, as torch.save writes",
            )

        self.stem = pickles[0].removesuffix(PICKLE)
        for name in _NUMBERS:
            self._check_number(name)

        for name in _BESIDE:
            if self.stem + name in directory.records:
                directory.locate(self.stem + name)

        self.big_endian = self._is_big_endian()

    def _check_number(self, name: str) -> None:
        """Check a record that torch.load reads as a number, if it is present."""
        record = self.stem + name
        if record not in self.directory.records:
            return

        number = self.directory.read_record(record)
        if not number.strip().isdigit():
            raise self.directory.malformed(
                record,
                problem=repr(number[:20]),
                needed="a whole number",
                next_step=_AGAIN,
            )

    def read_record(self, name: str) -> bytes:
        """Return the bytes of a record. name: without the stem. Raises MalformedFile."""
        return self.directory.read_record(self.stem + name)

    def unpickle(self, data: bytes, name: str = PICKLE) -> Pickled:
        """Read the pickle in a record. name: without the stem. Raises as `pickles.unpickle`."""
        return unpickle(data, self.path, self.stem + name, key_prefix=self._key_prefix)

    def read_text(self, name: str) -> str:
        """Return the text in a record, which may be compressed. name: with the stem. Raises as `zipfile` does."""
        directory = self.directory
        # Whose directory has been checked.
        with zipfile.ZipFile(directory.file) as archive:
            return archive.read(directory.records[name]).decode("utf-8", "replace")

    def _is_big_endian(self) -> bool:
        """Whether tensors are stored big-endian; files before torch 2.1 lack the record and are little-endian."""
        name = self.stem + "byteorder"
        if name not in self.directory.records:
            return False

        order = self.directory.read_record(name)
        if order not in (b"little", b"big"):
            raise self.directory.malformed(
                name,
                problem=repr(order[:20]),
                needed="little or big",
                next_step=_AGAIN,
            )
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
    return name == PICKLE or name.endswith(f"/{PICKLE}")
