"""If a rank fails anywhere between two messages, all ranks raise its error at once, and the next call works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.agreement import on_all
from torch import nn

from syncheck.live import channel, check, resync
from syncheck.live.channel import Channel
from syncheck.live.exchange import across_ranks
from syncheck.live.repair import resynchronization

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = 3
ERRORS = (RuntimeError, TypeError, ImportError, MemoryError)


@dataclass
class Plan:
    """The rank that fails, and the number of the point at which it fails. points: passed so far."""

    rank: int
    at: int
    points: int = 0


PLAN = Plan(-1, 0)


def point(rank: int) -> None:
    """Pass a point in this rank's own code; fail if the plan selects it."""
    if rank == PLAN.rank:
        PLAN.points += 1
        if PLAN.points == PLAN.at:
            raise ERRORS[PLAN.at % len(ERRORS)](f"injected at {PLAN.at}")


class Failing(Channel):
    """A channel with a point before and after each message, and in all work within a phase."""

    inside = False

    def _own(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap work of the caller that runs within a phase."""

        def worked(*given: Any) -> Any:
            self.inside = False
            try:
                point(self.rank)
                created = work(*given)
                point(self.rank)
                return created
            finally:
                self.inside = True

        return worked

    def _phase(self, talk: Callable[[], Any]) -> Any:
        """Run a phase, whose inner messages have no points."""
        if self.inside:
            return talk()
        point(self.rank)
        self.inside = True
        try:
            created = talk()
        finally:
            self.inside = False
        point(self.rank)
        return created

    def gather(self, message: Any, kind: str) -> Any:
        if kind == "done" or isinstance(message, channel.Failure):
            return super().gather(message, kind)
        return self._phase(lambda: super(Failing, self).gather(message, kind))

    def share(self, make: Any, senders: Any, kind: str) -> Any:
        return self._phase(lambda: super(Failing, self).share(self._own(make), senders, kind))

    def broadcast_rows(self, rows: Any) -> None:
        owned = [(row, source, self._own(arrived)) for row, source, arrived in rows]
        self._phase(lambda: super(Failing, self).broadcast_rows(owned))

    def run_on_leader(self, work: Any, respond: Any) -> Any:
        return self._phase(lambda: super(Failing, self).run_on_leader(self._own(work), self._own(respond)))

    def request(self, rank: int, message: Any) -> Any:
        return self._phase(lambda: super(Failing, self).request(rank, message))


def differing(rank: int) -> tuple[Any, ...]:
    """Return a model and an optimizer that differ on rank 1 in tensors and values, and on rank 2 in structure."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if rank == 1 else 0.2)
    if rank != 1:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def unlike(rank: int) -> tuple[Any, ...]:
    return ({"w": torch.full((1 << 10,), float(rank)), **({"more": torch.ones(2)} if rank == 2 else {})},)


def conversation(call: Callable[..., Any], make: Callable[[int], tuple[Any, ...]], rank: int) -> str:
    """Make a call on this rank and return its error."""
    try:
        call(*make(rank))
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
@pytest.mark.syncheck(ranks=RANKS, timeout=100)
@pytest.mark.parametrize(
    "call, make, few",
    [(check, unlike, 4), (check, unlike, 1), (resync, differing, 1)],
    ids=["check by gathering", "check by broadcasting", "resync"],
)
def test_a_rank_that_fails_at_any_point_makes_all_raise(
    syncheck_rank: Any, monkeypatch: pytest.MonkeyPatch, call: Any, make: Any, few: int
) -> None:
    """If a rank fails at any point of the call, all ranks raise its error, and the next call works."""
    monkeypatch.setattr(channel, "_FEW", few)
    for module in (across_ranks, resynchronization):
        monkeypatch.setattr(module, "Channel", Failing)
    for rank in range(RANKS):
        for position in range(1, 100):
            PLAN.rank, PLAN.at, PLAN.points = rank, position, 0
            raised = on_all(conversation(call, make, syncheck_rank.rank))
            if not on_all(PLAN.points >= position)[rank]:  # the call has no further points
                assert raised == [""] * RANKS
                assert position > 6
                break
            kind = ERRORS[position % len(ERRORS)].__name__
            assert len(set(raised)) == 1, (rank, position, raised)
            assert f"rank {rank}: " in raised[0], (rank, position, raised)
            assert f"{kind}: injected at {position}" in raised[0], (rank, position, raised)
            assert raised[0].startswith("RankFailed: ")
        else:
            pytest.fail("the call does not end")
    PLAN.rank = -1
