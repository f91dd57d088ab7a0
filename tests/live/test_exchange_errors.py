"""`assert_in_sync` on real gloo ranks with failures or invalid calls: all ranks raise the same text, none waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.agreement import Net, all_pass, all_raise, each_rank, trained
from support.listings import find_all, list_fields
from torch import nn

from syncheck.errors import RankFailed
from syncheck.live import check
from syncheck.live.channel import Channel
from syncheck.live.digest import KERNEL, digest_all
from syncheck.live.exchange import manifest
from syncheck.messages import Grouping
from syncheck.testing import assert_in_sync


class Broken:
    """An object whose state_dict() raises."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("the state was not\nconsolidated")


@pytest.mark.syncheck(ranks=3)
def test_a_failing_snapshot_raises_on_all_ranks(syncheck_rank: Any) -> None:
    """An exception on rank 1 becomes the same error on all ranks, which names the rank."""
    model, optimizer = trained()
    outcomes = each_rank(assert_in_sync, model, Broken() if syncheck_rank.rank == 1 else optimizer)
    assert all_raise(outcomes, "RankFailed").text == "rank 1: RuntimeError: the state was not\\nconsolidated"


STATE = {"w": torch.ones(1)}


# By error: the objects of rank 0, the objects of the other ranks, and the options of both.
MISUSES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "across ranks, only objects in memory can be compared": ((STATE, "a.pth"), (STATE, "a.pth"), {}, {}),
    "the options differ between ranks": ((STATE,), (STATE,), {"only": "params"}, {"only": ()}),
    "rank 0: limit='x': must be": ((STATE,), (STATE,), {"limit": "x"}, {}),
    "rank 0: nothing to compare": ((), (STATE,), {}, {}),
}


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("text", MISUSES)
def test_wrong_usage_raises_on_all_ranks(syncheck_rank: Any, text: str) -> None:
    """An invalid call, even on one rank only, is a UsageError on all."""
    first, remaining, firsts_options, others_options = MISUSES[text]
    items, options = (first, firsts_options) if syncheck_rank.rank == 0 else (remaining, others_options)
    assert all_raise(each_rank(assert_in_sync, *items, **options), "UsageError").text.startswith(text)


@pytest.mark.syncheck(ranks=2)
def test_paths_in_a_group_raise_on_all_ranks(syncheck_rank: Any) -> None:
    """With group= every rank takes part, so paths on rank 1 only make both ranks raise."""
    items: Any = STATE if syncheck_rank.rank == 0 else "file.pth"
    outcome = all_raise(each_rank(assert_in_sync, items, group=dist.group.WORLD), "UsageError")
    assert outcome.text.startswith("rank 1: across ranks, only objects in memory can be compared")


@pytest.mark.syncheck(ranks=2)
def test_a_mismatched_collective(syncheck_rank: Any) -> None:
    """A foreign message ends the comparison with the reason, and is not misread."""
    reports = ""
    if syncheck_rank.rank == 0:
        with pytest.raises(RankFailed) as caught:
            assert_in_sync(STATE)
        reports = str(caught.value)
    else:
        dist.all_gather_object([None] * 2, {"loss": 1.0})
    assert syncheck_rank.gather(reports)[0].startswith("mismatched collective: rank 1 sent")


