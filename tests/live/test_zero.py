"""ZeroRedundancyOptimizer in a live check: its states are partitioned by design, everything else is compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.agreement import Net, all_pass, each_rank, flip
from support.listings import find_all, list_codes, list_fields, list_names
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from syncheck.live import check, resync


def trained() -> tuple[Any, Any]:
    """Train a small network for two steps with partitioned optimizer state."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.syncheck(ranks=2)
def test_partitioned_states_are_no_difference() -> None:
    """Parameters are compared, and states count as partitioned, without consolidation."""
    report = all_pass(each_rank(check, *trained()))
    assert report.verdict == "in_sync"
    assert (report.counts.identical, report.counts.not_compared) == (4, 12)
    assert list_codes(report.groups[0].findings) == ["SYN104"]


@pytest.mark.syncheck(ranks=2)
def test_a_fault_beside_partitioned_states(syncheck_rank: Any) -> None:
    """A flipped parameter bit and another learning rate on rank 1 are found."""
    model, optimizer = trained()
    if syncheck_rank.rank == 1:
        flip(model.module.fc.weight)
    outcomes = each_rank(check, model, optimizer)
    assert list_fields(outcomes, "codes") == [["SYN220", "SYN104"]] * 2
    if syncheck_rank.rank == 1:
        flip(model.module.fc.weight)
        optimizer.param_groups[0]["lr"] = optimizer.optim.param_groups[0]["lr"] = 0.5
    outcomes = each_rank(check, model, optimizer)
    (settings,) = find_all(outcomes[0].findings, code="SYN107")
    assert settings.values == ("optimizer.param_groups.0.lr",)


@pytest.mark.syncheck(ranks=3)
def test_settings_of_both_optimizers_are_set(syncheck_rank: Any) -> None:
    """A learning rate is set in the groups of the inner and the outer optimizer; states do not change."""
    model, optimizer = trained()
    groups = [optimizer.param_groups[0], optimizer.optim.param_groups[0]]
    members = [list(map(id, group["params"])) for group in groups]
    if syncheck_rank.rank == 1:
        groups[0]["lr"] = groups[1]["lr"] = 0.5
    done: Any = all_pass(each_rank(resync, model, optimizer))
    assert list_names(done.values) == ["optimizer.param_groups.0.lr"]
    assert list_fields(groups, "lr") == [0.01, 0.01]
    assert [list(map(id, group["params"])) for group in groups] == members
    optimizer.step()
    assert check(model, optimizer).verdict == "in_sync"


@pytest.mark.syncheck(ranks=3)
def test_a_lost_partition_is_found(syncheck_rank: Any) -> None:
    """If rank 1 loses the states of its partition, no other rank has them: a difference that resync refuses."""
    model, optimizer = trained()
    if syncheck_rank.rank == 1:
        optimizer.optim.state.clear()
    report = all_pass(each_rank(check, model, optimizer))
    assert (report.verdict, report.groups[0].findings[0].code) == ("out_of_sync", "SYN101")
    assert report.groups[0].findings[0].ranks == (1,)
    outcomes = each_rank(resync, model, optimizer)
    assert list_fields(outcomes, "error") == ["UsageError"] * 3
    assert outcomes[0].text.startswith("no other rank has a copy of optimizer.")
