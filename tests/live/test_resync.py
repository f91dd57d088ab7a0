"""`resync` on real gloo ranks repairs each kind of injected fault bit by bit, on the bad rank only."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.agreement import Net, all_pass, each_rank, flip, on_all, trained
from support.healing import bits, healed
from support.listings import list_fields, list_names
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncheck.live import resync

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.syncheck(ranks=3)
def test_a_flipped_bit_is_repaired(syncheck_rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One flipped bit on rank 1 of 3: only this tensor is copied from rank 0, which logs the repair."""
    model, optimizer = trained()
    if syncheck_rank.rank == 1:
        flip(model.module.fc.weight)
    with caplog.at_level(logging.WARNING, "syncheck"):
        done = healed(model, optimizer, bad=(1,), source=0)
    assert done.copied == (("fc.weight", 0, (1,), 64),)
    assert (done.values, done.created, done.removed) == ((), (), ())
    assert dict(done.sources) == {(0, 1, 2): 0}
    assert done.summary.splitlines() == [
        "resync from rank 0 (majority of 2 of 3): 1 tensor, 64 bytes, on rank 1; proved in sync",
        "  copied: fc.weight",
    ]
    assert caplog.messages == ([done.summary] if syncheck_rank.rank == 0 else [])


@pytest.mark.syncheck(ranks=3)
def test_a_failing_log_does_not_raise(syncheck_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the log of the first rank fails, this rank does not raise alone."""

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(logging.getLogger("syncheck"), "warning", full)
    model, optimizer = trained()
    if syncheck_rank.rank == 1:
        flip(model.module.fc.weight)
    healed(model, optimizer, bad=(1,), source=0)


@pytest.mark.syncheck(ranks=3)
def test_independent_faults_have_a_healthy_source(syncheck_rank: Any) -> None:
    """If ranks 0 and 1 differ in one tensor each, rank 2 is the source of both."""
    model, optimizer = trained()
    if syncheck_rank.rank < 2:
        flip(model.module.fc.bias if syncheck_rank.rank else model.module.fc.weight)
    done = healed(model, optimizer, bad=(0, 1), source=2)
    assert list_fields(done.copied, "name", "source", "ranks") == [
        ("fc.weight", 2, (0,)),
        ("fc.bias", 2, (1,)),
    ]
    assert done.summary.splitlines()[1] == "  copied: fc.weight (rank 0), fc.bias (rank 1)"


@pytest.mark.syncheck(ranks=2)
def test_ranks_in_sync_do_not_change() -> None:
    """Ranks in sync do not change, and the summary has nothing to do."""
    model, optimizer = trained()
    before = bits(model, optimizer)
    done: Any = all_pass(each_rank(resync, model, optimizer))
    assert done.summary == "resync: nothing to do, the ranks are in sync"
    assert (done.copied, done.before) == ((), done.after)
    assert bits(model, optimizer) == before


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("make, states", [(adamw, 12), (momentum, 4)])
def test_lost_optimizer_state_is_created(
    syncheck_rank: Any, make: Callable[[nn.Module], torch.optim.Optimizer], states: int
) -> None:
    """Rank 2 lost its optimizer state: after resync it trains bit by bit like the other ranks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    twin = DistributedDataParallel(Net())
    twin.load_state_dict(model.state_dict())
    optimizer, complete = make(model), make(twin)
    train(model, optimizer, 3, seed=syncheck_rank.rank)
    train(twin, complete, 3, seed=syncheck_rank.rank)
    parameters = [id(p) for p in model.parameters()]
    if syncheck_rank.rank == 2:
        optimizer.state.clear()
    done = healed(model, optimizer, bad=(2,), source=0)
    assert set(list_fields(done.created, "ranks")) == {(2,)}
    assert (len(done.created), len(done.copied), done.removed) == (states, states, ())
    train(model, optimizer, 3, seed=10 + syncheck_rank.rank)
    train(twin, complete, 3, seed=10 + syncheck_rank.rank)
    assert bits(model, optimizer) == bits(twin, complete)
    assert [id(p) for p in model.parameters()] == parameters


@pytest.mark.syncheck(ranks=3)
def test_surplus_state_is_removed(syncheck_rank: Any) -> None:
    """Moments of a parameter on rank 1 only are removed, with their entry."""
    model, optimizer = trained()
    if syncheck_rank.rank != 1:
        del optimizer.state[model.module.head.weight]
    done = healed(model, optimizer, bad=(1,), source=0)
    assert [source_value.name.rpartition(".")[2] for source_value in done.removed] == ["step", "exp_avg", "exp_avg_sq"]
    assert done.copied == ()
    assert model.module.head.weight not in optimizer.state


@pytest.mark.syncheck(ranks=3)
def test_a_momentum_of_none_becomes_a_tensor(syncheck_rank: Any) -> None:
    """Rank 0 has momentum_buffer=None, like the state dict of a fresh SGD; it gets the buffer of its peers."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = momentum(model)
    train(model, optimizer, 1, seed=0)
    if syncheck_rank.rank == 0:
        optimizer.state[model.module.fc.bias]["momentum_buffer"] = None
    done = healed(model, optimizer, bad=(0,), source=1)
    assert done.created == (("optimizer.fc.bias.momentum_buffer", (0,)),)


@pytest.mark.syncheck(ranks=3)
def test_a_learning_rate_is_set(syncheck_rank: Any) -> None:
    """Other lr and betas on rank 1 are set in place in its parameter group, which schedulers refer to."""
    model, optimizer = trained()
    [group] = optimizer.param_groups
    if syncheck_rank.rank == 1:
        group |= {"lr": 0.5, "betas": (0.5, 0.6), "warm": True}
    done = healed(model, optimizer, bad=(1,), source=0)
    assert (group["lr"], group["betas"], "warm" in group) == (1e-2, (0.9, 0.999), False)
    assert optimizer.param_groups[0] is group
    assert set(list_fields(done.values, "name", "ranks")) == {
        (f"optimizer.param_groups.0.{name}", (1,)) for name in ("lr", "betas", "warm")
    }
    assert "0 tensors, 0 bytes, 3 values, on rank 1" in done.summary


@pytest.mark.syncheck(ranks=3)
def test_a_scaler_and_a_scheduler_are_set(syncheck_rank: Any) -> None:
    """Rank 2's scaler backed off and its scheduler is ahead: both load the state of the other ranks."""
    model, optimizer = trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    if syncheck_rank.rank == 2:
        scaler.load_state_dict(scaler.state_dict() | {"scale": 512.0, "_growth_tracker": 7})
        scheduler.last_epoch = 5
    done: Any = all_pass(each_rank(resync, (model, scheduler), optimizer, scaler))
    assert on_all(bits(optimizer, scaler, scheduler)) == [bits(optimizer, scaler, scheduler)] * 3
    assert (scaler.get_scale(), scheduler.last_epoch) == (1024.0, 0)
    assert set(list_names(done.values)) == {
        "scaler.scale",
        "scaler._growth_tracker",
        "lr_scheduler.last_epoch",
    }


class Cached(Net):
    """A network with a non-persistent buffer and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.extra = {"scale": 1.5, "seen": torch.arange(3)}

    def get_extra_state(self) -> Any:
        return copy.deepcopy(self.extra)

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.syncheck(ranks=3)
def test_buffers_and_extra_states_are_repaired(syncheck_rank: Any) -> None:
    """A non-persistent buffer is copied; an extra state, which is a copy, is set as a whole."""
    model = Cached()
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p)
    if syncheck_rank.rank == 1:
        flip(model.table)
        model.extra = {"scale": 2.5, "seen": torch.arange(1, 4)}
    done = healed(model, bad=(1,), source=0)
    assert list_names(done.copied) == ["table"]
    assert model.extra["scale"] == 1.5
    assert torch.equal(model.extra["seen"], torch.arange(3))
    assert set(list_fields(done.values, "name", "ranks")) == {
        ("_extra_state.scale", (1,)),
        ("_extra_state.seen", (1,)),
    }
