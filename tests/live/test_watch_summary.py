"""The last line of a watched run: in sync only if the whole run was watched."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from syncheck.live.watching.settings import WatchSettings
from syncheck.live.watching.summary import Summary


@pytest.mark.parametrize(
    ("steps", "is_complete", "verdict"),
    [(5, True, "in sync"), (5, False, "could not tell"), (0, True, "could not tell")],
    ids=["watched", "ended early", "no step"],
)
def test_only_a_watched_run_is_in_sync(steps: int, is_complete: bool, verdict: str) -> None:
    """If watching ended before the run, or saw no step, nobody knows whether the ranks are in sync."""
    lines: list[str] = []
    reporter: Any = SimpleNamespace(print_text=lambda text, _style: lines.append(text))
    Summary(reporter, WatchSettings()).print_end(Counter(steps=steps), is_complete=is_complete)
    assert [line.partition(":")[0] for line in lines] == [verdict]
