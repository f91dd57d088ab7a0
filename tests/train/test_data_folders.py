"""A folder of --data-dir that cannot be the data set is one line: problem, place, expectation, and next step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from train.run import main

if TYPE_CHECKING:
    from pathlib import Path

# What the folder of each data set contains.
CONTENTS = {
    "digits": "digits.npz",
    "text": "text.txt",
    "mnist": "MNIST/raw",
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
}


def run(capsys: pytest.CaptureFixture[str], name: str, folder: Path) -> str:
    """Return the only line of a refused run."""
    if CONTENTS[name] not in ("digits.npz", "text.txt"):
        pytest.importorskip("torchvision", exc_type=ImportError)
    assert main(["--data", name, "--data-dir", str(folder), "--max-steps", "1", "--progress", "none"]).code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("kind", ["missing", "file"])
def test_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str) -> None:
    """A path that does not exist, or is a file, is named with the expected contents."""
    folder = tmp_path / "data"
    if kind == "file":
        folder.write_text("text")
    line = run(capsys, name, folder)
    assert line.startswith(f"run.py: error: --data-dir {folder}: ")
    assert CONTENTS[name] in line


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("path", ["cat/1.jpg", "train/cat/2.PNG", "3.jpeg"])
def test_a_folder_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, path: str) -> None:
    """Images of a user are named, with the section of the page on tasks."""
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).touch()
    line = run(capsys, name, tmp_path)
    assert f"--data-dir {tmp_path}: " in line
    assert path in line
    assert "docs/tasks.md" in line


def test_images_beside_the_data_are_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pictures in the folder of a data set do not matter, and a folder without both has the message of its files."""
    (tmp_path / "plot.png").touch()
    (tmp_path / "text.txt").write_text("abc")
    assert "too short" in run(capsys, "text", tmp_path)
    (tmp_path / "empty").mkdir()
    assert "digits.npz: not found" in run(capsys, "digits", tmp_path / "empty")
