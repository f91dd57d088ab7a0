"""A monitor in a training: when it checks, and its actions on all ranks if they are out of sync."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from support.agreement import all_pass, all_raise, each_rank, trained
from support.listings import list_fields
from support.monitored import Watched, flip_at
from support.states import copy_values, list_differing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncheck.errors import RankFailed
from syncheck.live import SyncMonitor

if TYPE_CHECKING:
    from syncheck.records import Report
    from syncheck.testing import Rank


@pytest.mark.syncheck(ranks=3)
def test_a_flipped_bit_is_found_at_the_next_check(syncheck_rank: Rank) -> None:
    """A bit flip on rank 1 at step 3 raises the same OutOfSync on all ranks at step 4."""
    watched = Watched(plant=flip_at(3, rank=1))
    outcome = all_raise(each_rank(watched.run, 8))
    assert outcome.text.startswith("step 4 (in sync at step 2): replicas are out of sync: SYN220\n")
    assert list_fields(outcome.findings, "code", "ranks") == [("SYN220", (1,))]
    assert watched.monitor.last == outcome.report
    assert watched.monitor.checks == 2
    assert sorted(watched.returned) == [1, 2, 3]


@pytest.mark.syncheck(ranks=2)
def test_warn_continues_and_checks_when_due(syncheck_rank: Rank) -> None:
    """With "warn" the training completes; every second step returns a report."""
    watched = Watched(plant=flip_at(3, rank=0))
    report = all_pass(each_rank(watched.run, 7, on_desync="warn"))
    verdicts = {step: result and result.verdict for step, result in watched.returned.items()}
    assert verdicts == {1: None, 2: "in_sync", 3: None, 4: "out_of_sync", 5: None, 6: "out_of_sync", 7: None}
    assert report.verdict == "out_of_sync"
    assert watched.monitor.checks == 4  # and one at the end, for step 7
    assert 0 < watched.monitor.overhead < 1


@pytest.mark.syncheck(ranks=2)
def test_a_function_gets_the_report_on_all_ranks(syncheck_rank: Rank) -> None:
    """A function is called with the same report on every rank at every failing check."""
    heard: list[Report] = []
    watched = Watched(plant=flip_at(1, rank=0))
    all_pass(each_rank(watched.run, 4, on_desync=heard.append))
    assert heard == [watched.returned[2], watched.returned[4]]
    assert set(list_fields(heard, "verdict")) == {"out_of_sync"}


class Own(Exception):
    """An exception of the caller."""


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("failing", [(2,), (0, 1, 2)])
def test_no_rank_continues_if_a_function_raises(syncheck_rank: Rank, failing: tuple[int, ...]) -> None:
    """If the function fails on rank 2 only, the other ranks raise RankFailed. On all ranks, each keeps its error."""

    def action(report: Report) -> None:
        if syncheck_rank.rank in failing:
            raise Own("disk full")

    outcomes = each_rank(Watched(plant=flip_at(1, rank=0)).run, 4, on_desync=action)
    assert list_fields(outcomes, "error") == ["Own" if rank in failing else "RankFailed" for rank in range(3)]
    assert outcomes[2].text == "disk full"
    if 0 not in failing:
        assert outcomes[0].text == "on_desync raised Own: 'disk full' on rank 2"


@pytest.mark.syncheck(ranks=2)
def test_a_repair_that_refuses_is_raised(syncheck_rank: Rank) -> None:
    """If the repair refuses, all ranks raise UsageError with the step, the reason and the next step."""
    outcome = all_raise(each_rank(Watched(plant=flip_at(1, rank=1)).run, 4, on_desync="resync"), "UsageError")
    assert outcome.text.startswith("step 2: on_desync='resync' cannot repair: no majority: fc.weight; ")
    assert "; to choose the source, pass on_desync=lambda report: resync(" in outcome.text


@pytest.mark.syncheck(ranks=3)
def test_ranks_at_different_steps_raise(syncheck_rank: Rank) -> None:
    """If ranks check at different steps, all raise RankFailed with steps and ranks before any comparison."""
    model, optimizer = trained()
    monitor = SyncMonitor(model, optimizer, console=False)
    outcome = all_raise(each_rank(monitor.step, 100 * (1 + syncheck_rank.rank // 2)), "RankFailed")
    assert outcome.text.startswith("the monitors are at different steps: 100 on ranks 0, 1, 200 on rank 2; call step()")
    assert monitor.checks == 0


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize(
    ("name", "values"), [("every", (5, 10)), ("on_desync", ("warn", "raise"))], ids=["every", "on_desync"]
)
def test_different_monitors_raise(syncheck_rank: Rank, name: str, values: tuple[Any, Any]) -> None:
    """Monitors with different intervals or actions raise at the first check on all ranks."""
    model, optimizer = trained()
    monitor = SyncMonitor(model, optimizer, console=False, **{name: values[syncheck_rank.rank]})
    outcome = all_raise(each_rank(monitor.check), "UsageError")
    assert outcome.text == f"{name}= differs between ranks: {values[0]} on rank 0, {values[1]} on rank 1"


@pytest.mark.syncheck(ranks=2)
def test_a_rank_that_never_checks_times_out(syncheck_rank: Rank) -> None:
    """If rank 1 never checks, rank 0 raises RankFailed at the timeout of the group."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model, optimizer = trained()
    monitor = SyncMonitor(model, optimizer, group=group, console=False)
    if syncheck_rank.rank == 0:
        with pytest.raises(RankFailed, match="did not make this call within the group's timeout"):
            monitor.check()
    assert monitor.checks == 0


