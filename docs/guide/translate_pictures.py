"""Write the guide's pictures with Chinese texts: `python docs/guide/translate_pictures.py`, which make_plots.py calls.

The texts of a picture are text elements of the SVG, and docs/zh-CN/labels.toml has their translations, so nothing is
drawn again. Needs no matplotlib.
"""

from __future__ import annotations

import re
import tomllib
from html import escape, unescape
from pathlib import Path

PICTURES = Path(__file__).resolve().parent / "pictures"
CHINESE = PICTURES.parents[1] / "zh-CN"
_TEXT = re.compile(r"(<text\b[^>]*>)(.*?)(</text>)", re.DOTALL)
_WORD = re.compile(r"[a-z]{2}")


def read_labels() -> dict[str, dict[str, str]]:
    """Return the translations of each picture, by its name."""
    tables = tomllib.loads((CHINESE / "labels.toml").read_text(encoding="utf-8"))
    same = tables.pop("same")
    common = dict(zip(same, same, strict=True)) | tables.pop("all")
    return {name: common | labels for name, labels in tables.items()}


def translate(picture: str, labels: dict[str, str]) -> str:
    """Return an SVG with translated texts. Raises KeyError for a text with words that has no translation."""

    def replace(match: re.Match[str]) -> str:
        text = unescape(match[2]).strip()
        # Numbers and single letters are the same in both languages.
        translated = labels[text] if _WORD.search(text) else text
        return f"{match[1]}{escape(translated, quote=False)}{match[3]}"

    # matplotlib repeats each text in a comment.
    return _TEXT.sub(replace, re.sub(r"\s*<!--.*?-->", "", picture, flags=re.DOTALL))


def translate_all() -> dict[Path, str]:
    """Return the content of each Chinese picture by its path."""
    contents = {}
    for name, labels in read_labels().items():
        picture = (PICTURES / f"{name}.svg").read_text(encoding="utf-8")
        contents[CHINESE / "pictures" / f"{name}.svg"] = translate(picture, labels)
    return contents


def write_all() -> None:
    """Write all Chinese pictures."""
    for path, content in translate_all().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    write_all()
