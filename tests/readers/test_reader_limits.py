"""Limits for the content of one file: tested at both sides, in bounded memory, with one-line errors."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support.checkpoints import save_header, save_records

import syncheck
from syncheck.cli import main
from syncheck.errors import MalformedFile
from syncheck.readers import untrusted
from syncheck.readers.pickles import limits as pickle_limits
from syncheck.readers.pickles import unpickle

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

EMPTY = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}


def text(name: str) -> bytes:
    """Return a string as opcode BINUNICODE."""
    return b"X" + struct.pack("<I", len(name)) + name.encode()


def keys(count: int) -> Iterable[bytes]:
    """Return the opcodes of `count` keys with numbers as values."""
    return (text(f"{i:x}") + b"K\x01" for i in range(count))


def refused(path: Path) -> str:
    """Read a malformed file with the API and the command line; return the error."""
    with pytest.raises(MalformedFile) as caught:
        syncheck.read(str(path))
    assert main(["compare", str(path)]) == 2
    return caught.value.reason


@pytest.mark.parametrize(
    ("bound", "pickled", "said"),
    [
        ("MOST_OBJECTS", b"".join(keys(5)), "more than 19 objects"),
        ("MOST_ENTRIES", b"](" + b"K\x01" * 20 + b"e", "top level: more than 19 parts"),
        ("MOST_OBJECTS", b"](" + b"}" * 19 + b"e", "more than 19 objects"),
        ("MOST_OBJECTS", b"](" + b"cx\nY\n)\x81" * 4 + b"]]]" + b"e", "more than 19 objects"),
        ("MOST_OBJECTS", b"}(" + b"M\x00\x08N" * 15 + b"u", "more than 19 objects"),
        ("MOST_CLASSES", b"](" + b"".join(b"cx\nY%d\n" % i for i in range(20)) + b"e", "more than 19 unknown classes"),
    ],
    ids=["texts", "parts", "containers", "instances", "keys that are numbers", "classes"],
)
def test_a_pickle_at_a_limit(
    bound: str, pickled: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of 20 it is read, with 19 it is malformed; limits are looked up when a file is read."""
    path = save_records(tmp_path / "a_rank0.pth", b"\x80\x02" + pickled + b".")
    monkeypatch.setattr(pickle_limits, "_FEW_OPCODES", 0)
    monkeypatch.setattr(untrusted, bound, 20)
    syncheck.read(str(path))
    monkeypatch.setattr(untrusted, bound, 19)
    assert said in refused(path)


def test_objects_are_counted_by_opcode() -> None:
    """Arguments are not opcodes; constants, marks and memo reads count 0, and heavy objects 4."""
    assert pickle_limits._count_objects(b"K}M}}J}}}}G}}}}}}}}q}r}}\x00\x00h}") == 3
    assert pickle_limits._count_objects(b"(()N\x88\x890122.ae") == 0
    assert pickle_limits._count_objects(b"c}\n}\nI}}\nS'}'\np5\ng5\n") == 2
    assert pickle_limits._count_objects(b"]}t\x85\x86\x87l") == 7
    assert pickle_limits._count_objects(b"RQ\x81\x8f\x91\x92dsu") == 9 * 4


