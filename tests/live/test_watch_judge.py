"""The judge of a watched run: which steps it judges, and how often it names a fault."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from syncheck.live.watching.judge import Judge

RANKS = (0, 1, 2)


class Store:
    """The records by key. late: the records of a key that appear only after it was read once."""

    def __init__(self, records: dict[str, list[dict[str, Any]]], late: dict[str, list[dict[str, Any]]]) -> None:
        self.records, self.late = records, late

    def read(self, key: str) -> list[dict[str, Any]]:
        """Return the records that are there, and let the late ones appear."""
        rows = self.records.get(key, [])
        self.records[key] = rows + self.late.pop(key, [])
        return rows

    def delete(self, key: str) -> None:
        """Remove a key."""
        del self.records[key]


def make_step(optimizer: int, number: int) -> Any:
    """Return a step of one of two optimizers of a wrapper."""
    clock = SimpleNamespace(name="clock", ranks=RANKS, reduces=True)
    layout = SimpleNamespace(key=f"clock/{optimizer}", clock=clock, is_reduced=True)
    return SimpleNamespace(layout=layout, number=number, key=f"clock/{optimizer}/{number}")


def post(*ranks: int, **fields: str) -> list[dict[str, Any]]:
    """Return the records of ranks that hold the same parameters. fields: further fields."""
    return [{"r": rank, "p": "parameters", **fields} for rank in ranks]


def judge_all(steps: list[Any], store: Store) -> tuple[int, list[tuple[str, int, tuple[int, ...]]]]:
    """Judge while there is something to judge; return the number of judged steps, and code, reduction and ranks."""
    judgements: list[Any] = []
    watcher = SimpleNamespace(steps=steps, witnesses={})
    judge = Judge(watcher, store, judgements.append)  # type: ignore[arg-type]
    while judge._judge_next():
        pass
    findings = []
    for judgement in judgements:
        findings.append((judgement.suspicion.code, judgement.number, judgement.suspicion.ranks))
    return judge.judged["steps"], findings


def test_a_record_that_comes_late_is_judged() -> None:
    """If a rank posts two steps between two looks, the first of them is judged too, and is no skipped step."""
    steps = [make_step(0, 1), make_step(0, 2)]
    store = Store({"clock/0/1": post(0, 1), "clock/0/2": post(*RANKS)}, {"clock/0/1": post(2)})
    assert judge_all(steps, store) == (2, [])
    assert steps == []


def test_records_of_old_steps_are_deleted() -> None:
    """The board keeps the records of the last two steps only, which slow ranks may still read."""
    steps = [make_step(0, number) for number in range(1, 6)]
    store = Store({step.key: post(*RANKS) for step in steps}, {})
    judge_all(steps, store)
    assert list(store.records) == ["clock/0/4", "clock/0/5"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([*post(0, 1), *post(2, x="skipped")], [("SYN214", 2, (2,))]),
        (post(0, 1), [("SYN214", 2, (2,))]),
        ([*post(0, 1), *post(2, x="infinite")], [("SYN216", 2, (2,))]),
        (post(*RANKS, x="skipped"), []),
        (post(*RANKS, x="infinite"), []),
    ],
    ids=["told", "not told", "scaler", "accumulation", "scaler of all"],
)
def test_ranks_that_do_not_step_are_named_once(rows: list[dict[str, Any]], expected: list[Any]) -> None:
    """One rank does not step with one of two optimizers, or no rank does: nothing is said of other steps."""
    steps, records = [], {}
    for number, optimizer in itertools.product(range(1, 5), range(2)):
        step = make_step(optimizer, number)
        steps.append(step)
        records[step.key] = post(*RANKS)
    records["clock/0/2"] = rows
    judged, judgements = judge_all(steps, Store(records, {}))
    assert judgements == expected
    assert judged == (8 if expected else 7)


def test_an_incomplete_last_step_waits() -> None:
    """A step that a rank has not posted yet is neither judged nor removed."""
    steps = [make_step(0, 1)]
    assert judge_all(steps, Store({"clock/0/1": post(0, 1)}, {})) == (0, [])
    assert len(steps) == 1
