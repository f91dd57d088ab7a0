"""Open pages in a headless browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

from required import unavailable

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")


def opened(page: Path, folder: Path, fragment: str = "") -> tuple[str, list[str]]:
    """Open a page and run its script. Returns the resulting document and the lines of the console.

    The page's policy forbids every request, and the browser logs attempts on the console. folder: for the browser's
    own files.
    """
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        unavailable("chromium", "not installed")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder}"]
    options += ["--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom"]
    command = [program, *options, page.as_uri() + fragment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert "</html>" in done.stdout, done.stderr
    return done.stdout, re.findall(r".*CONSOLE.*", done.stderr)
