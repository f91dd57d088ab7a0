"""The property of the fuzz targets: it holds for their seeds, and each part of it can fail."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tarfile
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import join_fields, list_fields

from fuzz import guard
from fuzz.fields import Field
from fuzz.judge import Broken
from fuzz.mutations import (
    KINDS,
    damage,
    find_fields,
    mutate_safetensors,
    mutate_zip,
    read_records,
    write_zip,
)
from fuzz.targets import SEEDS, TARGETS
from syncheck import api
from syncheck.errors import MalformedFile
from syncheck.readers import formats, torch_zip
from syncheck.snapshots import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
SMALL = (SEEDS / "zip" / "small").read_bytes()


def test_every_format_of_files_is_fuzzed() -> None:
    """The seeds include a file of each reader."""
    heads = {path.read_bytes()[:64] for name in TARGETS for path in (SEEDS / name).iterdir()}
    unseen = [name for name, reader in formats.READERS.items() if not any(map(reader.matches, heads))]
    assert unseen == [], "a reader without a target in fuzz/targets.py and seeds"


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["own", "all"])
@pytest.mark.parametrize("name", TARGETS)
def test_seeds(name: str, every: bool, tmp_path: Path) -> None:
    """The property holds for the seeds; the slow test includes valid and malformed fixtures."""
    own_values = len(list((SEEDS / name).iterdir()))  # they come first
    outcomes = [
        TARGETS[name].check(data, tmp_path) for data in islice(TARGETS[name].seeds(), None if every else own_values)
    ]
    assert any(isinstance(outcome, Snapshot) for outcome in outcomes)


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TARGETS)
def test_damaged_seeds(name: str, times: int, tmp_path: Path) -> None:
    """The property holds for seeds with damage of every kind, and for seeds with damage inside an intact frame."""
    target, random = TARGETS[name], Random(name)
    data = min((path.read_bytes() for path in (SEEDS / name).iterdir()), key=len)
    fields = find_fields("seed", data) if name == "zip" else [Field(0, len(data), "all")]
    for kind, _ in product(KINDS, range(times)):
        target.check(damage(random, kind, data, fields, data), tmp_path)

    def damage_part(part: bytes, _: int) -> bytes:
        return damage(random, random.choice(KINDS), part, [Field(0, len(part), "all")], part) if part else part

    for _ in range(10 * times if target.mutate else 0):
        target.check(target.mutate(data, damage_part, random), tmp_path)


def broken(tmp_path: Path) -> Broken:
    """Return the error of the zip target for an intact file."""
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
    """Imports, commands, writes, deletions, connections and reads elsewhere are reported, even if errors are hidden."""

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


def test_other_errors_are_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other error is a fault; its kind is the class and the raising function of syncheck."""
    monkeypatch.setattr(torch_zip, "flatten", lambda *_: {}["missing"])
    assert broken(tmp_path).kind == "KeyError at torch_zip.py:_read_content"


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


def test_reads_must_be_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two reads of the same bytes are equal; NaN equals NaN."""
    count = iter(range(10))
    real = formats.remove_bookkeeping
    monkeypatch.setattr(
        formats, "remove_bookkeeping", lambda s: real(Snapshot(**{**parts(s), "values": {"n": next(count)}}))
    )
    assert broken(tmp_path).kind == "two reads of one file are not the same"
    monkeypatch.setattr(
        formats, "remove_bookkeeping", lambda s: real(Snapshot(**{**parts(s), "values": {"n": float("nan")}}))
    )
    TARGETS["zip"].check(SMALL, tmp_path)


def parts(snapshot: Snapshot) -> dict[str, Any]:
    """Fields of a snapshot by name."""
    return {name: getattr(snapshot, name) for name in Snapshot.__slots__}


def test_a_copy_must_be_in_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reporting a file out of sync with its copy is a fault."""
    monkeypatch.setattr(api, "overall", lambda *_: "out_of_sync")
    assert broken(tmp_path).kind == "a checkpoint is out of sync with its copy"


def test_time_and_memory_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exceeding the limit of time or memory is a fault."""
    monkeypatch.setattr(guard, "MAX_SECONDS", 0.0)
    assert broken(tmp_path).kind == "it takes too long"
    monkeypatch.undo()
    monkeypatch.setattr(guard, "MAX_MEMORY", -1)
    assert broken(tmp_path).kind == "it takes too much memory"


def test_a_closed_guard_allows_everything(tmp_path: Path) -> None:
    """The hook stays installed, and must not affect code outside of the guard."""
    with guard.Guard(str(tmp_path)):
        pass
    (tmp_path / "a").write_bytes(b"")


def test_imports_of_functions_are_no_acts(tmp_path: Path) -> None:
    """A reader may import a module of Python for a rare format: nothing of the file causes this import."""
    with tarfile.open(tmp_path / "archive", "w") as archive:
        archive.add(ROOT / "README.md", "README.md")
    data = (tmp_path / "archive").read_bytes()
    program = (
        "import sys\nfrom pathlib import Path\nfrom fuzz.targets import TARGETS\n"
        "sys.modules.pop('tarfile', None)\n"  # as in a process that has read no archive
        "outcome = TARGETS['zip'].check(Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]))\nprint(outcome)\n"
    )
    (tmp_path / "data").write_bytes(data)
    command = [sys.executable, "-c", program, str(tmp_path / "data"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "tar" in done.stdout


def test_mutations_keep_the_frame() -> None:
    """A mutated zip has a valid directory, and a mutated header the correct length and as much data as it states."""

    class Numbers(Random):
        def random(self) -> float:
            return 0.3

    records = read_records(SMALL)
    assert read_records(write_zip(records)) == records
    changed = read_records(mutate_zip(SMALL, lambda data, _: data + b"x", Numbers(1)))
    pickled = next(content for name, content in records if name.endswith("data.pkl"))
    assert pickled + b"x" in list_fields(changed, 1)
    header = json.dumps({"w": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}}).encode()
    created = mutate_safetensors(bytes(8) + b"{", lambda *_: header, Numbers(1))
    assert created == len(header).to_bytes(8, "little") + header + bytes(5)


def test_dictionaries() -> None:
    """Each word of a dictionary is one quoted line, as libFuzzer requires, and each dictionary exists."""
    for name in set(join_fields(TARGETS.values(), "words")):
        lines = (ROOT / "fuzz" / "words" / f"{name}.dict").read_text(encoding="ascii").splitlines()
        wrong = [line for line in lines if not re.fullmatch(r'#.*|"([^"\\]|\\x[0-9a-f]{2})+"', line)]
        assert (len(lines) > 5, wrong) == (True, [])


def test_without_atheris() -> None:
    """Without atheris, the command prints one line and exits with 2."""
    code = (
        "import sys; sys.modules['atheris'] = None; sys.argv = ['fuzz']; from fuzz.__main__ import main; exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pip install -e '.[fuzz]'" in done.stderr


def test_malformed_files_have_the_property(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each malformed file has the error of its case under the guard; one slow case is skipped."""
    monkeypatch.syspath_prepend(str(ROOT / "fixtures"))
    from malformed.write import CASES

    for case in CASES:
        data = case.build()
        if isinstance(data, bytes) and case.name != "doubled_tuples.pth":
            outcome = TARGETS["zip"].check(data, tmp_path)  # reads a file of any format
            assert type(outcome).__name__ == case.error, case.name
            assert case.found in str(outcome), case.name
