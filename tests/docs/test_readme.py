"""The commands and the Python code in README work in a clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import syncheck

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
    "syncheck diff --only-params ckpts/ddp_rank0.pth ckpts/ddp_rank1.pth",
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
        codes.append((done.returncode, done.stderr.count("\n")))
    # Only the written report is confirmed.
    assert codes == [(1, 0), (1, 1), (0, 0)]
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_lines_for_own_checkpoints_run_in_order(tmp_path: Path) -> None:
    """The four lines, typed in order in a clone, train and end with the exit codes of their comments."""
    for name in ("train", "syncheck", "pyproject.toml"):  # as in a clone
        (tmp_path / name).symlink_to(ROOT / name)
    section = README.split("\n## Your own checkpoints\n")[1].split("\n## ")[0]
    typed = re.findall(r"^    ((?:torchrun|syncheck) .*?)(?: +# .*)?$", section, re.MULTILINE)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    codes = []
    for line in typed:
        # The command line of this clone, even if another version is installed.
        command = ["bash", "-c", line.replace("syncheck ", f"{sys.executable} -m syncheck ", 1)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        codes.append(done.returncode)
    assert codes == [0, 1, 1, 0]


def test_the_readme_is_short() -> None:
    """README has at most 130 lines, a table of seven lines on other tools, and its limits."""
    assert len(README.splitlines()) <= 130
    (tools,) = re.findall(r"^\| question .*?\n\n", README, re.MULTILINE | re.DOTALL)
    assert len(tools.splitlines()) - 1 == 7
    assert "\n## Limits\n\nComparing ranks cannot reveal\n" in README
    for name in ("README.md", "README.zh-CN.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "syncheck watch" in text
        assert "syncheck parity" in text


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md", "docs/reference/findings/syn299.md"])
def test_saved_checkpoints_know_whether_buffers_are_synchronized(page: str) -> None:
    """The code that saves a rank of DDP passes the wrapper to the metadata block, and saves the names of its module."""
    torch = pytest.importorskip("torch")

    class DistributedDataParallel(torch.nn.Module):  # type: ignore[name-defined, misc]
        forward_sync_buffers = False

        def __init__(self, module: object) -> None:
            super().__init__()
            self.module = module

    ddp = DistributedDataParallel(torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    (code,) = [block for block in blocks if "metadata(" in block]
    saved: list[dict[str, Any]] = []
    recorder = SimpleNamespace(save=lambda state, _: saved.append(state))
    names = {"syncheck": syncheck, "torch": recorder, "ddp": ddp, "optimizer": optimizer}
    exec(code, names | {"rank": 0, "size": 2, "step": 5, "path": "rank0.pth"})
    (state,) = saved
    assert state["syncheck"]["buffers_synced"] is False
    assert "running_mean" in state["model"]


def test_python_example_runs() -> None:
    """The Python example prints the code, the ranks and the fix of the finding."""
    (code,) = re.findall(r"```python\n(.*?)```", QUICK_START, flags=re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.startswith("SYN201 (0, 1) ")
