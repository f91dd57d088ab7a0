"""Find libraries that the program itself has imported, so that syncheck need not import them."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def find_loaded(name: str) -> Any:
    """Return a module that the program has imported, or None.

    If another thread is importing it, waits for the end: `sys.modules` already holds the module, without its content.
    """
    if sys.modules.get(name) is None:
        return None

    return importlib.import_module(name)
