"""The command line of `syncheck watch`: options before the script, and everything after it is the script's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "import sys; print(sys.argv[1:], __name__, sys.path[0]); sys.exit(int(sys.argv[1]))"


def watch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder with a script."""
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "syncheck", "watch", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "no script"),
        (["nothing.py"], "nothing.py: no such script"),
        (["--every"], "--every: expected one argument"),
        (["--every", "-1", "script.py"], "--every -1: must be at least 0"),
        (["--evry", "3", "script.py"], "--evry"),
        (["--witnesses", "batch", "script.py"], "'batch' is none of gradients, batches, rng, settings"),
        (["--allow", "SYN999", "script.py"], "SYN999"),
        (["-o", "page.pdf", "script.py"], "page.pdf: unknown file extension"),
        (["-m", "no_module"], "-m no_module: no such module"),
    ],
)
def test_wrong_usage_is_one_line(tmp_path: Path, arguments: list[str], part: str) -> None:
    """Wrong options end with exit code 2 and one line, before the script runs."""
    result = watch(tmp_path, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert part in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["script.py", "0", "--every", "x"], ["0", "--every", "x"]),
        (["--every=5", "--strict", "script.py", "3"], ["3"]),
        (["--allow", "SYN201", "--", "script.py", "0"], ["0"]),
        (["-m", "script", "4", "--help"], ["4", "--help"]),
    ],
)
def test_the_script_gets_its_arguments_and_gives_its_exit_code(
    tmp_path: Path, arguments: list[str], given: list[str]
) -> None:
    """The script is __main__, its folder is searched first, and its exit code is that of the command."""
    result = watch(tmp_path, *arguments)
    assert result.returncode == int(given[0]), result.stderr
    assert result.stdout == f"{given} __main__ {tmp_path}\n"
