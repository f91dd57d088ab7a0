"""A small file system, for tests to fill or make read-only."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from support.required import unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system on a new folder and unmount it at the end. Skips the test if mounting fails."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        unavailable("tmpfs", f"cannot be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def make_read_only(disk: Path) -> bool:
    """Make a mounted file system read-only. Returns False if refused, as while a file on it is open for writing."""
    return not subprocess.run(["mount", "-o", "remount,ro", disk], capture_output=True, check=False).returncode
