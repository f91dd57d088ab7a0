"""Checks for running processes."""

from __future__ import annotations

import time
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process is running and not a zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def noted(file: Path, count: int, seconds: float = 30) -> list[int]:
    """Wait until a file lists this number of process ids, one per line. Return them after checking that they run."""
    deadline = time.monotonic() + seconds
    while (not file.exists() or file.read_text().count("\n") < count) and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(line) for line in file.read_text().split()]
    assert len(pids) == count
    assert all(map(alive, pids))
    return pids


def gone(pids: list[int], seconds: float = 10) -> bool:
    """Wait for processes to end. Return whether they did."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(alive, pids)):
        time.sleep(0.05)
    return not any(map(alive, pids))
