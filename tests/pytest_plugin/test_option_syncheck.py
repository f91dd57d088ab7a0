"""`--syncheck GLOB`: what is judged, what is collected beside it, and what is wrong usage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import changed, network, save
from sessions import session, sessions

if TYPE_CHECKING:
    from pathlib import Path

OUR_ITEMS = {"ckpts::ddp::parameters": "PASSED", "ckpts::ddp::bn-stats": "PASSED"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a suite, two equal checkpoints, and files that are none."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_suite.py").write_text("def test_own():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    for rank in range(2):
        save(tmp_path / "ckpts" / f"ddp_rank{rank}.pth", network())
    return tmp_path


def test_without_a_path_only_checkpoints_are_judged(project: Path) -> None:
    """The suite of the folder is collected only where a path asks for it, with -n too, and `passed` is exit code 0."""
    alone, both, everything, spread = sessions(
        (project, ["-v", "--syncheck", "ckpts/*.pth"]),
        (project, ["-v", "--syncheck", "ckpts/*.pth", "tests/test_suite.py"]),
        (project, ["-v", "--syncheck", "ckpts", "."]),
        (project, ["-v", "--syncheck", "ckpts/*.pth", "-n", "2"]),
    )
    assert (alone.code, alone.outcomes()) == (0, OUR_ITEMS), alone.out
    assert "collected 2 items" in alone.out
    assert "testpaths" not in alone.out
    assert (spread.code, spread.outcomes()) == (0, OUR_ITEMS), spread.out
    for run in (both, everything):
        assert (run.code, run.outcomes()) == (0, {"tests/test_suite.py::test_own": "PASSED"} | OUR_ITEMS), run.out


def test_a_glob_that_the_shell_expanded(project: Path) -> None:
    """Files and folders of checkpoints after the first are judged, not collected as tests."""
    save(project / "more" / "other_rank0.pth", network())
    save(project / "more" / "other_rank1.pth", changed(network(), "fc.bias"))
    (project / "ckpts" / "notes.json").write_text("{}")
    files, folders, spread = sessions(
        (project, ["--syncheck", "ckpts/ddp_rank0.pth", "ckpts/ddp_rank1.pth", "-v"]),
        (project, ["--syncheck", "ckpts", "more", "tests", "-v"]),
        (project, ["--syncheck", "ckpts/ddp_rank0.pth", "ckpts/ddp_rank1.pth", "-v", "-n", "2"]),
    )
    assert (files.code, files.outcomes()) == (0, OUR_ITEMS), files.out
    assert (spread.code, spread.outcomes()) == (0, OUR_ITEMS), spread.out
    assert folders.code == 1, folders.out
    assert folders.outcomes() == {"tests/test_suite.py::test_own": "PASSED"} | OUR_ITEMS | {
        "more::other::parameters": "FAILED",
        "more::other::bn-stats": "PASSED",
    }


@pytest.mark.parametrize("spread", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_nothing_to_judge_is_wrong_usage(project: Path, spread: tuple[str, ...]) -> None:
    """A glob without a match, a missing file and a folder without a checkpoint end in one line and exit code 4."""
    (project / "empty").mkdir()
    wrong: list[list[Any]] = [["no/*.pth"], ["ckpts/ddp_rank7.pth"], [""], ["empty"]]
    for paths, ended in zip(wrong, sessions(*((project, ["--syncheck", *p, *spread]) for p in wrong)), strict=True):
        assert ended.code == pytest.ExitCode.USAGE_ERROR, ended.out
        told = [line for line in ended.lines if line]
        assert len(told) == 1, ended.out
        assert told[0].startswith("ERROR: ")
        assert (paths[0] or "''") in told[0]


def test_globs_are_relative_to_where_pytest_was_started(project: Path) -> None:
    """Below the root, globs are seen from there, ids too, and a test that moves elsewhere changes no verdict."""
    (project / "tests" / "test_suite.py").write_text("import os\n\ndef test_own():\n    os.chdir('/')\n")
    root = f"--rootdir={project}"
    (ended,) = sessions((project / "ckpts", ["-v", "--syncheck", "*.pth", "../tests", root]))
    assert ended.code == 0, ended.out
    # Versions of pytest differ in how they write the folder itself.
    found = {nodeid.partition("::")[2]: outcome for nodeid, outcome in ended.outcomes().items()}
    assert found == dict.fromkeys(("test_own", "ddp::parameters", "ddp::bn-stats"), "PASSED"), ended.out


def test_the_id_as_printed_can_be_given(project: Path) -> None:
    """An id, or the start of one, selects items beside --syncheck; one that is not there is told."""
    one, some, wrong = sessions(
        (project, ["-v", "--syncheck", "ckpts/*.pth", "ckpts::ddp::bn-stats", "-n", "1"]),
        (project, ["-v", "--syncheck", "ckpts/*.pth", "ckpts::ddp", "tests"]),
        (project, ["-v", "--syncheck", "ckpts/*.pth", "ckpts::ddp::bn"]),
    )
    assert one.outcomes() == {"ckpts::ddp::bn-stats": "PASSED"}, one.out
    assert some.outcomes() == {"tests/test_suite.py::test_own": "PASSED"} | OUR_ITEMS, some.out
    assert wrong.code == pytest.ExitCode.USAGE_ERROR
    assert "ckpts::ddp::bn: no such test; available are ckpts::ddp::parameters, ckpts::ddp::bn-stats" in wrong.out


def test_a_pytest_without_checkpoints_pays_nothing(project: Path) -> None:
    """A run of a suite alone imports neither numpy nor what compares; nor does importing the plugin."""
    (project / "tests" / "test_suite.py").write_text(
        "import sys\n\ndef test_own():\n"
        "    heavy = {'numpy', 'torch', 'rich', 'syncheck.api', 'syncheck.pytest_plugin.checkpoints.judge'}\n"
        "    assert not heavy & set(sys.modules)\n"
    )
    ended = session(project, "-p", "no:cacheprovider")
    assert ended.code == 0, ended.out
    assert "syncheck: " not in ended.out


def test_folders_that_the_shell_expanded(project: Path) -> None:
    """A folder beside --syncheck is judged by what it holds: scripts and other endings hide no checkpoint."""
    save(project / "runs" / "a" / "rank0.pth", network())
    save(project / "runs" / "a" / "rank1.pth", network())
    save(project / "runs" / "b" / "rank0.pth", network())
    save(project / "runs" / "b" / "rank1.pth", changed(network(), "fc.bias"))
    (project / "runs" / "b" / "train.py").write_text("raise SystemExit('not to be imported')\n")
    for ending in ("", ".tar"):
        save(project / f"flat{ending}" / f"rank0{ending}", network())
        save(project / f"flat{ending}" / f"rank1{ending}", changed(network(), "fc.bias"))
    scripted, spread, no_ending, tar = sessions(
        (project, ["-v", "--syncheck", "runs/a", "runs/b"]),
        (project, ["-v", "--syncheck", "runs/a", "runs/b", "-n", "2"]),
        (project, ["-v", "--syncheck", "runs/a/*", "flat"]),
        (project, ["-v", "--syncheck", "ckpts/*", "flat.tar"]),
    )
    for run in (scripted, spread, no_ending, tar):
        assert run.code == 1, run.out
        assert sorted(run.outcomes().values()) == ["FAILED", *["PASSED"] * 3], run.out


def test_folders_with_tests_and_checkpoints(project: Path) -> None:
    """A folder with both is judged too, unless the glob was quoted or it lies above what is judged, which is told."""
    save(project / "tests" / "data" / "rank0.pth", network())
    save(project / "tests" / "data" / "rank1.pth", changed(network(), "fc.bias"))
    (project / "runs").mkdir()
    for name in ("train.py", "latest", ".cache/test_it.py"):
        (project / "runs" / name).parent.mkdir(exist_ok=True)
        (project / "runs" / name).write_text("")
    both, quoted, quoted_spread, above, neither = sessions(
        (project, ["-v", "--syncheck", "ckpts", "tests"]),
        (project, ["-v", "--syncheck", "ckpts/*", "tests"]),
        (project, ["-v", "--syncheck", "ckpts/*", "tests", "-n", "2"]),
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
