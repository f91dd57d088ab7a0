"""Files of torch.save since torch 1.6: a zip of stored records, `<stem>/data.pkl` and `<stem>/data/<key>`.

Only the directory and the pickle are read here. A tensor's bytes are found from the local header of its record (whose
extra field pads the data to 64 bytes, so its length differs from the directory's) and stay on disk.
Layout: caffe2/serialize/inline_container.cc of torch 2.6 to 2.15.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from typing import IO, TYPE_CHECKING, BinaryIO, cast

from syncheck.errors import MalformedFile, NotACheckpoint, UnsupportedFormat
from syncheck.readers import zip_end
from syncheck.readers.opening import regular
from syncheck.readers.pickles.places import Record, tensor_at
from syncheck.readers.pickles.tree import flatten
from syncheck.readers.pickles.unpickle import unpickle
from syncheck.snapshots import Snapshot

if TYPE_CHECKING:
    from syncheck.readers.pickles.stand_ins import Storage, TensorPlace
    from syncheck.snapshots import Tensor

FORMAT = "torch-zip"
MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
# Bits of a record's flags: encrypted, patched, strongly encrypted, masked.
_NOT_STORED = 0x2061
# Bytes of a directory that are read: of more than a million records. Each takes ten times as much in memory.
_MOST_DIRECTORY = 1 << 27
# An attribute of MS-DOS. torch.load takes such a record for an empty one, as it does one of which 0 bytes are stored,
# and leaves in the tensor what memory held: mz_zip_reader_extract_to_mem of miniz, which it reads zips with.
_IS_FOLDER = 0x10
# Records that torch.load reads beside the pickle and the data, where they are there; of the first a whole number.
_NUMBERS, _BESIDE = ("version", ".data/version", ".storage_alignment"), (".data/serialization_id", ".format_version")
_AGAIN = "save or copy the file again"
_STRANGE = "no library writes this; find out where the file comes from"


def matches(head: bytes) -> bool:
    """Whether the first bytes of a file are those of this format."""
    return head.startswith(MAGIC)


def read(path: str) -> Snapshot:
    """Open a checkpoint: its tensors' names and places, its values and its metadata block.

    Raises MalformedFile for a file that is cut short, compressed or inconsistent, RefusedFile for a pickle that wants
    to run something, NotACheckpoint for another kind of zip.
    """
    with regular(path) as file:
        archive = Archive(file, path)
        pickled = archive.bytes_of("data.pkl")
        made: list[TensorPlace] = []
        tree, stubs = unpickle(pickled, path, f"{archive.stem}data.pkl", made=made)
        flat = flatten(tree, path, len(pickled), made)
        big = archive.big_endian()
        tensors = {name: archive.tensor(name, place, big) for name, place in flat.tensors.items()}
        archive.check_overlaps()
    return Snapshot(
        path, FORMAT, archive.size, tensors, flat.values, stubs, flat.metadata,
        numbered=flat.numbered,
    )  # fmt: skip


class _Bounded:
    """A file of which zipfile reads no more at a time than a directory may have."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, size: int = -1) -> bytes:
        if size > _MOST_DIRECTORY:
            raise ValueError(f"a directory of {size} bytes")
        return self._file.read(size)


