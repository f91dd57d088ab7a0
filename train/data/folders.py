"""Check the folder of --data-dir before a data set reads it."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from train.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

IMAGES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff"}
# Entries to look at: folders of images may hold millions.
MOST_ENTRIES = 1000
# What to do with a folder of images, the end of a message.
OWN_IMAGES = "for your own images, use --task as in docs/tasks.md, section 'A folder of images'"


def check_folder(folder: Path, contents: str, alternative: str) -> None:
    """Raise UserError if the folder does not exist, or has images and not the contents of the data set.

    contents: the path in the folder that the data set reads. alternative: what else to do.
    """
    if not folder.is_dir():
        advice = f"pass the folder that contains {contents}, or {alternative}"
        raise UserError(f"--data-dir {folder}: not an existing folder; {advice}")
    example = find_image(folder)
    if example is not None and not (folder / contents).exists():
        needed = f"the data set needs a folder that contains {contents}"
        problem = f"has image files ({example.relative_to(folder)}), but {needed}"
        raise UserError(f"--data-dir {folder}: {problem}; {OWN_IMAGES}")


def find_image(folder: Path) -> Path | None:
    """Return an image file in a folder or below; None if no image is among the first entries."""
    for path in islice(folder.rglob("*"), MOST_ENTRIES):
        if path.suffix.lower() in IMAGES:
            return path
    return None
