"""Settings of the pytest sessions that these tests start."""

from __future__ import annotations

import pytest
from support.sessions import FAST


@pytest.fixture(autouse=True)
def _fast_sessions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start pytester's sessions and their ranks without plugins that only take time."""
    if "pytester" in request.fixturenames:
        request.getfixturevalue("pytester")  # removes this variable
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(FAST))
