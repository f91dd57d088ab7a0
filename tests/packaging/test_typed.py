"""The package has types for its users: py.typed, and public names that `mypy --strict` knows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
def test_a_program_of_a_user(tmp_path: Path) -> None:
    """Right uses pass, and each wrong one is an error, as the `type: ignore` on it that has to be needed proves."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--cache-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, str(HERE / "typed_user.py")], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
