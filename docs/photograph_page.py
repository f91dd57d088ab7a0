"""Photograph a report page for README: `python docs/photograph_page.py` writes docs/report.png.

It needs Chromium, and Pillow, which the extra `train` installs.

Fonts differ between machines, so the tests do not compare the picture: take it again after a change of the page.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the code of this clone

import syncheck  # noqa: E402
from syncheck.report import html  # noqa: E402
from syncheck.text import options_as_typed  # noqa: E402
from syncheck.versions import version  # noqa: E402

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1280, 1400
# The page has few colors, and a picture with a palette is much smaller.
COLORS = 64
# Milliseconds in which the page draws its charts; they pass at once.
DRAWING = 5000


def write_page(folder: Path) -> Path:
    """Write the page of two ranks of plain DDP, and return its path."""
    os.chdir(HERE.parent)
    report = syncheck.compare("fixtures/desync/bn_local_stats/*.pth", histograms=True)
    page = folder / "report.html"
    with options_as_typed():
        page.write_text(html.render(report, version()), encoding="utf-8")
    return page


def photograph(page: Path, target: Path) -> None:
    """Write the first screens of a page as a PNG file. Raises SystemExit without Chromium."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        raise SystemExit("chromium: not installed; run: apt-get install chromium")
    command = [
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={WIDTH},{HEIGHT}",
        f"--virtual-time-budget={DRAWING}",
        f"--screenshot={target}",
        page.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True)
    with Image.open(target) as picture:
        small = picture.convert("RGB").quantize(COLORS)
    small.save(target, optimize=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        photograph(write_page(Path(temporary)), HERE / "report.png")
