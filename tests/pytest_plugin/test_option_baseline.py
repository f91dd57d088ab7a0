"""`--syncheck-baseline FILE` and `--syncheck-update-baseline`."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import pytest
from support.checkpoints import changed, network, save
from support.listings import find_texts
from support.sessions import sessions

if TYPE_CHECKING:
    from pathlib import Path

FILES = ["-v", "--syncheck", "*.pth", "--syncheck-baseline", "known.json"]
UPDATE = [*FILES, "--syncheck-update-baseline"]


def write(folder: Path, *endings: str, name: str = "ddp") -> Path:
    """Write a run of two ranks that differ in the tensors whose names end with `endings`."""
    for rank in range(2):
        save(folder / f"{name}_rank{rank}.pth", changed(network(), *(endings if rank else ())))
    return folder


# In one process, and in two workers of pytest-xdist.
SPREAD = [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)]


@pytest.mark.parametrize("spread", SPREAD)
def test_known_new_and_fixed(tmp_path: Path, spread: tuple[str, ...]) -> None:
    """Known findings pass and are reported, newly affected tensors fail, and fixed findings are reported."""
    entries = {"SYN201": {"bn_mean": ["layer0.bn.running_mean", "layer1.bn.running_mean"]}}
    accepted = dict.fromkeys(("same", "more", "less"), entries)
    (tmp_path / "known.json").write_text(json.dumps({"syncheck_baseline": 1, "accepted": accepted}))
    write(tmp_path, "running_mean", name="same")
    write(tmp_path, "running_mean", "layer1.bn.running_var", name="more")
    write(tmp_path, "layer0.bn.running_mean", name="less")
    (run,) = sessions((tmp_path, [*FILES, *spread, "--junitxml=r.xml"]))
    assert run.code == 1
    assert [nodeid for nodeid, ended in run.outcomes().items() if ended == "FAILED"] == [".::more::bn-stats"]
    assert find_texts(run.lines, "same: parameters 8 agree; bn-stats 2/6 differ (SYN201 accepted)")
    assert "not in the baseline: layer1.bn.running_var" in " ".join(run.out.split())
    fixed = find_texts(run.lines, start="fixed: ")
    assert len(fixed) == 1
    assert "SYN201 on layer1.bn.running_mean; " in fixed[0]
    assert "options in effect: baseline known.json" in run.lines
    properties = {(first.get("name"), first.get("value")) for first in ET.parse(tmp_path / "r.xml").iter("property")}
    assert ("syncheck_accepted", "SYN201") in properties


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.slow
def test_an_update_requires_all_tests(tmp_path: Path, spread: tuple[str, ...]) -> None:
    """An update requires all tests and readable files, replaces the entries of its runs, and keeps the others."""
    entries = {"gone": {"SYN299": {"parameter": ["w"]}}, "zero": {"SYN299": {"parameter": ["fc.weight"]}}}
    before = json.dumps({"syncheck_baseline": 1, "accepted": entries})
    complete, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (complete, broken):
        write(write(folder, name="zero"), "running_mean")
        (folder / "known.json").write_text(before)
    (broken / "ddp_rank2.pth").write_bytes(b"junk")
    selected, first, junk, done = sessions(
        (broken, [*UPDATE, *spread, "-k", "bn-stats"]),
        (broken, [*UPDATE, ".::ddp::bn-stats"]),
        (broken, [*UPDATE, *spread]),
        (complete, [*UPDATE, *spread]),
    )
    assert (selected.code, first.code, junk.code, done.code) == (4, 4, 1, 0), done.out
    assert (
        "ERROR: the baseline was not updated, because 3 tests of checkpoints did not run, for example" in selected.out
    )
    assert "--syncheck-update-baseline: requires the tests of all checkpoints: remove .::ddp::bn-stats" in first.out
    assert "ERROR: the baseline is not updated: ddp_rank2.pth could not be read" in junk.out
    assert (broken / "known.json").read_text() == before
    assert "baseline written: known.json: 3 names in 2 runs accepted: 2 added, 1 removed" in done.lines
    assert json.loads((complete / "known.json").read_text())["accepted"].keys() == {"ddp", "gone"}


def test_wrong_usage(tmp_path: Path) -> None:
    """A missing or invalid file, and an update without a file or checkpoints, give one line and exit code 4."""
    write(tmp_path)
    (tmp_path / "junk.json").write_text("{}")
    arguments = {
        "known.json: no such baseline; create it with --syncheck-update-baseline": FILES,
        "junk.json: not a baseline: it has no syncheck_baseline": [*FILES[:-1], "junk.json"],
        "--syncheck-update-baseline: requires --syncheck-baseline FILE": [*FILES[:3], "--syncheck-update-baseline"],
        "--syncheck-update-baseline: no checkpoints to compare": UPDATE[3:],
        "--syncheck-baseline no/known.json: cannot be written: the folder no does not exist": [
            *FILES[:-1],
            "no/known.json",
            "--syncheck-update-baseline",
        ],
    }
    for error, run in zip(arguments, sessions(*((tmp_path, settings) for settings in arguments.values())), strict=True):
        assert run.code == pytest.ExitCode.USAGE_ERROR
        assert run.out.startswith(f"ERROR: {error}"), run.out
        assert run.out.strip().count("\n") == 0


def test_the_fixture_and_the_project(tmp_path: Path) -> None:
    """The baseline of [tool.syncheck] applies to tests of checkpoints and to the fixture in all subfolders."""
    write(tmp_path, "running_mean")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n[tool.syncheck]\nbaseline = 'known.json'\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "test_suite.py").write_text(
        "def test_files(syncheck):\n    syncheck.assert_in_sync('ddp_*.pth')\n"
    )
    update, both = sessions(
        (tmp_path, ["--syncheck", "*.pth", "--syncheck-update-baseline"]),
        (tmp_path, ["--syncheck", "*.pth", "below"]),
    )
    assert (update.code, both.code) == (0, 0), both.out
