"""Find and read the files with the settings of a model, and check the numbers in them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

# The files with the settings of a model, of Hugging Face and of Meta.
CONFIGURATIONS = ("config.json", "params.json")
_MOST_JSON = 1 << 20  # bytes
# Limit of heads and sizes in a configuration, more than any model has: JSON integers have no upper limit.
_MOST_SETTING = 1 << 24


def list_folders(paths: Iterable[str]) -> list[str]:
    """Return the folders of files, each once. A path may be a folder itself."""
    folders = [path if os.path.isdir(path) else os.path.dirname(path) for path in paths]
    return list(dict.fromkeys(folders))


def read_json(path: str) -> dict[str, Any] | None:
    """Return a configuration; None if the file is missing, too large or not a JSON object."""
    import json  # most comparisons have no configuration, and start faster without it

    try:
        with open(path, encoding="utf-8") as file:
            content = json.loads(file.read(_MOST_JSON))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def is_size(value: object, least: int = 1) -> bool:
    """Whether a value is a whole number of at least `least`."""
    # The type is compared, because booleans are integers for `isinstance`.
    return type(value) is int and value >= least


def is_setting(value: Any) -> bool:
    """Whether a value of a configuration is a number of heads, or a size, that a model can have."""
    return is_size(value) and value <= _MOST_SETTING