class Unloadable:
    """A message that one rank cannot unpickle."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return load, (self.error,)


def load(error: type[Exception]) -> Any:
    """Unpickle an `Unloadable`."""
    if dist.get_rank() == 1:
        raise error("no module named x")
    return Unloadable(error)


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("error", [TypeError, ImportError, ValueError, EOFError, RuntimeError])
def test_a_message_that_cannot_be_unpickled(error: type[Exception]) -> None:
    """A message that rank 1 cannot unpickle is its failure, and not a mismatched collective."""
    expected = f"rank 1: {error.__name__}: no module named x"

    def asked(talk: Channel) -> Any:
        return talk.run_on_leader(lambda: talk.request(1, Unloadable(error)), lambda what: what)

    ways = [
        lambda talk: talk.gather(Unloadable(error), "x"),
        lambda talk: talk.share(lambda: Unloadable(error), [0, 1, 2], "x"),
        lambda talk: talk.run_on_leader(lambda: Unloadable(error), lambda what: what),
        asked,
    ]
    for way in ways:
        talk = Channel()
        outcomes = each_rank(lambda talk=talk, way=way: talk.run_together(lambda: way(talk)))
        assert all_raise(outcomes, "RankFailed").text == expected


@pytest.mark.syncheck(ranks=2)
def test_report_names_ranks_without_the_fused_kernel(syncheck_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose kernel ran out of memory is in the report of all ranks, once."""

    def short(sources: Any, algorithm: Any = None) -> Any:
        if syncheck_rank.rank == 1 and algorithm is None:  # not if ranks agree on another algorithm
            KERNEL.fallback = "OutOfMemoryError: CUDA out of memory"
        return digest_all(sources, algorithm)

    monkeypatch.setattr(manifest, "digest_all", short)
    for value in (0.0, float(syncheck_rank.rank)):
        report = each_rank(check, {"w": torch.full((2,), value)})[0].report
        [note] = find_all(report.groups[0].grouping, code=Grouping.SLOW_DIGESTS)
        assert note.parameters == {"ranks": (1,), "reason": "OutOfMemoryError: CUDA out of memory"}
    monkeypatch.undo()
    report = each_rank(check, {"w": torch.ones(2)})[0].report
    assert not find_all(report.groups[0].grouping, code=Grouping.SLOW_DIGESTS)


def two_of_a_kind() -> dict[str, tuple[Any, Any]]:
    """Return pairs that are replicas outside a process group, and may be parts of one replica inside."""
    torch.manual_seed(0)  # the same on all ranks: across ranks nothing differs
    a, b = Net(norm=True), Net(norm=True)
    first = torch.optim.SGD(a.parameters(), lr=0.1)
    two = torch.optim.SGD(b.parameters(), lr=0.2)
    return {
        "modules": (a, b),
        "state dicts": (a.state_dict(), b.state_dict()),
        "a module and a state dict": (a, b.state_dict()),
        "compiled": (torch.compile(a), b),
        "optimizers": (first, two),
        "bundles": ((a, first), (b, two)),
        "checkpoints": ({"model": a, "step": 1}, {"step": 2, "model": b}),
        "state dicts with a key more": (a.state_dict(), {**b.state_dict(), "more": torch.ones(1)}),
        "tensors": (a.fc.weight, b.fc.weight),
        "lists": ([a.fc.weight], [b.fc.weight]),
    }


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("what", two_of_a_kind())
def test_two_of_a_kind_are_ambiguous(what: str) -> None:
    """Two different models, the same on all ranks, do not pass in a group without across_ranks=."""
    first, second = two_of_a_kind()[what]
    outcome = all_raise(each_rank(assert_in_sync, first, second), "UsageError")
    assert "across_ranks=True" in outcome.text
    assert set(list_fields(each_rank(assert_in_sync, first, second, across_ranks=False), "error")) == {"OutOfSync"}
    if what != "optimizers":  # without momentum there are no tensors
        all_pass(each_rank(assert_in_sync, first, second, across_ranks=True))


@pytest.mark.syncheck(ranks=2)
def test_different_parts_are_not_ambiguous() -> None:
    """Networks with different layers, and a model with its average beside an optimizer, are parts of one replica."""
    torch.manual_seed(0)
    nets = Net(), nn.Linear(3, 3)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]
    all_pass(each_rank(assert_in_sync, *nets, *optimizers, *schedulers, {"step": 1}))
    all_pass(each_rank(assert_in_sync, *nets))
    all_pass(each_rank(assert_in_sync, nets[0], optimizers[0], torch.optim.swa_utils.AveragedModel(nets[0])))
