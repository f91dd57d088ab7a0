"""`syncheck compare` and `report` in a project whose pyproject.toml has a table [tool.syncheck]."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from checkpoints import changed, network, save_pth

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from checkpoints import Done

    Run = Callable[..., Done]
    Ranks = Callable[..., list[Path]]

BN = ("running_mean", "running_var")


@pytest.fixture
def project(ranks: Ranks, tmp_path: Path) -> Callable[[str], str]:
    """Two ranks whose running statistics differ, and a function that writes the table and returns the file's path."""
    ranks(network(), changed(network(), *BN))

    def write(lines: str) -> str:
        path = tmp_path / "pyproject.toml"
        path.write_text(f"[tool.syncheck]\n{lines}\n")
        return str(path)

    return write


@pytest.mark.parametrize(
    ("lines", "arguments", "code", "note"),
    [
        ("allow = ['SYN201']", [], 0, "allow"),
        ("allow = ['SYN201']", ["--allow", "SYN203"], 1, ""),
        ("allow = ['SYN201']", ["--no-config"], 1, ""),
        ("only = ['params']", [], 0, "only"),
        ("only = ['params']", ["--only-buffers"], 1, ""),
        ("include = ['fc.*']", [], 0, "include"),
        ("include = ['fc.*']", ["--include", "*"], 1, ""),
        ("exclude = ['*running_*']", [], 0, "exclude"),
        ("exclude = ['*running_*']", ["--exclude", "fc.*"], 1, ""),
        ("only = ['buffers']\nbuffers = ['fc.*']\ninclude = ['fc.*']", [], 0, "only, buffers, include"),
        ("rtol = 0\natol = 2", [], 0, "rtol, atol"),
        ("rtol = 0\natol = 2", ["--rtol", "0", "--atol", "0.5"], 1, ""),
        ("rtol = 0\natol = 2", ["--atol", "0.5"], 2, None),
        ("ulp = 4_000_000_000", [], 0, "ulp"),
        ("ulp = 4_000_000_000", ["--ulp", "0"], 1, ""),
        ("group-by = 'rank0'", [], 2, "group-by"),
        ("group-by = 'rank0'", ["--group-by", "rank"], 1, ""),
        ("", [], 1, ""),
    ],
)
def test_options_of_the_file(
    cli: Run, project: Callable[[str], str], lines: str, arguments: list[str], code: int, note: str | None
) -> None:
    """Each option of the file decides the exit code as its namesake does, the command line wins, and what was taken
    from the file is said on stderr."""
    path = project(lines)
    done = cli("compare", "*.pth", *arguments)
    assert done.code == code, done
    if note is None:
        assert done.err.startswith("syncheck: error: --rtol and --atol")
    else:
        assert done.err == (f"syncheck: options from {path}: {note}\n" if note else "")


def test_quiet_and_json_stay_clean(cli: Run, project: Callable[[str], str]) -> None:
    """-q says nothing of the file, and the document on stdout is a document."""
    project("allow = ['SYN201']")
    done = cli("compare", "*.pth", "-q")
    assert (done.code, done.out, done.err) == (0, "", "")
    done = cli("compare", "*.pth", "--format", "json")
    assert json.loads(done.out)["verdict"] == "in_sync"
    assert done.err.count("\n") == 1


def test_errors_of_the_file_are_one_line(cli: Run, project: Callable[[str], str]) -> None:
    """A wrong file stops both commands with 2, before anything is compared."""
    path = project("allow = ['SYN999']")
    for command in ("compare", "report"):
        done = cli(command, "*.pth")
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert done.err.startswith(f"syncheck: error: {path}: tool.syncheck.allow = 'SYN999'")
    assert cli("compare", "*.pth", "--no-config").code == 1


def test_report_without_a_path(cli: Run, project: Callable[[str], str], tmp_path: Path) -> None:
    """report looks at the file's checkpoints, at a path where one is given, and at ckpts where the file names none."""
    path = project("checkpoints = ['run_*.pth']")
    for rank in range(2):
        save_pth(tmp_path / "ckpts" / f"other_rank{rank}.pth", network())
    done = cli("report")
    assert (done.code, done.err) == (1, f"syncheck: options from {path}: checkpoints\n")
    assert cli("report", "ckpts").code == 0
    assert cli("report", "ckpts").err == ""
    assert cli("report", "--no-config").code == 0
    project("checkpoints = ['nothing/*.pth']")
    assert "nothing/*.pth: no file matches" in cli("report").err
    project("")
    assert cli("report").code == 0
    # compare is not told what to compare by a file.
    project("checkpoints = ['run_*.pth']")
    assert cli("compare").code == 2
