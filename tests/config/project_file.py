"""Write [tool.syncheck] into a pyproject.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, text: str) -> Path:
    """Write a pyproject.toml whose table [tool.syncheck] has these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pyproject.toml"
    path.write_text(f"[project]\nname = 'x'\n[tool.syncheck]\n{text}\n")
    return path
