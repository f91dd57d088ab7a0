"""The ini value `syncheck_checkpoints`, and the table [tool.syncheck]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.checkpoints import changed, network, save
from support.sessions import sessions

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with syncheck_checkpoints in its pyproject.toml."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_suite.py").write_text("def test_own():\n    pass\n")
    save(tmp_path / "ckpts" / "ddp_rank0.pth", network())
    save(tmp_path / "ckpts" / "ddp_rank1.pth", changed(network(), "running_mean"))
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\nsyncheck_checkpoints = ["ckpts/*.pth"]\n\n[tool.syncheck]\nallow = ["SYN201"]\n'
    )
    return tmp_path


@pytest.mark.slow
def test_checkpoints_of_the_project(project: Path) -> None:
    """Like testpaths, the ini value applies to pytest without paths in the rootdir only.

    The project's options apply, are printed, and are overridden by the command line.
    """
    ours = {"ckpts::ddp::parameters": "PASSED", "ckpts::ddp::bn-stats": "PASSED"}
    suite = {"tests/test_suite.py::test_own": "PASSED"}
    bare, spread, path, below, first, strict, second = sessions(
        (project, ["-v"]),
        (project, ["-v", "-n", "1"]),
        (project, ["-v", "tests"]),
        (project / "tests", ["-v", f"--rootdir={project}"]),
        (project, ["-v", "ckpts::ddp::bn-stats"]),
        (project, ["-v", "--syncheck-allow", "SYN101"]),
        (project, ["-v", "--syncheck", "ckpts"]),
    )
    for run in (bare, spread):
        assert (run.code, run.outcomes()) == (0, suite | ours), run.out
        assert "syncheck: options from pyproject.toml: allow SYN201" in run.lines
        assert "syncheck_checkpoints:" not in run.out
        assert "options in effect: allow SYN201" in run.out
    assert (path.code, path.outcomes()) == (0, suite), path.out
    assert "syncheck_checkpoints: ignored, because paths were given" in path.lines
    assert "syncheck_checkpoints: ignored, because --syncheck was given" in second.lines
    assert below.code == 0
    assert f"syncheck_checkpoints: ignored, because pytest was not started in {project}" in below.lines
    assert list(below.outcomes()) == ["test_suite.py::test_own"]
    assert first.outcomes() == {"ckpts::ddp::bn-stats": "PASSED"}, first.out
    assert "options from pyproject.toml" not in strict.out
    assert (strict.code, strict.outcomes()["ckpts::ddp::bn-stats"]) == (1, "FAILED")


def test_missing_checkpoints(project: Path) -> None:
    """Missing checkpoints and an invalid table are errors, even if the suite passes."""
    for file in (project / "ckpts").iterdir():
        file.unlink()
    (gone,) = sessions((project, []))
    assert gone.code == pytest.ExitCode.USAGE_ERROR
    assert gone.out.startswith("ERROR: syncheck_checkpoints ckpts/*.pth: no such file or folder")
    (project / "pyproject.toml").write_text("[tool.syncheck]\nallow = 7\n")
    save(project / "ckpts" / "ddp_rank0.pth", network())
    (wrong,) = sessions((project, ["--syncheck", "ckpts"]))
    assert wrong.code == pytest.ExitCode.USAGE_ERROR
    assert "pyproject.toml: allow=7: must be a list of strings" in wrong.out


def test_a_rank_judges_no_checkpoints(project: Path) -> None:
    """The session of a rank collects no checkpoints."""
    (project / "conftest.py").write_text(
        "def pytest_configure(config):\n    config.pluginmanager.register(object(), 'syncheck-rank')\n"
    )
    (inner,) = sessions((project, ["-v"]))
    assert inner.outcomes() == {"tests/test_suite.py::test_own": "PASSED"}, inner.out


def test_rootdir_is_a_link(project: Path) -> None:
    """If --rootdir is a link to the current folder, configured checkpoints are judged, and ids work."""
    (project.parent / "link").symlink_to(project)
    root = f"--rootdir={project.parent / 'link'}"
    bare, first = sessions((project, ["-v", root]), (project, ["-v", root, "../link/ckpts::ddp::bn-stats"]))
    # pytest writes the ids of tests in the same form.
    assert list(bare.outcomes()) == [
        "../link/tests/test_suite.py::test_own",
        "../link/ckpts::ddp::parameters",
        "../link/ckpts::ddp::bn-stats",
    ]
    assert "  ../link/ckpts::ddp: " in bare.out
    assert first.outcomes() == {"../link/ckpts::ddp::bn-stats": "PASSED"}, first.out
