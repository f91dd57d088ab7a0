"""Files that change between opening and comparing: locations from one file are not used for another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import save
from support.listings import list_fields

import syncheck
from syncheck import api
from syncheck.errors import MalformedFile, UnreadableFile
from syncheck.readers import torch_zip
from syncheck.readers.dcp import folder
from syncheck.tensors.blocks import Files

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Report
    from syncheck.snapshots import Snapshot, Tensor


def change(path: Path, how: str) -> None:
    """Replace or modify a checkpoint."""
    if how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "replaced":
        os.replace(save(path.parent / f"new{path.suffix}", {"w": np.ones(4, np.float32)}), path)
    else:  # the same size, in place
        before = path.stat()
        save(path, {"w": np.ones(4, np.float32)})
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def check_undecided(report: Report, path: Path, reason: str) -> None:
    """Assert an undecided report because of one unreadable file."""
    assert report.verdict == "undecided"
    assert list_fields(report.unreadable, "path") == [str(path)]
    assert report.unreadable[0].reason.startswith(reason)


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
@pytest.mark.parametrize("how", ["replaced", "overwritten", "folder", "pipe"])
def test_a_changed_file_is_not_compared(tmp_path: Path, how: str, ending: str) -> None:
    """A file replaced after opening is reported as changed, and its bytes are not used."""
    paths = [save(tmp_path / f"w_rank{rank}{ending}", {"w": np.ones(4, np.float32)}) for rank in range(3)]
    findings = api.find(*paths)
    assert api.judge(findings).verdict == "in_sync"
    change(paths[1], how)
    reason = "it is no longer a file" if how in ("folder", "pipe") else "it was changed since it was opened"
    check_undecided(api.judge(findings), paths[1], reason)


@pytest.mark.parametrize(
    ("shape", "strides", "big_endian"),
    [
        ((64, 32), (64, 1), False),
        ((64, 64), (1, 64), False),
        ((64, 8, 8), (64, 1, 8), False),
        ((4096,), (1,), True),
        ((2048, 2), (1, 2048), False),
    ],
    ids=["columns", "transposed", "channels last", "big endian", "by mapping"],
)
def test_a_file_truncated_between_two_reads(
    tmp_path: Path, shape: tuple[int, ...], strides: tuple[int, ...], big_endian: bool
) -> None:
    """A truncation during the read of a tensor with any layout is reported, without a crash."""
    program = f"""
import os
from syncheck.tensors import strided
from syncheck.tensors.blocks import Files
from syncheck.errors import MalformedFile
from syncheck.snapshots import Tensor
open("f", "wb").truncate(16384)
tensor = Tensor("w", "float32", {shape}, {strides}, "f", 0, big_endian={big_endian}, opened=os.stat("f"))
try:
    with Files() as files:
        strided._MOST_READS = {0 if shape == (2048, 2) else 1024}
        assert len(files.read(tensor, 0, 64, 0)) == 256
        os.truncate("f", 100)
        files.read(tensor, tensor.numel - 64, 64, 0)
except MalformedFile as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("f: tensor 'w': the file ends before the tensor's last element.")


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_a_file_rewritten_while_it_is_read_is_never_in_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """A differing rank saved again during the read is never in sync, although the bytes read are equal."""
    paths = [save(tmp_path / f"w_rank{rank}{ending}", {"w": np.full(4, rank, np.float32)}) for rank in range(2)]
    findings = api.find(*paths)
    read, calls = os.pread, list[int]()

    def pread(descriptor: int, count: int, offset: int) -> bytes:
        calls.append(descriptor)
        if len(calls) == 2:
            before = paths[1].stat()
            save(paths[1], {"w": np.zeros(4, np.float32)})
            os.utime(paths[1], ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        return read(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", pread)
    check_undecided(api.judge(findings), paths[1], "it was changed while it was read")


def test_a_file_is_checked_when_it_is_closed(tmp_path: Path) -> None:
    """With few open files, a file that changed while it was open is reported when it is closed."""
    paths = [save(tmp_path / f"w_rank{rank}.pth", {"w": np.ones(4, np.float32)}) for rank in range(2)]
    first, second = (syncheck.read(str(path)).tensors["w"] for path in paths)
    with Files(limit=1) as files:
        files.descriptor(first)
        change(paths[0], "overwritten")
        with pytest.raises(MalformedFile, match=r"w_rank0\.pth: it was changed while it was read"):
            files.descriptor(second)


def test_an_error_while_reading_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of a disk or network become syncheck's errors with the file's name in all ways of reading."""

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    large = np.ones(1 << 20, np.float32)
    findings = api.find(*(save(tmp_path / f"w_rank{rank}.pth", {"w": large}) for rank in range(2)))
    monkeypatch.setattr(os, "preadv", broken)
    assert api.judge(findings).unreadable[0].reason == "input/output error"


@pytest.mark.parametrize(("how", "most"), [("replaced", 2), ("removed", 2), ("cut", 2), ("disk", 3)])
def test_intact_files_are_read_at_most_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, most: int
) -> None:
    """If half of 20 files break after opening, all are listed, and no intact file is read ten times."""
    read, bytes_read = Files._pread, Counter[str]()
    paths = [save(tmp_path / f"w_rank{rank:02}.pth", {"w": np.ones(1 << 17, np.float32)}) for rank in range(20)]
    broken = {str(path) for path in paths[::2]}

    def counted(files: Files, tensor: Tensor, offset: int, length: int, slot: int) -> bytes | bytearray:
        bytes_read[tensor.path] += length
        if how == "disk" and tensor.path in broken and offset > tensor.offset:
            raise UnreadableFile.because(tensor.path, OSError(5, "Input/output error"))
        return read(files, tensor, offset, length, slot)

    findings = api.find(*paths)
    monkeypatch.setattr(Files, "_pread", counted)
    for path in paths[::2]:
        if how == "replaced":
            change(path, how)
        elif how == "removed":
            path.unlink()
        elif how == "cut":
            os.truncate(path, 1000)
    report = api.judge(findings)
    assert set(list_fields(report.unreadable, "path")) == broken
    assert report.verdict == "undecided"
    assert list_fields(report.groups[0].replicas, "rank") == list(range(1, 20, 2))
    assert report.counts.identical == 1
    assert max(bytes_read[str(path)] for path in paths[1::2]) <= most * 4 << 17


@pytest.mark.parametrize("name", ["w.pth", "."], ids=["file", "folder"])
def test_errors_while_opening_and_reading_have_equal_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A disk error in a header, a file or a folder has the same text as a later disk error."""

    def broken(path: str) -> Snapshot:
        raise OSError(5, "Input/output error", path)

    save(tmp_path / "w.pth", {"w": np.ones(4, np.float32)})
    (tmp_path / ".metadata").touch()
    for reader in (torch_zip, folder):
        monkeypatch.setattr(reader, "read", broken)
    with pytest.raises(UnreadableFile) as caught:
        syncheck.read(str(tmp_path / name))
    assert caught.value.reason == "input/output error"
