"""Checks for running processes."""

from __future__ import annotations

from pathlib import Path

from support.started import wait_for


def is_running(pid: int) -> bool:
    """Whether a process is running and not a zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def read_pids(file: Path, count: int) -> list[int]:
    """Wait until a file lists this number of process ids, one per line. Return them after checking that they run."""
    wait_for(lambda: file.exists() and file.read_text().count("\n") >= count)
    pids = [int(line) for line in file.read_text().split()]
    assert len(pids) == count
    assert all(map(is_running, pids))
    return pids


def wait_for_end(pids: list[int]) -> None:
    """Wait for processes to end. Fails if they do not."""
    wait_for(lambda: not any(map(is_running, pids)), timeout=10)
