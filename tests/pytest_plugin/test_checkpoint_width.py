"""Width of failure texts: the width of the terminal, which is not visible while pytest captures."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import save
from sessions import session

if TYPE_CHECKING:
    from pathlib import Path


def on_a_terminal(folder: Path, columns: int, *arguments: str) -> str:
    """Run pytest on a terminal with this number of columns, and return its output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    kept = {name: of for name, of in os.environ.items() if not name.startswith(("PYTEST_", "COV_", "COLUMNS"))}
    command = [sys.executable, "-m", "pytest", f"--rootdir={folder}", "--color=no", *arguments]
    with subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=kept) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                read = os.read(ours, 65536)
            except OSError:  # how a terminal tells that the other side is gone
                break
            if not read:
                break
            shown += read
    os.close(ours)
    assert process.returncode == 1, shown.decode()
    return shown.decode().replace("\r", "")


@pytest.mark.parametrize("spread", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_wide_terminal_is_used(tmp_path: Path, spread: tuple[str, ...]) -> None:
    """On a terminal of 200 columns the table has all columns and sentences use the width, captured or not."""
    for rank in range(2):
        state = {f"encoder.layers.{i}.self_attention.weight": np.full(3, rank, np.float32) for i in range(3)}
        save(tmp_path / f"ddp_rank{rank}.pth", state)
    shown = on_a_terminal(tmp_path, 200, "--syncheck", "*.pth", *spread)
    body = shown.partition("FAILURES")[2].partition("short test summary")[0]
    assert "max ulp" in body
    assert max(len(line) for line in body.splitlines() if line.startswith("  what")) > 80


def test_long_names_are_cut(tmp_path: Path) -> None:
    """A very long name keeps its end, and the rows of other tensors fit the terminal."""
    for rank in range(2):
        state = {"deep." * 60 + "weight": np.full(3, rank, np.float32), "fc.weight": np.full(3, rank, np.float32)}
        save(tmp_path / f"ddp_rank{rank}.pth", state)
    ended = session(tmp_path, "--syncheck", "*.pth", columns=120)
    rows = [line for line in ended.lines if line.endswith("weight") or " 3 of 3 " in line]
    assert any(row.startswith("  ...") and "deep.weight " in row for row in rows), ended.out
    assert any(row.startswith("  fc.weight ") for row in rows)
    assert max(map(len, rows)) <= 120
