"""The comparison at the end of training begins only if all ranks are still there."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncheck.live.watching.full_checks import FullChecks, _sign
from syncheck.live.watching.settings import WatchSettings

RANKS = (0, 1, 2)
MODEL = torch.nn.Linear(2, 3)
# A rank whose model is as the last step left it, without an optimizer.
HOLDING: dict[str, Any] = {
    "last_steps": SimpleNamespace(hold=lambda *_: True),
    "list_optimizers": lambda _ranks: [],
}


class Records:
    """The records by key, without waiting."""

    def __init__(self) -> None:
        self.rows: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)

    def post(self, key: str, record: dict[str, Any]) -> None:
        """Append a record to a key."""
        self.rows[key].append(record)

    def wait(self, key: str, count: int, _seconds: float) -> list[dict[str, Any]]:
        """Return the first records of a key."""
        return self.rows[key][:count]


@pytest.mark.parametrize(("present", "meets"), [(RANKS, True), ((0, 1), False), ((0,), False)])
def test_a_rank_that_has_left_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, present: tuple[int, ...], meets: bool
) -> None:
    """The ranks told the first rank that they had ended, and some left before it came: nothing is compared."""
    board = Records()
    clock: Any = SimpleNamespace(ranks=RANKS, name="clock", find_model=lambda: MODEL)
    watcher = SimpleNamespace(board=board, clocks=[clock], list_layouts=list, **HOLDING)
    checks = FullChecks(watcher, WatchSettings())  # type: ignore[arg-type]
    for rank in RANKS[1:]:
        board.post("end/clock", {"rank": rank, "state": [0, True, 0, _sign([MODEL])]})
    for _rank in present[1:]:
        board.post("end/clock/present", {})
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert checks._agree_on_end(clock) is meets


def test_a_model_that_one_rank_has_rebuilt_is_not_compared_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the training, one rank merges an adapter for its checkpoint; the line names the reason."""
    board = Records()
    clock: Any = SimpleNamespace(ranks=RANKS, name="clock", find_model=lambda: MODEL)
    lines: list[str] = []
    watcher = SimpleNamespace(board=board, clocks=[clock], list_layouts=list, **HOLDING, print_line=lines.append)
    checks = FullChecks(watcher, WatchSettings())  # type: ignore[arg-type]
    for rank in RANKS[1:]:
        board.post("end/clock", {"rank": rank, "state": [0, True, 0, _sign([torch.nn.Sequential(MODEL)])]})
        board.post("end/clock/present", {})
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert not checks._agree_on_end(clock)
    assert "other tensors at the end" in lines[0]
