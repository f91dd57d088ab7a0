"""Requirements of some tests: programs, libraries, permissions."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def unavailable(requirement: str, reason: str) -> NoReturn:
    """Skip the test with the reason, or fail if SYNCHECK_REQUIRE names the requirement, as in CI."""
    if requirement in os.environ.get("SYNCHECK_REQUIRE", "").split(","):
        pytest.fail(f"SYNCHECK_REQUIRE names {requirement}, which cannot be had here: {reason}")
    pytest.skip(f"{requirement}: {reason}")
