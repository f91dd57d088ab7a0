"""`assert_in_sync` on real gloo ranks where a rank fails or the call is wrong: all ranks raise one text, none waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import all_raise, each_rank, trained
from torch import nn

from syncheck.live import exchange
from syncheck.testing import assert_in_sync


class Broken:
    """An object whose state cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("the state was not\nconsolidated")


@pytest.mark.syncheck(ranks=3)
def test_a_rank_whose_snapshot_fails_tells_the_others(syncheck_rank: Any) -> None:
    """An exception on rank 1 becomes the same error on all ranks, which names the rank; none waits."""
    model, optimizer = trained()
    outcomes = each_rank(assert_in_sync, model, Broken() if syncheck_rank.rank == 1 else optimizer)
    assert all_raise(outcomes, "RankFailed").text == "rank 1: RuntimeError: the state was not\\nconsolidated"


def unreadable(*_: Any) -> bytes:
    """Stand in for bytes that could be hashed, and can no longer be read."""
    raise RuntimeError("device lost")


def without_room(*_: Any) -> Any:
    """Stand in for a comparison that runs out of memory."""
    raise MemoryError("no room")


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("in_judge, says", [(False, "RuntimeError: device lost"), (True, "MemoryError: no room")])
def test_a_rank_that_fails_in_the_middle_tells_the_others(
    syncheck_rank: Any, monkeypatch: pytest.MonkeyPatch, in_judge: bool, says: str
) -> None:
    """A rank that fails while the others wait for its bytes, or while it compares, makes all raise its error."""
    if syncheck_rank.rank == 1 and in_judge:
        monkeypatch.setattr(exchange, "judge", without_room)
    elif syncheck_rank.rank == 1:
        monkeypatch.setattr(exchange.Held, "__getitem__", unreadable)
    # In the second case nothing differs, so that no message is due after the first one.
    value = 0.0 if in_judge else float(syncheck_rank.rank)
    outcomes = each_rank(assert_in_sync, {"a": torch.full((3,), value), "b": torch.full((3,), value)})
    assert all_raise(outcomes, "RankFailed").text == f"rank 1: {says}"


STATE = {"w": torch.ones(1)}
# What rank 0 gives, what the others give, and the options of each of the two.
MISUSES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "a class": ((nn.Linear,), (STATE,), {}, {}),
    "a path": ((STATE, "file.pth"), (STATE, "file.pth"), {}, {}),
    "options": ((STATE,), (STATE,), {"only": "params"}, {"only": ()}),
    "an option": ((STATE,), (STATE,), {"only": "weights"}, {"only": "weights"}),
}


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize(
    "what, says",
    [
        ("a class", "rank 0: an object of class type cannot be compared; needs a module"),
        ("a path", "a path is not what a rank holds in memory"),
        ("options", "the options are not the same on all ranks"),
        ("an option", "only='weights': needs one of"),
    ],
)
def test_wrong_usage_raises_on_all_ranks(syncheck_rank: Any, what: str, says: str) -> None:
    """A wrong call, even on one rank only, is a UsageError on all."""
    first, others, firsts_options, others_options = MISUSES[what]
    if syncheck_rank.rank == 0:
        outcomes = each_rank(assert_in_sync, *first, **firsts_options)
    else:
        outcomes = each_rank(assert_in_sync, *others, **others_options)
    assert all_raise(outcomes, "UsageError").text.startswith(says)
