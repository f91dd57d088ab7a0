"""Rebuild the pictures of a comparison and of the code: `python docs/make_pictures.py` writes them.

python docs/make_pictures.py --check    # exit code 1 if a picture is out of date, or the recording of the demo

Training differs from run to run, so the recording (docs/record_demo.py) is compared by its constant texts.
"""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the code and the tools of this clone

import draw_rooms  # noqa: E402

import syncheck  # noqa: E402
from syncheck.live.witnesses.rules import make_finding  # noqa: E402
from syncheck.report import terminal, text  # noqa: E402
from syncheck.report.finding_text import cause_text  # noqa: E402
from syncheck.report.parts import Grid, Labels  # noqa: E402
from syncheck.report.unbroken import unmark  # noqa: E402
from syncheck.text import options_as_typed  # noqa: E402

COLUMNS = 100
COMPARED = "fixtures/desync/bn_local_stats/*.pth"
# The witness's finding in the demo, and the kind of its cause.
WATCHED, SCALED = "SYN410", "_SCALED"


def draw_comparison() -> str:
    """Return the SVG of `syncheck compare fixtures/desync/bn_local_stats/*.pth` on a terminal of 100 columns."""
    os.chdir(HERE.parent)
    report = syncheck.compare(COMPARED)
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
    with options_as_typed():
        parts = text.draw_comparison(report, 4)
    for part in parts:
        console.print(terminal.make_renderable(part))
    drawn = console.export_svg(title="syncheck", unique_id="syncheck")
    # Use the fonts of the browser: loading a font from a website would make the picture depend on it.
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)


def list_constant_texts() -> list[str]:
    """Return what the demo prints in every run: cause, fix and titles of columns, for BatchNorm and for the clip."""
    os.chdir(HERE.parent)
    texts = []
    with options_as_typed():
        for part in text.draw_comparison(syncheck.compare(COMPARED), 4):
            if isinstance(part, Labels):
                texts += [unmark(str(content)) for label, content in part.rows if label in ("why", "fix", "more")]
            elif isinstance(part, Grid):
                texts.append("".join(part.columns))
        clipped = make_finding(WATCHED, (1,), (), variant=SCALED)
        texts += [cause_text(clipped), str(clipped.fix)]
    return texts


def find_stale_texts(recording: str, texts: list[str]) -> list[str]:
    """Return the texts that a recording lacks. The lines of a terminal end anywhere, so spaces do not count."""
    shown = "".join(ET.fromstring(recording).itertext())
    return [constant for constant in texts if _remove_spaces(constant) not in _remove_spaces(shown)]


def _remove_spaces(line: str) -> str:
    return re.sub(r"\s", "", line)


def check_recording() -> int:
    """Return 1 if the recording of the demo lacks a text of today's demo, and print it; otherwise 0."""
    target = HERE / "demo.svg"
    stale = find_stale_texts(target.read_text(encoding="utf-8"), list_constant_texts())
    for constant in stale:
        print(f"{target}: lacks {constant!r}; run: python docs/record_demo.py")
    return 1 if stale else 0


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
    if "--check" in sys.argv[1:]:
        return max(code, check_recording())
    return code


if __name__ == "__main__":
    sys.exit(main())
