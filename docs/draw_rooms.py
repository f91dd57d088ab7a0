"""Draw the rooms of a package as SVG: a row of boxes for each layer, the highest layer at the top."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.house import measure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# Sizes in pixels. The narrowest column of text on GitHub is wider than the picture.
WIDTH, MARGIN, GAP, HEIGHT = 760, 12, 10, 34
CHARACTER = 8.5
# The picture has its own background, so its colors are readable on light and on dark pages.
STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de; }
  .package { fill: #dbeafe; stroke: #1d4ed8; }
  .module { fill: #f6f8fa; stroke: #8c959f; }
  text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328; text-anchor: middle; }
"""


def draw(package: Path) -> str:
    """Return the SVG of the rooms of a package, given by its folder. A package has its number of modules in the box."""
    house = measure(package)
    kinds = dict.fromkeys(house.modules, "module") | dict.fromkeys(house.packages, "package")
    labels = {room: room for room in house.modules}
    for room in house.packages:
        files = list((package / room).rglob("*.py"))
        markers = list((package / room).rglob("__init__.py"))
        labels[room] = f"{room}/ {len(files) - len(markers)}"
    rows: list[str] = []
    bottom = GAP
    # The lowest layer is drawn last, at the bottom.
    for layer in reversed(house.layers):
        rows += _draw_row(layer, labels, kinds, bottom)
        bottom += HEIGHT + GAP
    title = f"The rooms of {package.name}: each imports only rooms in lower rows"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom}" role="img" aria-label="{title}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{bottom - 1}" rx="6"/>',
    ]
    return "\n".join([*head, *rows, "</svg>", ""])


def _draw_row(rooms: Sequence[str], labels: dict[str, str], kinds: dict[str, str], top: float) -> list[str]:
    """Return the boxes of one layer, centered below `top`."""
    widths = [len(labels[room]) * CHARACTER + 2 * MARGIN for room in rooms]
    start = (WIDTH - sum(widths) - GAP * (len(rooms) - 1)) / 2
    boxes = []
    for room, width in zip(rooms, widths, strict=True):
        boxes.append(
            f'<rect class="{kinds[room]}" x="{start:g}" y="{top}" width="{width:g}" height="{HEIGHT}" rx="4"/>'
            f'<text x="{start + width / 2:g}" y="{top + 22}">{labels[room]}</text>'
        )
        start += width + GAP
    return boxes
