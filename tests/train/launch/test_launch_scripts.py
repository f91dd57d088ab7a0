"""The launch scripts in train/scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import find_texts, list_files
from support.programs import RUN, SHORT, assert_trained
from support.started import ROOT

if TYPE_CHECKING:
    from support.programs import Programs

SCRIPTS = ROOT / "train" / "scripts"
NAMES = ("multi_node.sh", "single_gpu.sh", "single_node.sh", "slurm.sbatch", "slurm_array.sbatch")


@pytest.mark.slow
def test_single_gpu(programs: Programs, tmp_path: Path) -> None:
    """single_gpu.sh, started in another folder, trains one process and passes options on."""
    run = programs.run(SCRIPTS / "single_gpu.sh", *SHORT)
    assert (run.returncode, run.stderr) == (0, "")
    assert (tmp_path / "ckpts" / "single_rank0.pth").exists()


@pytest.mark.slow
def test_single_node(programs: Programs, tmp_path: Path) -> None:
    """single_node.sh trains NPROC processes."""
    run = programs.run(SCRIPTS / "single_node.sh", *SHORT, NPROC="2")
    assert (run.returncode, run.stderr) == (0, "")
    assert_trained(tmp_path / "ckpts", 2)


def test_multi_node_prints_its_usage(programs: Programs) -> None:
    """If an argument is missing, multi_node.sh prints only its usage and exits with code 2."""
    run = programs.run(SCRIPTS / "multi_node.sh", 2, 0)
    usage = "usage: multi_node.sh NODES NODE_RANK MASTER_ADDR [MASTER_PORT] [options of run.py]\n"
    assert (run.returncode, run.stdout, run.stderr) == (2, "", usage)


@pytest.mark.parametrize(("least", "most", "count"), [(1, 2, 2), (0, 4, 3), (None, None, None)])
def test_slurm_array_refuses_tasks_that_are_no_ranks(programs: Programs, least: Any, most: Any, count: Any) -> None:
    """slurm_array.sbatch needs the tasks 0 to N - 1, and an array; otherwise one line names the option of sbatch."""
    numbers = {"MIN": least, "MAX": most, "COUNT": count}
    variables = {f"SLURM_ARRAY_TASK_{name}": str(n) for name, n in numbers.items() if n is not None}
    run = programs.run(SCRIPTS / "slurm_array.sbatch", **variables)
    message = "slurm_array.sbatch: the tasks of the array must be the ranks from 0: submit it with --array=0-N\n"
    assert (run.returncode, run.stdout, run.stderr) == (2, "", message)


@pytest.mark.parametrize("name", ["multi_node.sh", "single_gpu.sh", "single_node.sh"])
def test_scripts_behind_links(programs: Programs, tmp_path: Path, name: str) -> None:
    """A script finds its own run.py if started through a link, or through a link to a link, in another folder."""
    (tmp_path / "bin").mkdir()
    link, second = tmp_path / "bin" / "direct", tmp_path / "train"
    link.symlink_to(os.path.relpath(SCRIPTS / name, link.parent))
    second.symlink_to(link)
    python = tmp_path / "bin" / "python"  # prints its arguments
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    arguments = (2, 0, "127.0.0.1", "--seed", 7) if name == "multi_node.sh" else ("--seed", 7)
    for script in (link, second):
        run = programs.run(script, *arguments, NPROC="2", PATH=f"{python.parent}:{os.environ['PATH']}")
        assert (run.returncode, run.stderr) == (0, "")
        (program,) = find_texts(run.stdout.splitlines(), end="run.py")
        assert Path(program).resolve() == RUN
        assert run.stdout.splitlines()[-2:] == ["--seed", "7"]


def test_scripts_are_safe() -> None:
    """Every script is executable, stops at the first error, and passes its arguments on."""
    assert list_files(SCRIPTS) == sorted(NAMES)
    for name in NAMES:
        text = (SCRIPTS / name).read_text()
        assert os.access(SCRIPTS / name, os.X_OK), name
        assert text.startswith("#!/usr/bin/env bash\n"), name
        assert "\nset -euo pipefail\n" in text, name
        assert '"$@"' in text, name


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="there is no shellcheck")
def test_shellcheck_reports_no_problem() -> None:
    """shellcheck reports no problem in the scripts."""
    completed = subprocess.run(
        ["shellcheck", *(SCRIPTS / name for name in NAMES)], capture_output=True, text=True, check=False
    )
    assert (completed.returncode, completed.stdout) == (0, "")
