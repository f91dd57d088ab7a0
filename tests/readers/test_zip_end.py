"""A zip with inconsistent end records is malformed: torch reads as many records as they state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from malformed.torch_parts import INTACT, saved, state, with_zip64, zipped

import syncheck
from syncheck.errors import MalformedFile

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = INTACT["torch-zip"]
BOTH = pytest.mark.parametrize("data", [PLAIN, with_zip64(PLAIN)], ids=["zip", "zip64"])


def fault(folder: Path, data: bytes) -> str:
    """Return the error of reading a file, or an empty string."""
    (folder / "f.pth").write_bytes(data)
    try:
        assert list(syncheck.read(str(folder / "f.pth")).tensors) == ["w"]
    except MalformedFile as error:
        return error.reason
    return ""


@BOTH
def test_an_intact_file_is_read(data: bytes, tmp_path: Path) -> None:
    """With and without zip64, with a comment, and with trailing bytes, which torch also skips."""
    assert fault(tmp_path, data) == ""
    assert fault(tmp_path, data[:-2] + b"\x03\x00abc") == ""
    assert fault(tmp_path, data + bytes(50)) == ""


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"count": 3}, "4 records in a directory that lists 3; needed equal numbers"),
        ({"here": 5}, "4 records in a directory that lists 5"),
        ({"disk": 1}, "multi-disk zip"),
    ],
)
@pytest.mark.parametrize("zip64", [False, True])
def test_end_record_is_compared_with_the_directory(
    wrong: dict[str, Any], reason: str, zip64: bool, tmp_path: Path
) -> None:
    """Each number of records and disks in the old and zip64 end records is checked."""
    data = with_zip64(PLAIN, **wrong) if zip64 else zipped(*saved(state()), **wrong)
    assert reason in fault(tmp_path, data)


@pytest.mark.parametrize("wrong", [{"length": 45}, {"place": 4}, {"disks": 2}, {"disks": 0}, {"shift": 1}])
def test_zip64_record_is_checked(wrong: dict[str, int], tmp_path: Path) -> None:
    """The length and location of the zip64 record, and the location of the directory, are checked."""
    assert "zip directory: " in fault(tmp_path, with_zip64(PLAIN, **wrong))


def test_both_end_records_agree(tmp_path: Path) -> None:
    """With zip64, the old record has equal numbers or refers to zip64, as torch and zipfile write."""
    data = with_zip64(PLAIN)
    end = len(data) - 22
    for position, width in ((8, 2), (10, 2), (12, 4), (16, 4)):
        stands = data[: end + position] + b"\xff" * width + data[end + position + width :]
        assert fault(tmp_path, stands) == ""
        second = data[: end + position] + b"\x01" * width + data[end + position + width :]
        assert "in the record before zip64" in fault(tmp_path, second)


@BOTH
def test_every_bit_of_the_end_records(data: bytes, tmp_path: Path) -> None:
    """Each flip is malformed, except in zip64 versions and the comment's length."""
    start = data.rindex(b"archive/version") + len(b"archive/version")
    free = {len(data) - 2, len(data) - 1} | ({start + i for i in range(12, 16)} if len(data) > len(PLAIN) else set())
    for position in range(start, len(data)):
        for bit in (0, 3, 7):
            damaged = data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]
            assert (fault(tmp_path, damaged) == "") == (position in free), (position - start, bit)
