"""The order of the tests on two workers: tests on ranks run on one of them.

The processes of ranks are reused by the next test of a worker, and start in several seconds of processor time each.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[2]


class RanksTogether(LoadScopeScheduling):
    """Give all modules with tests on ranks to one worker, and each other test to the worker that is free."""

    def _split_scope(self, nodeid: str) -> str:
        return "ranks" if has_ranks(nodeid.partition("::")[0]) else nodeid


@cache
def has_ranks(module: str) -> bool:
    """Whether a test of this module runs on ranks. module: its path from the root."""
    return "mark.syncheck(" in (ROOT / module).read_text(encoding="utf-8")
