"""`--syncheck-output FILE`."""

from __future__ import annotations

import html
import json
import os
from typing import TYPE_CHECKING

import pytest
from support.checkpoints import changed, network, save
from support.sessions import sessions

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def drifted(tmp_path: Path) -> Path:
    """A folder with two different checkpoints and an empty suite."""
    save(tmp_path / "ddp_rank0.pth", network())
    save(tmp_path / "ddp_rank1.pth", changed(network(), "running_mean"))
    (tmp_path / "test_suite.py").write_text("def test_own():\n    pass\n")
    return tmp_path


@pytest.mark.slow
def test_files_are_written(drifted: Path) -> None:
    """Reports on all checkpoints are written in the format of their extension, with -n and -k too."""
    endings = ("json", "html", "md", "txt", "xml")
    first, spread, listing = sessions(
        (drifted, ["--syncheck", "*.pth", *(f"--syncheck-output=one.{ending}" for ending in endings)]),
        (drifted, ["--syncheck", "*.pth", "-n", "1", "-k", "parameters", "--syncheck-output", "spread.json"]),
        (drifted, ["--syncheck", "*.pth", "--collect-only", "--syncheck-output", "listed.json"]),
    )
    assert (first.code, spread.code, listing.code) == (1, 0, 0)
    for ending in endings:
        assert "SYN201" in (drifted / f"one.{ending}").read_text()
        assert f"report written: one.{ending}" in first.out
    assert "Number of elements by absolute difference" in (drifted / "one.html").read_text()
    for ending in ("html", "md", "txt", "xml"):
        advised = (drifted / f"one.{ending}").read_text()
        assert "--syncheck-allow SYN201" in html.unescape(advised).replace("`", "")
    for name in ("one", "spread"):
        document = json.loads((drifted / f"{name}.json").read_text())
        assert document["groups"][0]["findings"][0]["code"] == "SYN201"
        assert document["groups"][0]["replicas"][0]["path"] == "ddp_rank0.pth"
    assert not (drifted / "listed.json").exists()


def test_output_errors(drifted: Path) -> None:
    """An output file that cannot be written is an error; wrong usage is reported before the comparison."""
    base = ["--syncheck", "*.pth", "--syncheck-output"]
    passed, failed, ending, nothing = sessions(
        (drifted, [*base, "no_folder/a.json", "-k", "parameters"]),
        (drifted, [*base, "no_folder/a.json"]),
        (drifted, [*base, "a.pdf"]),
        (drifted, ["test_suite.py", "--syncheck-output", "a.json"]),
    )
    for run in (passed, failed):
        assert "ERROR: --syncheck-output no_folder/a.json: cannot be written" in run.out
        assert "report written" not in run.out
    assert (passed.code, failed.code) == (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.TESTS_FAILED)
    assert ending.code == nothing.code == pytest.ExitCode.USAGE_ERROR
    assert ending.out.startswith("ERROR: --syncheck-output a.pdf: unknown file extension")
    assert nothing.out.startswith("ERROR: --syncheck-output a.json: no checkpoints to report on")


@pytest.mark.parametrize("option", ["--syncheck-output", "--syncheck-baseline"])
def test_nothing_is_replaced(drifted: Path, option: str) -> None:
    """A report or a baseline never replaces an input, a checkpoint or a link to one; the session does not start."""
    (drifted / "checkpoint.json").write_bytes((drifted / "ddp_rank0.pth").read_bytes())
    (drifted / "link.json").symlink_to("ddp_rank1.pth")
    os.link(drifted / "ddp_rank0.pth", drifted / "hard.json")
    (drifted / "known.json").write_text('{"syncheck_baseline": 1, "accepted": {}}')
    (drifted / "known.txt").symlink_to("known.json")
    before = {path.name: path.read_bytes() for path in drifted.iterdir() if path.is_file()}
    update = ["--syncheck-update-baseline"] if option == "--syncheck-baseline" else []
    runs = [
        (drifted, ["--syncheck", "*.pth", option, target, *update])
        for target in ("checkpoint.json", "link.json", "hard.json")
    ]
    runs.append(
        (drifted, ["--syncheck", "*.pth", "--syncheck-baseline", "known.json", "--syncheck-output", "known.txt"])
    )
    for run in sessions(*runs):
        assert run.code == pytest.ExitCode.USAGE_ERROR
        assert run.out.startswith("ERROR: ")
    assert {path.name: path.read_bytes() for path in drifted.iterdir() if path.is_file()} == before
