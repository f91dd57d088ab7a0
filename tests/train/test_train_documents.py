"""The documents know every option of the trainer."""

from __future__ import annotations

import re
from pathlib import Path

from train.options import build_parser

ROOT = Path(__file__).resolve().parents[2]


def test_every_option_is_documented() -> None:
    """No option stands in --help only."""
    text = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    options = [name for action in build_parser()._actions for name in action.option_strings if name.startswith("--")]
    assert len(options) > 70
    assert [name for name in options if not re.search(rf"(?<![\w-]){name}(?![\w-])", text)] == []
