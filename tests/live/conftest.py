"""Assertion rewriting for helper modules, and the benchmarks."""

import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[2])

pytest.register_assert_rewrite("support.agreement", "support.healing")


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the benchmarks importable, which are not installed."""
    if ROOT not in sys.path:
        monkeypatch.syspath_prepend(ROOT)
