"""`--syncheck GLOB`: checkpoints to judge, tests collected beside them, and usage errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.checkpoints import changed, network, save
from support.sessions import sessions

if TYPE_CHECKING:
    from pathlib import Path

OUR_ITEMS = {"ckpts::ddp::parameters": "PASSED", "ckpts::ddp::bn-stats": "PASSED"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a suite, two equal checkpoints, and other files."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_suite.py").write_text("def test_own():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    for rank in range(2):
        save(tmp_path / "ckpts" / f"ddp_rank{rank}.pth", network())
    return tmp_path


def test_without_a_path_only_checkpoints_are_judged(project: Path) -> None:
    """The suite of the folder is collected only with a path."""
    alone, both, everything = sessions(
        (project, ["-v", "--syncheck", "ckpts/*.pth"]),
        (project, ["-v", "--syncheck", "ckpts/*.pth", "tests/test_suite.py"]),
        (project, ["-v", "--syncheck", "ckpts", "."]),
    )
    assert (alone.code, alone.outcomes()) == (0, OUR_ITEMS), alone.out
    assert "collected 2 items" in alone.out
    assert "testpaths" not in alone.out
    for run in (both, everything):
        assert (run.code, run.outcomes()) == (0, {"tests/test_suite.py::test_own": "PASSED"} | OUR_ITEMS), run.out


@pytest.mark.slow
def test_a_glob_that_the_shell_expanded(project: Path) -> None:
    """Files and folders of checkpoints after the first are judged, not collected as tests."""
    save(project / "more" / "other_rank0.pth", network())
    save(project / "more" / "other_rank1.pth", changed(network(), "fc.bias"))
    (project / "ckpts" / "notes.json").write_text("{}")
    files, folders, spread = sessions(
        (project, ["--syncheck", "ckpts/ddp_rank0.pth", "ckpts/ddp_rank1.pth", "-v"]),
        (project, ["--syncheck", "ckpts", "more", "tests", "-v"]),
        (project, ["--syncheck", "ckpts/ddp_rank0.pth", "ckpts/ddp_rank1.pth", "-v", "-n", "1"]),
    )
    assert (files.code, files.outcomes()) == (0, OUR_ITEMS), files.out
    assert (spread.code, spread.outcomes()) == (0, OUR_ITEMS), spread.out
    assert folders.code == 1, folders.out
    assert folders.outcomes() == {"tests/test_suite.py::test_own": "PASSED"} | OUR_ITEMS | {
        "more::other::parameters": "FAILED",
        "more::other::bn-stats": "PASSED",
    }


@pytest.mark.parametrize("spread", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_paths_without_checkpoints_are_usage_errors(project: Path, spread: tuple[str, ...]) -> None:
    """A glob without a match, a missing file and a folder without checkpoints give one line and exit code 4."""
    (project / "empty").mkdir()
    wrong: list[list[Any]] = [["no/*.pth"], ["ckpts/ddp_rank7.pth"], [""], ["empty"]]
    for paths, ended in zip(wrong, sessions(*((project, ["--syncheck", *p, *spread]) for p in wrong)), strict=True):
        assert ended.code == pytest.ExitCode.USAGE_ERROR, ended.out
        lines = [line for line in ended.lines if line]
        assert len(lines) == 1, ended.out
        assert lines[0].startswith("ERROR: ")
        assert (paths[0] or "''") in lines[0]


def test_globs_are_relative_to_the_start_folder(project: Path) -> None:
    """Globs and ids are relative to the start folder, even if a test changes the working folder."""
    (project / "tests" / "test_suite.py").write_text("import os\n\ndef test_own():\n    os.chdir('/')\n")
    root = f"--rootdir={project}"
    (ended,) = sessions((project / "ckpts", ["-v", "--syncheck", "*.pth", "../tests", root]))
    assert ended.code == 0, ended.out
    # Versions of pytest differ in how they write the folder itself.
    outcomes = {nodeid.partition("::")[2]: outcome for nodeid, outcome in ended.outcomes().items()}
    assert outcomes == dict.fromkeys(("test_own", "ddp::parameters", "ddp::bn-stats"), "PASSED"), ended.out


def test_ids_on_the_command_line(project: Path) -> None:
    """An id, or its beginning, selects items beside --syncheck; an unknown id is an error with the known ids."""
    first, selected, wrong = sessions(
        (project, ["-v", "--syncheck", "ckpts/*.pth", "ckpts::ddp::bn-stats"]),
        (project, ["-v", "--syncheck", "ckpts/*.pth", "ckpts::ddp", "tests"]),
        (project, ["-v", "--syncheck", "ckpts/*.pth", "ckpts::ddp::bn"]),
    )
    assert first.outcomes() == {"ckpts::ddp::bn-stats": "PASSED"}, first.out
    assert selected.outcomes() == {"tests/test_suite.py::test_own": "PASSED"} | OUR_ITEMS, selected.out
    assert wrong.code == pytest.ExitCode.USAGE_ERROR
    assert "ckpts::ddp::bn: no such test; available are ckpts::ddp::parameters, ckpts::ddp::bn-stats" in wrong.out


def test_folders_that_the_shell_expanded(project: Path) -> None:
    """A folder beside --syncheck is judged by its content: scripts and other extensions hide no checkpoint."""
    save(project / "runs" / "a" / "rank0.pth", network())
    save(project / "runs" / "a" / "rank1.pth", network())
    save(project / "runs" / "b" / "rank0.pth", network())
    save(project / "runs" / "b" / "rank1.pth", changed(network(), "fc.bias"))
    (project / "runs" / "b" / "train.py").write_text("raise SystemExit('not to be imported')\n")
    for ending in ("", ".tar"):
        save(project / f"flat{ending}" / f"rank0{ending}", network())
        save(project / f"flat{ending}" / f"rank1{ending}", changed(network(), "fc.bias"))
    scripted, no_ending, tar = sessions(
        (project, ["-v", "--syncheck", "runs/a", "runs/b"]),
        (project, ["-v", "--syncheck", "runs/a/*", "flat"]),
        (project, ["-v", "--syncheck", "ckpts/*", "flat.tar"]),
    )
    for run in (scripted, no_ending, tar):
        assert run.code == 1, run.out
        assert sorted(run.outcomes().values()) == ["FAILED", *["PASSED"] * 3], run.out


@pytest.mark.slow
def test_folders_with_tests_and_checkpoints(project: Path) -> None:
    """A folder with tests and checkpoints is judged, unless the glob was quoted or the folder is a parent."""
    save(project / "tests" / "data" / "rank0.pth", network())
    save(project / "tests" / "data" / "rank1.pth", changed(network(), "fc.bias"))
    (project / "runs").mkdir()
    for name in ("train.py", "latest", ".cache/test_it.py"):
        (project / "runs" / name).parent.mkdir(exist_ok=True)
        (project / "runs" / name).write_text("")
    both, quoted, quoted_spread, above, neither = sessions(
        (project, ["-v", "--syncheck", "ckpts", "tests"]),
        (project, ["-v", "--syncheck", "ckpts/*", "tests"]),
        (project, ["-v", "--syncheck", "ckpts/*", "tests", "-n", "1"]),
        (project, ["-v", "--syncheck", "ckpts", "."]),
        (project, ["-v", "--syncheck", "ckpts", "runs"]),
    )
    suite = {"tests/test_suite.py::test_own": "PASSED"}
    assert both.code == 1, both.out
    assert both.outcomes().items() > (suite | OUR_ITEMS).items()
    for run, folder in ((quoted, "tests"), (quoted_spread, "tests"), (above, ".")):
        assert (run.code, run.outcomes()) == (0, suite | OUR_ITEMS), run.out
        assert f"syncheck: {folder}: its checkpoints are not compared" in run.out
    assert neither.code == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: runs: this folder contains neither checkpoints nor tests" in neither.out
