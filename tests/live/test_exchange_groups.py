"""`assert_in_sync` on real gloo ranks: subgroups, single ranks, and DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from agreement import Net, all_pass, all_raise, each_rank, flip, needs_fsdp2

from syncheck.messages import Detail, Note
from syncheck.testing import assert_in_sync, compare


def in_subgroup(rank: int, members: list[int]) -> list[Any]:
    """Compare the members of a group while rank 2 differs; all ranks make the call."""
    group = dist.new_group(members)
    state = {"w": torch.full((2,), 5.0 if rank == 2 else 1.0)}
    return each_rank(assert_in_sync, state, group=group)


@pytest.mark.syncheck(ranks=3)
def test_only_members_of_a_subgroup_are_compared(syncheck_rank: Any) -> None:
    """Ranks 0 and 1 agree although rank 2 differs; rank 2 raises because it is no member; no rank is missing."""
    outcomes = in_subgroup(syncheck_rank.rank, [0, 1])
    report = all_pass(outcomes[:2])
    assert not [note for note in report.groups[0].notes if note.code is Note.RANKS_ABSENT]
    assert outcomes[2].error == "UsageError"
    assert "rank 2 is not in group=" in outcomes[2].text


@pytest.mark.syncheck(ranks=3)
def test_ranks_of_a_subgroup_are_global_ranks(syncheck_rank: Any) -> None:
    """In the group of ranks 1 and 2 the report has ranks 1 and 2."""
    outcome = all_raise(in_subgroup(syncheck_rank.rank, [2, 1])[1:])
    assert outcome.report.groups[0].ranks == (1, 2)


@pytest.mark.syncheck(ranks=1)
@pytest.mark.parametrize("chosen, says", [(None, "in a process group of one rank"), (True, "a single rank")])
def test_a_group_of_one_rank_never_passes(chosen: bool | None, says: str) -> None:
    """A group of one rank is an error and never passes."""
    outcome = all_raise(each_rank(assert_in_sync, {"w": torch.ones(1)}, across_ranks=chosen), "UsageError")
    assert says in outcome.text


@pytest.mark.syncheck(ranks=2)
def test_across_ranks_false_in_a_group(syncheck_rank: Any) -> None:
    """With across_ranks=False each rank compares alone: rank 0 passes while rank 1 raises."""
    first, second = {"w": torch.ones(1)}, {"w": torch.full((1,), 1.0 + syncheck_rank.rank)}
    outcomes = each_rank(assert_in_sync, first, second, across_ranks=False)
    assert [outcome.error for outcome in outcomes] == ["", "OutOfSync"]


def dtensors(fault: bool) -> dict[str, Any]:
    """Return a DTensor of each placement; with the fault, a bit of rank 1's replicated DTensor is flipped."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.arange(8.0)
    if fault and dist.get_rank() == 1:
        flip(local)
    shard = torch.full((4,), float(dist.get_rank()))
    return {
        "replicated": DTensor.from_local(local, mesh, [Replicate()], run_check=False),
        "sharded": DTensor.from_local(shard, mesh, [Shard(0)], run_check=False),
        "partial": DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False),
    }


@pytest.mark.syncheck(ranks=2)
def test_replicated_dtensors_are_compared_and_shards_counted() -> None:
    """Replicated DTensors are compared; shards and partial sums are counted as not compared."""
    report = all_pass(each_rank(assert_in_sync, dtensors(fault=False)))
    assert (report.counts.identical, report.counts.not_compared) == (1, 2)
    assert {diff.reason for diff in report.groups[0].tensors} == {"sharded"}
    details = {diff.name: diff.detail for diff in report.groups[0].tensors}
    assert {name: detail.code for name, detail in details.items()} == dict.fromkeys(
        ("sharded", "partial"), Detail.SHARDED
    )


@pytest.mark.syncheck(ranks=2)
def test_a_differing_replicated_dtensor_is_found() -> None:
    """A flipped bit in one rank's copy of a replicated DTensor fails."""
    outcome = all_raise(each_rank(assert_in_sync, dtensors(fault=True)))
    assert outcome.findings[0].tensors == ("replicated",)


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("version", [1, pytest.param(2, marks=needs_fsdp2)])
def test_fully_sharded_parameters_are_counted_as_sharded(syncheck_rank: Any, version: int) -> None:
    """Under FSDP1 and FSDP2, parameters and their states count as sharded, and buffers are compared."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.manual_seed(0)
    model: Any = Net(norm=True)
    if version == 1:
        model = FullyShardedDataParallel(model, device_id=syncheck_rank.device, use_orig_params=True)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (syncheck_rank.world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(torch.full((4, 4), 1.0)).sum().backward()
        optimizer.step()
    report = all_pass(each_rank(compare, model, optimizer))
    kinds = report.groups[0].kinds
    assert report.verdict == "in_sync"
    assert (kinds["parameter"].not_compared, kinds["optimizer"].not_compared) == (6, 6)
    assert kinds["bn_mean"].identical == 1
    assert {diff.reason for diff in report.groups[0].tensors} == {"sharded"}
