"""README says what the program does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from syncheck.diagnose import RULES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_help_block_is_the_programs() -> None:
    """The help that README prints is what `syncheck --help` prints on 80 columns, apart from the columns' widths."""
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "syncheck", "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    (block,) = re.findall(r"## Commands\n\n```\n(.*?)\n```", README, flags=re.DOTALL)
    assert block.split() == printed.split()  # Python 3.13 counts them without the colours' bytes


def test_finding_block_is_the_programs() -> None:
    """The finding that README prints is what the command above it prints, folded."""
    (command, block) = re.findall(r"^    syncheck (report [^ ]+)\n\n```\n(.*?)\n```", README, re.DOTALL | re.MULTILINE)[
        0
    ]
    line = [sys.executable, "-m", "syncheck", *command.split()]
    printed = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT).stdout
    assert block.startswith("  SYN217")
    assert " ".join(block.split()) in " ".join(printed.split())


def test_every_finding_is_listed() -> None:
    """README's table names every finding with its slug, and none that does not exist."""
    listed = dict(re.findall(r"^\| (SYN\d{3}) \| ([a-z-]+) \|", README, flags=re.MULTILINE))
    assert listed == {rule.CODE: rule.SLUG for rule in RULES}


def test_python_example_runs() -> None:
    """README's Python lines work on checkpoints of the clone."""
    (code,) = re.findall(r"```python\n(import syncheck\n.*?)```", README, flags=re.DOTALL)
    code = code.replace("ckpts/*.pth", "fixtures/desync/bn_local_stats/*.pth")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "out_of_sync ['SYN201']\n"
