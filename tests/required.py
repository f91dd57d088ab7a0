"""What some tests need of the machine: programs, libraries, rights."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def unavailable(what: str, reason: str) -> NoReturn:
    """Skip with the reason, or fail where SYNCHECK_REQUIRE names what is missing, as CI does."""
    if what in os.environ.get("SYNCHECK_REQUIRE", "").split(","):
        pytest.fail(f"SYNCHECK_REQUIRE names {what}, which cannot be had here: {reason}")
    pytest.skip(f"{what}: {reason}")
