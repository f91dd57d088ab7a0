"""Import optional libraries, or skip."""

from __future__ import annotations

from typing import Any

import pytest


def import_or_skip(name: str) -> Any:
    """Import a library; skip the test or the module if it is missing, or if it fails during its own import.

    A torchvision that was built for another torch raises ImportError or RuntimeError. One such library must not stop
    the run of all tests.
    """
    try:
        return pytest.importorskip(name, exc_type=ImportError)
    except RuntimeError as error:
        return pytest.skip(f"could not import {name!r}: {error}", allow_module_level=True)
