"""The judge of a watched run: which steps it judges, and how often it names a fault."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from syncheck.live.watch.judge import Judge

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
    layout = SimpleNamespace(key=f"clock/{optimizer}", clock=SimpleNamespace(name="clock", ranks=RANKS))
    return SimpleNamespace(layout=layout, number=number, key=f"clock/{optimizer}/{number}")


def post(*ranks: int, count: int = 1) -> list[dict[str, Any]]:
    """Return the records of ranks with equal gradients. count: their optimizer steps."""
    return [{"r": rank, "s": count, "g": "equal"} for rank in ranks]


def judge_all(steps: list[Any], store: Store) -> tuple[int, list[tuple[str, int, tuple[int, ...]]]]:
    """Judge while there is something to judge; return the number of judged steps, and code, reduction and ranks."""
    judgements: list[Any] = []
    judge = Judge(SimpleNamespace(steps=steps), store, judgements.append)  # type: ignore[arg-type]
    while judge._judge_next():
        pass
    found = [(judgement.code, judgement.reduction, judgement.ranks) for judgement in judgements]
    return judge.judged.total(), found


def test_a_record_that_comes_late_is_judged() -> None:
    """If a rank posts two steps between two looks, the first of them is judged too, and is no skipped step."""
    steps = [make_step(0, 1), make_step(0, 2)]
    store = Store({"clock/0/1": post(0, 1), "clock/0/2": post(*RANKS, count=2)}, {"clock/0/1": post(2)})
    assert judge_all(steps, store) == (2, [])
    assert (steps, store.records) == ([], {})


def test_a_skipped_step_of_one_of_two_optimizers_is_named_once() -> None:
    """Rank 2 skips one step of the first optimizer: SYN214 once, and nothing about the steps of the second one."""
    steps, records = [], {}
    for number in range(1, 5):
        for optimizer in range(2):
            steps.append(make_step(optimizer, number))
            records[steps[-1].key] = post(*RANKS, count=number)
    records["clock/0/2"] = post(0, 1, count=2)
    for number in (3, 4):
        records[f"clock/0/{number}"] = [*post(0, 1, count=number), *post(2, count=number - 1)]
    judged, judgements = judge_all(steps, Store(records, {}))
    assert judged == 7
    assert judgements == [("SYN214", 2, (2,))]


def test_an_incomplete_last_step_waits() -> None:
    """A step that a rank has not posted yet is neither judged nor removed."""
    steps = [make_step(0, 1)]
    assert judge_all(steps, Store({"clock/0/1": post(0, 1)}, {})) == (0, [])
    assert len(steps) == 1