@pytest.mark.syncheck(ranks=2)
def test_an_exception_is_not_hidden_by_a_check(syncheck_rank: Rank) -> None:
    """An exception on rank 0 leaves the context at once, without a check that waits for rank 1."""
    watched = Watched(plant=flip_at(1, rank=0))
    watched.start()
    watched.step(1)

    def fail() -> None:
        with watched.monitor:
            raise Own

    if syncheck_rank.rank == 0:
        with pytest.raises(Own):
            fail()
    assert watched.monitor.checks == 0


@pytest.mark.syncheck(ranks=2)
def test_steps_may_be_counted_by_the_caller(syncheck_rank: Rank) -> None:
    """With step= checks are due at multiples of `every`, once per number; start= continues counting."""
    model, optimizer = trained()
    monitor = SyncMonitor(model, optimizer, every=5, console=False)
    assert [monitor.step(step) is not None for step in (7, 10, 10, 11, 15)] == [False, True, False, False, True]
    resumed = SyncMonitor(model, optimizer, every=5, start=13, console=False)
    assert [resumed.step() is not None for _ in range(4)] == [False, True, False, False]


@pytest.mark.syncheck(ranks=2)
def test_training_is_the_same_bits_with_a_monitor(syncheck_rank: Rank) -> None:
    """A monitor draws no random number and changes nothing: weights and RNG state end as without it."""

    def end(every: int) -> tuple[dict[str, Any], torch.Tensor]:
        watched = Watched(norm=True)
        watched.run(4, every=every, on_desync="warn")
        return copy_values(watched.model.state_dict()), torch.get_rng_state()

    (with_it, state), (without, second) = end(1), end(1000)
    assert not list_differing(without, with_it)
    assert torch.equal(state, second)


@pytest.mark.syncheck(ranks=2)
def test_only_the_ranks_of_its_group_take_part(syncheck_rank: Rank) -> None:
    """A monitor checks the ranks of its group only; in a group of one rank it never raises."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    alone = Watched(plant=flip_at(1, rank=0))
    alone.run(4, group=groups[syncheck_rank.rank])
    assert alone.monitor.last is not None
    assert alone.monitor.last.verdict == "undecided"
    assert alone.monitor.checks == 2


@pytest.mark.slow  # importing torch.compile takes seconds
@pytest.mark.syncheck(ranks=2)
def test_it_may_be_called_in_compiled_code(syncheck_rank: Rank) -> None:
    """Within torch.compile a step of the monitor runs uncompiled, and counts and checks as usual."""
    watched = Watched(plant=flip_at(3, rank=0))
    watched.start(on_desync="warn")

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        watched.returned[len(watched.returned) + 1] = watched.monitor.step()
        return x + 1

    flip_at(3, rank=0)(3, watched.model.module)
    assert [float(step(torch.zeros(1))) for _ in range(4)] == [1.0] * 4
    verdicts = [report and report.verdict for report in watched.returned.values()]
    assert verdicts == [None, "out_of_sync", None, "out_of_sync"]


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("fault", [False, True])
def test_lbfgs_under_ddp_is_in_sync(syncheck_rank: Any, fault: bool) -> None:
    """The loss that LBFGS keeps may differ between ranks; its other state may not."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    torch.manual_seed(syncheck_rank.rank)
    inputs, targets = torch.randn(8, 4), torch.randn(8, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        return loss

    monitor = SyncMonitor(model, optimizer, every=1, on_desync="warn", console=False)
    for step in range(3):
        optimizer.step(closure)
        if fault and step == 2 and syncheck_rank.rank == 1:
            optimizer.state[next(iter(optimizer.state))]["H_diag"] += 1
        report = monitor.step()
        assert report is not None
        assert (report.verdict == "out_of_sync") == (fault and step == 2)
