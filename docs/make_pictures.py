"""Rebuild the pictures of README and of the code: `python docs/make_pictures.py` writes them.

python docs/make_pictures.py --check    # exit code 1 if a picture is out of date
"""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the code and the tools of this clone

import draw_rooms  # noqa: E402

import syncheck  # noqa: E402
from syncheck.report import terminal, text  # noqa: E402

COLUMNS = 100


def draw_comparison() -> str:
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
    """Write the pictures, or compare them with `--check`."""
    pictures = {
        HERE / "compare.svg": draw_comparison(),
        HERE / "reference" / "rooms.svg": draw_rooms.draw(HERE.parent / "syncheck"),
    }
    code = 0
    for target, drawn in pictures.items():
        if "--check" not in sys.argv[1:]:
            target.write_text(drawn, encoding="utf-8")
        elif not target.exists() or target.read_text(encoding="utf-8") != drawn:
            print(f"{target}: out of date; run: python docs/make_pictures.py")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
