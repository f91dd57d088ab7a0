"""The commands and the Python code in README work in a clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICK_START = README.split("\n## Quick start\n")[1].split("\n## ")[0]
# Users type each of the lines below, and .ci/run extracts the second line from README.
COMMANDS = (
    "pip install -e '.[train]' && syncheck demo",
    "pip install -e '.[train,test]' && pytest -n 2",
    "torchrun --nproc-per-node 2 train/run.py --save-per-rank",
    "syncheck compare ckpts/*.pth",
    "syncheck report --only-buffers",
    "pytest --syncheck 'ckpts/*.pth'",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_in_readme(command: str) -> None:
    """Each command is a code line of its own, followed by a comment at most."""
    assert re.search(rf"^    {re.escape(command)}(?: +# .*)?$", README, re.MULTILINE)


def test_quick_start_commands_run(tmp_path: Path) -> None:
    """Each command of the quick start runs without torch, and ends with the exit code for its fixture."""
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    (tmp_path / "torch.py").write_text("raise ImportError('the quick start must not import torch')\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    codes = []
    for line in re.findall(r"^    syncheck (.*?)(?: +# .*)?$", QUICK_START, re.MULTILINE):
        command = ["sh", "-c", f'"$0" -m syncheck {line}', sys.executable]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
        codes.append(done.returncode)
        assert done.stderr == ""
    assert codes == [1, 1, 0]
    assert (tmp_path / "report.html").exists()


def test_python_example_runs() -> None:
    """The Python example prints the code, the ranks and the fix of the finding."""
    (code,) = re.findall(r"```python\n(.*?)```", QUICK_START, flags=re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.startswith("SYN201 (0, 1) ")