class Archive:
    """An opened zip of torch.save. file: of which only the directory is read yet; path: for errors."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.opened = os.fstat(file.fileno())
        self.file, self.path = file, path
        self.size = file.seek(0, os.SEEK_END)
        self.places: dict[str, tuple[int, int]] = {}
        self.stem = ""  # of all records' names, once it is known
        self.records = self._directory()
        pickles = [name for name in self.records if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) != 1:
            what = "a TorchScript archive" if any("/code/" in name for name in self.records) else "a zip"
            raise NotACheckpoint(
                path, found=f"{what} with {len(pickles)} records data.pkl", needed="one, as torch.save writes"
            )
        self.stem = pickles[0].removesuffix("data.pkl")
        for name in _NUMBERS:
            if self.stem + name in self.records and not (number := self.bytes_of(name)).strip().isdigit():
                raise self._malformed(name, repr(number[:20]), "a whole number", _AGAIN)
        for name in _BESIDE:
            if self.stem + name in self.records:
                self.place_of(name)

    def _directory(self) -> dict[str, zipfile.ZipInfo]:
        """Return the records by name. Raises MalformedFile where the directory is not what torch.save writes."""
        place = "zip directory"
        try:
            infos = zipfile.ZipFile(cast("IO[bytes]", _Bounded(self.file))).infolist()
            wrong = zip_end.fault(self.file, infos)
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, struct.error) as error:
            needed = "a directory at the end of the file"
            raise self._malformed(place, str(error), needed, f"it is cut short or damaged: {_AGAIN}") from None
        if any(info.filename != info.orig_filename for info in infos):  # a NUL, which other readers may take for an end
            raise self._malformed(place, "a record of two names", "one", _STRANGE)
        records = {info.filename: info for info in infos}
        if len(records) != len(infos):
            raise self._malformed(place, "two records of one name", "", _AGAIN)
        first = min((info.header_offset for info in infos), default=0)
        if first:  # several zips one after the other: the directory at the end is the last one's
            folder = "if it is a part of a torch.distributed.checkpoint folder, give the folder"
            raise self._malformed(place, f"the records begin at byte {first}", "byte 0", folder)
        if wrong:
            raise self._malformed(place, *wrong, _AGAIN)
        return records

    def place_of(self, name: str) -> tuple[int, int]:
        """Return (offset, size) in bytes of a record's data."""
        if name in self.places:
            return self.places[name]
        info = self.records.get(self.stem + name)
        if info is None:
            raise self._malformed(name, "no such record", "", _AGAIN)
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _NOT_STORED:
            raise self._not_stored(name)
        if info.external_attr & _IS_FOLDER:
            raise self._malformed(name, "a record that is marked as a folder", "a file's attributes", _AGAIN)
        if info.compress_size != info.file_size:
            found = f"{info.compress_size} bytes stored of {info.file_size}"
            raise self._malformed(name, found, "the same number, for it is not compressed", _AGAIN)
        if info.header_offset > self.size:  # more than seek() takes, perhaps
            raise self._malformed(name, "a record beyond the file's end", "a local header", _AGAIN)
        self.file.seek(info.header_offset)
        head = self.file.read(_LOCAL_HEADER.size)
        if len(head) < _LOCAL_HEADER.size or not head.startswith(MAGIC):
            raise self._malformed(name, "no record where the directory says", "a local header", _AGAIN)
        _, _, flags, method, _, _, _, compressed, size, name_length, extra_length = _LOCAL_HEADER.unpack(head)
        if method != zipfile.ZIP_STORED or flags & _NOT_STORED:
            raise self._not_stored(name)
        if not {size, compressed} <= {0, 0xFFFFFFFF, info.file_size}:  # 0 where they stand behind the record
            found = f"{info.file_size} bytes in the directory, {size} before the record"
            raise self._malformed(name, found, "one size", _AGAIN)
        offset = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if self.file.read(name_length) != info.orig_filename.encode("utf-8"):
            raise self._malformed(name, "the record bears another name than in the directory", "the same name", _AGAIN)
        if offset + info.file_size > self.size:
            raise self._malformed(
                name,
                f"ends at byte {offset + info.file_size}",
                f"at most {self.size}, the file's size",
                _AGAIN,
            )
        self.places[name] = offset, info.file_size
        return self.places[name]

    def bytes_of(self, name: str) -> bytes:
        """Return a record's data. Raises MalformedFile where there is no such record, or it is not what was saved.

        What a flipped bit makes of a pickle may be another one that reads well. A stored 0 proves nothing.
        """
        offset, size = self.place_of(name)
        self.file.seek(offset)
        data = self.file.read(size)
        stored = self.records[self.stem + name].CRC
        if stored and stored != zlib.crc32(data):  # 0 where saving had checksums switched off
            raise self._malformed(name, "the bytes do not match the CRC-32 stored for them", "what was saved", _AGAIN)
        return data

    def big_endian(self) -> bool:
        """Return whether tensors are stored big-endian; files before torch 2.1 do not say and are little-endian."""
        if self.stem + "byteorder" not in self.records:
            return False
        order = self.bytes_of("byteorder")
        if order not in (b"little", b"big"):
            raise self._malformed("byteorder", repr(order[:20]), "little or big", _AGAIN)
        return order == b"big"

    def tensor(self, name: str, place: TensorPlace, big_endian: bool) -> Tensor:
        """Check that a tensor lies within its record and say where in the file it starts."""
        return tensor_at(name, place, self.path, self._record_of, opened=self.opened, big_endian=big_endian)

    def check_overlaps(self) -> None:
        """Raise MalformedFile where two records that are read lie in the same bytes: few bytes could pass for many."""
        end, before = 0, ""
        for (start, size), name in sorted((place, name) for name, place in self.places.items()):
            if start < end and size:
                raise self._malformed(name, f"it begins at byte {start}, within {before}", "records apart", _STRANGE)
            end, before = max(end, start + size), name

    def _not_stored(self, name: str) -> UnsupportedFormat:
        return UnsupportedFormat(
            self.path, place=self.stem + name, found="a compressed or encrypted record",
            needed="a stored one, as torch.save writes", next_step="unpack it, or save it again with torch.save",
        )  # fmt: skip

    def _record_of(self, storage: Storage) -> Record:
        record = f"data/{storage.key}"
        start, size = self.place_of(record)
        return Record(self.stem + record, start, size, self.records[self.stem + record].CRC)

    def _malformed(self, record: str, found: str, needed: str, next_step: str) -> MalformedFile:
        return MalformedFile(self.path, place=self.stem + record, found=found, needed=needed, next_step=next_step)