def test_few_opcodes_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opcodes of small files are not counted, because they cannot take much memory."""
    monkeypatch.setattr(untrusted, "MOST_OBJECTS", 0)
    assert pickle_limits.scan(b"](" + b"}" * 1000 + b"e.").fault == ""
    assert pickle_limits._FEW_OPCODES * 216 < 1 << 30  # bytes of an empty set, which one byte makes


CLAIMS = [b"\x96" + struct.pack("<Q", 2**40), b"\x8e" + struct.pack("<Q", 2**60), b"B" + b"\xff" * 4]


@pytest.mark.parametrize("claim", CLAIMS, ids=["bytearray", "long bytes", "bytes"])
def test_missing_bytes_are_not_allocated(claim: bytes, tmp_path: Path) -> None:
    """Bytes beyond the end are malformed, although Python would allocate them first."""
    path = save_records(tmp_path / "a_rank0.pth", b"\x80\x05" + claim + b"abc.")
    assert f"it asks for {int.from_bytes(claim[1:], 'little')} bytes, more than it has" in refused(path)
    save_records(path, pickle.dumps({"b": bytearray(5)}, 5))
    assert syncheck.read(str(path)).values == {"b": bytearray(5)}


@pytest.mark.parametrize("name", ["w{}", "\\u0064ata_offsets{}"])
def test_tensors_of_a_safetensors_header(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The maximum number of tensors is read, and one more is malformed, also without counting the key."""
    entry = json.dumps(EMPTY).replace("data_offsets", name.format("") if "offsets" in name else "data_offsets")
    header = ", ".join(f'"{name.format(i)}": {entry}' for i in range(8))
    path = save_header(tmp_path / "a_rank0.safetensors", f"{{{header}}}".encode())
    monkeypatch.setattr(untrusted, "MOST_TENSORS", 8)
    assert len(syncheck.read(str(path)).tensors) == 8
    monkeypatch.setattr(untrusted, "MOST_TENSORS", 7)
    assert "header: " in (said := refused(path))
    assert "more than 7 tensors" in said or "8 tensors; needed at most 7" in said


def test_parts_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists and objects are counted before parsing, in a header, a fingerprint and an index of weights."""
    entry = {"dtype": "uint8", "shape": [1] * 5, "digest": "0" * 32}
    document = {
        "syncheck_fingerprint": 1, "algorithm": "blake2b-128", "metadata": None, "values": {}, "stubs": [], "notes": [],
        "tensors": {"v": entry, "w": entry},
    }  # fmt: skip
    path = tmp_path / "a_rank0.json"
    path.write_text(json.dumps(document))
    assert len(syncheck.read(str(path)).tensors) == 2
    for bound, said in (("MOST_TENSORS", "more than 1 tensors"), ("MOST_OBJECTS", "more than 1 parts")):
        with monkeypatch.context() as patched:
            patched.setattr(untrusted, bound, 1)
            assert said in refused(path)
    folder = tmp_path / "model"
    save_header(folder / "a.safetensors", {"w": EMPTY})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    monkeypatch.setattr(untrusted, "MOST_OBJECTS", 1)
    assert "more than 1 parts" in refused(folder)


def test_too_little_memory_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lack of memory is not reported as damage: one line, exit code 2."""
    path = save_records(tmp_path / "a_rank0.pth", pickle.dumps({"a": 1}, 2))

    def none_left(_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(unpickle._Unpickler, "load", none_left)
    assert main(["compare", str(path), str(path)]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "out of memory; raise the limit" in err


def within(path: Path, megabytes: int) -> tuple[int, str]:
    """Compare a file in a process with limited address space; return exit code and stderr."""
    command = f"ulimit -v {megabytes << 10} && exec {sys.executable} -m syncheck compare {path}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=500, check=False)
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_files_at_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle of nine million sets is refused within 1 GiB. At a tenth of the limits, so is one of 500,000 keys.

    Ten keys less are read.
    """
    path = tmp_path / "a_rank0.pth"
    sets = untrusted.MOST_OBJECTS // pickle_limits._HEAVY + pickle_limits._FEW_OPCODES + 2000
    save_records(path, b"\x80\x04](" + b"\x8f" * sets + b"e.")
    code, err = within(path, 1024)
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"more than {untrusted.MOST_OBJECTS} objects" in err
    most = untrusted.MOST_ENTRIES // 10
    monkeypatch.setattr(untrusted, "MOST_ENTRIES", most)
    monkeypatch.setattr(untrusted, "MOST_OBJECTS", untrusted.MOST_OBJECTS // 10)
    monkeypatch.setattr(pickle_limits, "_FEW_OPCODES", pickle_limits._FEW_OPCODES // 10)
    for count, is_read in ((most, False), (most - 10, True)):
        save_records(path, b"\x80\x02}(" + b"".join(keys(count)) + b"u.")
        if is_read:
            assert len(syncheck.read(str(path)).values) == count
        else:
            assert f"more than {untrusted.MOST_OBJECTS} objects" in refused(path)
