"""A small disk of its own, to be filled or made read-only."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from required import unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system on a new folder, gone afterwards; skips the test where it cannot be."""
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
    """Try to; refused while a file on it is being written."""
    return not subprocess.run(["mount", "-o", "remount,ro", disk], capture_output=True, check=False).returncode
