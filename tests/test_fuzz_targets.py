"""The property that the fuzz targets hold, on what they begin with; and that each of its parts can fail."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from syncheck import api
from syncheck.errors import MalformedFile
from syncheck.readers import files, torch_zip
from syncheck.snapshots import Snapshot

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # at the end: where syncheck is installed from a wheel, that one is tested

from fuzz import guard, held  # noqa: E402
from fuzz.__main__ import quoted  # noqa: E402
from fuzz.held import Broken  # noqa: E402
from fuzz.mutations import records_of, safetensors, zip_of, zipped  # noqa: E402
from fuzz.targets import SEEDS, TARGETS  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = (SEEDS / "zip" / "small").read_bytes()


def test_every_format_of_files_is_fuzzed() -> None:
    """Among the targets' seeds is a file of each reader."""
    heads = {path.read_bytes()[:64] for name in TARGETS for path in (SEEDS / name).iterdir()}
    unseen = [name for name, reader in files.READERS.items() if not any(map(reader.matches, heads))]
    assert unseen == [], "a reader without a target in fuzz/targets.py and its seeds"


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["own", "all"])
@pytest.mark.parametrize("name", TARGETS)
def test_seeds_hold(name: str, every: bool, tmp_path: Path) -> None:
    """Every seed is read or refused as the property says; among all, those of fixtures and what is malformed."""
    own = len(list((SEEDS / name).iterdir()))  # they come first
    outcomes = [TARGETS[name].check(data, tmp_path) for data in islice(TARGETS[name].seeds(), None if every else own)]
    assert any(isinstance(outcome, Snapshot) for outcome in outcomes)


