"""Rebuild the picture in README: `python docs/make_pictures.py` writes docs/compare.svg.

python docs/make_pictures.py --check    # exit code 1 if the picture is out of date
"""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

import syncheck
from syncheck.report import terminal, text

HERE = Path(__file__).resolve().parent
COLUMNS = 100


def picture() -> str:
    """Return the SVG of `syncheck compare fixtures/desync/bn_local_stats/*.pth` on a terminal of 100 columns."""
    os.chdir(HERE.parent)
    report = syncheck.compare("fixtures/desync/bn_local_stats/*.pth")
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
        _environ={},  # the picture does not depend on the terminal
    )
    console.print(Text("$ syncheck compare -n 4 fixtures/desync/bn_local_stats/*.pth", style="bold"))
    for part in text.comparison(report, 4):
        console.print(terminal.make_renderable(part))
    drawn = console.export_svg(title="syncheck", unique_id="syncheck")
    # Use the fonts of the browser: loading a font from a website would make the picture depend on it.
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)


def main() -> int:
    """Write the picture, or compare it with `--check`."""
    target = HERE / "compare.svg"
    drawn = picture()
    if "--check" in sys.argv[1:]:
        if target.read_text(encoding="utf-8") == drawn:
            return 0
        print(f"{target}: out of date; run: python docs/make_pictures.py")
        return 1
    target.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
