"""Each malformed file under fixtures/ is a named error that says what to do, and nothing in it runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import syncheck
from syncheck import errors
from syncheck.cli import main

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
sys.path.append(str(FIXTURES))

from malformed import write  # noqa: E402
from malformed.torch_parts import INTACT  # noqa: E402

if TYPE_CHECKING:
    from malformed.case import Case


@pytest.fixture(scope="module", autouse=True)
def _loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have imported what a comparison of two groups, and of a file that is malformed, imports."""
    folder = tmp_path_factory.mktemp("loaded")
    names = ("m_rank0", "m_rank1", "n_rank0", "n_rank1")
    for name, data in (*((name, INTACT["torch-zip"]) for name in names), ("m_rank2", b"PK\x03\x04")):
        (folder / f"{name}.pth").write_bytes(data)
    assert main(["compare", str(folder)]) == 2
    index = next(case for case in write.CASES if case.name == "index-missing-shard")
    assert main(["compare", str(write.put(index, folder)), str(folder / "m_rank0.pth")]) == 2


def intact_beside(data: bytes | dict[str, bytes]) -> bytes:
    """Return a file in order, of the format of a malformed one where that is one of torch's."""
    legacy = isinstance(data, bytes) and data[:2] == b"\x80\x02"
    return INTACT["torch-legacy" if legacy else "torch-zip"]


# They unfold up to the limit of what is read.
LONG = ("doubled_tuples.pth",)
PARAMETERS = [
    pytest.param(case, id=f"{case.folder}/{case.name}", marks=[pytest.mark.slow] if case.name in LONG else [])
    for case in write.CASES
]


@pytest.mark.parametrize("case", PARAMETERS)
def test_each_is_a_named_error(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the class, the words and a next step or what is needed; exit code 2; nothing imported or run."""
    monkeypatch.chdir(tmp_path)
    path = write.put(case, tmp_path)
    intact = tmp_path / "intact_rank1.pth"
    intact.write_bytes(intact_beside(case.build()))
    assert len(syncheck.read(str(intact)).tensors) == 1
    before, began = set(sys.modules), time.monotonic()
    with pytest.raises(getattr(errors, case.error)) as caught:
        syncheck.read(str(path))
    text = str(caught.value)
    assert type(caught.value).__name__ == case.error
    assert text.startswith((f"{path}: ", f"{path}/"))  # the file, or one of the folder
    assert case.found in text
    assert "; needed " in text or ". " in text
    assert text.isprintable()
    assert len(text) < 2000
    for paths in ([str(path)], [str(path), str(intact)]):
        assert main(["compare", *paths]) == 2
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        assert len(printed.err.splitlines()) == 1
        assert "IN SYNC" not in printed.out
    assert time.monotonic() - began < 5
    assert not [name for name in set(sys.modules) - before if not name.startswith("syncheck.")]
    assert not (tmp_path / "syncheck-canary").exists()


def test_the_committed_files_are_those_that_are_made() -> None:
    """`python fixtures/make.py --malformed` would change nothing; names are unique and no file is large."""
    assert write.stale(FIXTURES) == []
    names = [case.name for case in write.CASES]
    assert len(set(names)) == len(names)
    assert max(map(len, write.made().values())) < 64_000


def test_security_counts_them() -> None:
    """SECURITY.md states how many malformed files there are."""
    (line,) = [
        line for line in (FIXTURES.parent / "SECURITY.md").read_text().splitlines() if "each with its error" in line
    ]
    assert line.split(" | ")[1] == str(len(write.CASES))


def test_both_intact_files_are_in_sync(tmp_path: Path) -> None:
    """What the malformed files are made of is a checkpoint in order, so that each error is of its one fault."""
    for i, data in enumerate(INTACT.values()):
        (tmp_path / f"run_rank{i}.pth").write_bytes(data)
    assert syncheck.compare(tmp_path).exit_code == 0