@pytest.mark.parametrize("name", TARGETS)
def test_cut_seeds_hold(name: str, tmp_path: Path) -> None:
    """So is a seed that ends too early, and one with a flipped byte."""
    data = min(TARGETS[name].seeds(), key=len)
    for i in range(0, len(data), max(1, len(data) // 20)):
        TARGETS[name].check(data[:i], tmp_path)
        TARGETS[name].check(data[:i] + bytes([data[i] ^ 0x55]) + data[i + 1 :], tmp_path)


def broken(tmp_path: Path) -> Broken:
    """What the zip target says of an intact file."""
    with pytest.raises(Broken) as caught:
        TARGETS["zip"].check(SMALL, tmp_path)
    return caught.value


ACTS: dict[str, Callable[[], Any]] = {
    "import": lambda: __import__("this"),
    "os.system": lambda: os.system("true"),
    "subprocess.Popen": lambda: subprocess.run(["true"], check=False),
    "open for writing": lambda: open("written", "w"),  # noqa: SIM115 - it is never opened
    "open outside": lambda: Path("/etc/passwd").read_bytes(),
    "socket": socket.socket,
    "os.remove": lambda: os.remove("nothing"),
}


@pytest.mark.parametrize("act", ACTS)
def test_acts_are_stopped(act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that imports, runs, writes, deletes, connects or looks elsewhere is told, though it hides the error."""

    def read(path: str) -> Snapshot:
        try:
            ACTS[act]()
        except Exception:  # noqa: BLE001 - as the unpickler does
            raise MalformedFile(path, found="something") from None
        return real(path)

    real = torch_zip.read
    monkeypatch.setattr(torch_zip, "read", read)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "this", raising=False)
    assert f"it tried to {act}" in str(broken(tmp_path))
    assert not (tmp_path / "written").exists()


def test_other_errors_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is none of ours is a fault, named by its kind and where in syncheck it came from."""
    monkeypatch.setattr(torch_zip, "flatten", lambda *_: {}["missing"])
    assert broken(tmp_path).kind == "KeyError at torch_zip.py:read"


@pytest.mark.parametrize("text", ["", "two\nlines"])
def test_errors_must_be_one_line_on_the_file(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CheckpointError with a line break or without the file is a fault."""

    class Odd(MalformedFile):
        def __str__(self) -> str:
            return self.path + text if text else "an error"

    def read(path: str) -> Snapshot:
        raise Odd(path, found="something")

    monkeypatch.setattr(torch_zip, "read", read)
    assert "not one printable line" in broken(tmp_path).kind


def test_reads_that_differ_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second read of the same bytes gives the same; NaN is the same as NaN."""
    count = iter(range(10))
    real = files.remove_bookkeeping
    monkeypatch.setattr(
        files, "remove_bookkeeping", lambda s: real(Snapshot(**{**parts(s), "values": {"n": next(count)}}))
    )
    assert broken(tmp_path).kind == "two reads of one file are not the same"
    monkeypatch.setattr(
        files, "remove_bookkeeping", lambda s: real(Snapshot(**{**parts(s), "values": {"n": float("nan")}}))
    )
    TARGETS["zip"].check(SMALL, tmp_path)


def parts(snapshot: Snapshot) -> dict[str, Any]:
    """Fields of a snapshot by name."""
    return {name: getattr(snapshot, name) for name in Snapshot.__slots__}


def test_a_copy_must_be_in_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is out of sync with its copy is a fault."""
    monkeypatch.setattr(api, "overall", lambda *_: "out_of_sync")
    assert broken(tmp_path).kind == "a checkpoint is out of sync with its copy"


def test_time_and_memory_have_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input that takes longer, or more memory, than one of its size may is a fault."""
    monkeypatch.setattr(held, "MOST_SECONDS", 0.0)
    assert broken(tmp_path).kind == "it takes too long"
    monkeypatch.undo()
    monkeypatch.setattr(held, "MOST_MEMORY", -1)
    assert broken(tmp_path).kind == "it takes too much memory"


def test_a_guard_heeds_nothing_when_closed(tmp_path: Path) -> None:
    """Its hook stays for good, and must not hinder what runs after it."""
    with guard.Guard(str(tmp_path)):
        pass
    (tmp_path / "a").write_bytes(b"")


def test_mutations_keep_the_frame() -> None:
    """A mutated zip still has a directory, and a mutated header its true length and as many bytes as it asks for."""

    class Numbers:
        def random(self) -> float:
            return 0.3

    records = records_of(SMALL)
    assert records is not None
    assert records_of(bytes(zip_of(records))) == records
    changed = records_of(zipped(SMALL, lambda data, _: data + b"x", Numbers()))  # type: ignore[arg-type]
    assert changed is not None
    pickled = next(content for name, content in records if name.endswith("data.pkl"))
    assert pickled + b"x" in [content for _, content in changed]
    header = json.dumps({"w": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}}).encode()
    made = safetensors(bytes(8) + b"{", lambda *_: header, Numbers())  # type: ignore[arg-type]
    assert made == len(header).to_bytes(8, "little") + header + bytes(5)


def test_words_are_quoted() -> None:
    """A word of the dictionary is printable whatever bytes it has."""
    assert quoted(b'a"\\\n') == "a\\x22\\x5c\\x0a"


def test_without_atheris() -> None:
    """Where atheris is not installed, that is said in one line, exit 2."""
    code = (
        "import sys; sys.modules['atheris'] = None; sys.argv = ['fuzz']; from fuzz.__main__ import main; exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pip install -e '.[fuzz]'" in done.stderr


def test_what_was_found_stays_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each input that fuzzing found ends in the error that its case names."""
    monkeypatch.syspath_prepend(str(ROOT / "fixtures"))
    from malformed.found_by_fuzzing import CASES

    for case in CASES:
        data = case.build()
        assert isinstance(data, bytes)
        outcome = TARGETS["safetensors" if case.name.endswith(".safetensors") else "zip"].check(data, tmp_path)
        assert type(outcome).__name__ == case.error, case.name
        assert case.found in str(outcome), case.name
