"""Fixes name what a wrapper does: a sharded model, and gradients that are not synchronized."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from support.agreement import all_pass, each_rank, needs_fsdp2
from support.listings import get_failing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import syncheck
from syncheck.diagnose import syn210_init_not_broadcast as syn210
from syncheck.diagnose import syn211_gradients_not_reduced as syn211
from syncheck.diagnose.sentences import Wrapper, is_sharded
from syncheck.live import check

if TYPE_CHECKING:
    from syncheck.records import Finding, Group, Report
    from syncheck.testing import Rank

STEPS = 4


def network() -> nn.Sequential:
    """Return the same small network on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))


def train(model: Any, forward: Any = None, steps: int = STEPS) -> torch.optim.Optimizer:
    """Train on the data of the rank. forward: by default the wrapper."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(steps):
        x = torch.randn(16, 8, generator=batches)
        nn.functional.cross_entropy((forward or model)(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def only(report: Report) -> tuple[Group, Finding]:
    """Return the only group and its only finding that fails."""
    (group,) = report.groups
    finding = get_failing(group)
    return group, finding


def facts_about(finding: Finding) -> set[Wrapper]:
    """Return the statements about the wrapper."""
    return {fact.code for fact in finding.facts if isinstance(fact.code, Wrapper)}


@pytest.mark.syncheck(ranks=2, timeout=60)
@pytest.mark.parametrize("where", ["open", "closed", "bypassed"])
def test_ddp_in_no_sync(syncheck_rank: Rank, where: str) -> None:
    """A check within or after no_sync() names it; after a forward pass that bypasses the wrapper it does not."""
    model = DistributedDataParallel(network())
    with nullcontext() if where == "bypassed" else model.no_sync():
        optimizer = train(model, model.module if where == "bypassed" else None)
        outcomes = each_rank(check, model, optimizer) if where == "open" else []
    _, finding = only(all_pass(outcomes or each_rank(check, model, optimizer)))
    assert finding.code == "SYN211"
    expected: Any = {
        "open": ({Wrapper.NO_SYNC}, syn211.Text.CAUSE_NO_SYNC, syn211.Text.FIX_NO_SYNC),
        "closed": ({Wrapper.LAST_FORWARD}, syn211.Text.CAUSE, syn211.Text.FIX_NO_SYNC),
        "bypassed": (set(), syn211.Text.CAUSE, syn211.Text.FIX),
    }
    assert (facts_about(finding), finding.cause.code, finding.fix.code) == expected[where]


@pytest.mark.syncheck(ranks=2, timeout=60)
def test_no_sync_of_one_rank(syncheck_rank: Rank) -> None:
    """Only rank 1 is within no_sync(): the wrapper of any rank is evidence."""
    model = DistributedDataParallel(network())
    optimizer = train(model, model.module)
    with model.no_sync() if syncheck_rank.rank == 1 else nullcontext():
        _, finding = only(all_pass(each_rank(check, model, optimizer)))
    assert facts_about(finding) == {Wrapper.NO_SYNC}


@pytest.mark.syncheck(ranks=2, timeout=60)
def test_accumulation_that_ends_outside_is_in_sync(syncheck_rank: Rank) -> None:
    """Correct accumulation, and an evaluation of one rank under no_grad, change no verdict."""
    model = DistributedDataParallel(network(), init_sync=True)
    with model.no_sync():
        model(torch.ones(2, 8)).sum().backward()
    optimizer = train(model, steps=2)
    if syncheck_rank.rank == 0:
        with torch.no_grad():
            model.module(torch.ones(2, 8))
    assert all_pass(each_rank(check, model, optimizer)).verdict == "in_sync"


@needs_fsdp2
@pytest.mark.syncheck(ranks=4, timeout=120)
def test_hsdp_without_its_replicate_dimension(syncheck_rank: Rank) -> None:
    """Replicas over the shard dimension alone diverge: the fix is that of fully_shard, in the job and in files."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(model, mesh=mesh["shard"])
    optimizer = train(model)
    group, finding = only(all_pass(each_rank(check, model, optimizer)))
    assert (finding.code, finding.fix.code) == ("SYN211", syn211.Text.FIX_SHARDED)
    assert is_sharded(group)
    path = syncheck_rank.shared / f"rank{syncheck_rank.rank}.pth"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.barrier()
    group, finding = only(syncheck.compare(syncheck_rank.shared))
    assert (finding.code, finding.fix.code) == ("SYN211", syn211.Text.FIX_SHARDED)
    assert is_sharded(group)


@needs_fsdp2
@pytest.mark.syncheck(ranks=4, timeout=120)
@pytest.mark.parametrize("setting", ["set_requires_all_reduce", "set_requires_gradient_sync"])
def test_hsdp_that_never_reduces_does_not_diverge(syncheck_rank: Rank, setting: str) -> None:
    """No gradient reaches the optimizer, so the replicas stay equal: these settings are no cause of SYN211."""
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    getattr(model, setting)(False)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    optimizer = train(model)
    assert all_pass(each_rank(check, model, optimizer)).verdict == "in_sync"
    assert all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))


@needs_fsdp2
@pytest.mark.syncheck(ranks=4, timeout=120)
def test_replicas_of_hsdp_from_other_seeds(syncheck_rank: Rank) -> None:
    """Each replica of HSDP started from its own seed: the line of the fix makes the replicas equal."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(mesh.get_local_rank("replicate"))
    model = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 4))
    fully_shard(model, mesh=mesh)
    optimizer = train(model)
    group, finding = only(all_pass(each_rank(check, model)))
    assert is_sharded(group)
    line = "for p in model.parameters(): dist.broadcast(p.to_local(), group=mesh['replicate'].get_group(), group_src=0)"
    assert line in str(syn210.Text.FIX_SHARDED())
    if finding.code == "SYN210":
        assert finding.fix.code is syn210.Text.FIX_SHARDED
    exec(line, {"model": model, "dist": dist, "mesh": mesh})
    assert all_pass(each_rank(check, model)).verdict == "in_sync"
    del optimizer


@needs_fsdp2
@pytest.mark.syncheck(ranks=4, timeout=120)
def test_tensor_parallelism_inside_ddp_is_not_sharded_by_fsdp(syncheck_rank: Rank) -> None:
    """Shards along tp alone keep the advice for DDP."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = network()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * mesh.get_local_rank("dp")
    (group,) = all_pass(each_rank(check, model, mesh=mesh)).groups
    assert group.shards
    assert not is_sharded(group)
