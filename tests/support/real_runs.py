"""Fixtures for reports: two runs with BatchNorm drift, and two runs in sync."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import syncheck

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
REAL = [
    FIXTURES / name
    for name in ("desync/bn_local_stats", "desync/bn_no_broadcast", "in_sync/ddp_no_bn", "in_sync/sync_bn")
]


@cache
def compare_real_runs() -> syncheck.Report:
    """Return the report on the four runs."""
    return syncheck.compare(*REAL)
