"""Statements of docs/reference/other-tools.md about torch hold for the installed version."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.states import copy_values

import syncheck
from syncheck.testing import assert_in_sync

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank

pytestmark = pytest.mark.slow


def small() -> Any:
    """Return a network with a BatchNorm layer."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def test_hashes_of_torch_files_depend_on_the_name(tmp_path: Path) -> None:
    """torch.save files of equal tensors have different hashes, because they contain the file name."""
    from safetensors.torch import save_file

    state = small().state_dict()
    for rank in range(2):
        torch.save(state, tmp_path / f"rank{rank}.pth")
        save_file(state, tmp_path / f"rank{rank}.safetensors")
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(tmp_path.iterdir())]
    assert hashes[0] != hashes[2]
    assert hashes[1] == hashes[3]
    assert syncheck.compare(str(tmp_path / "*.pth")).verdict == "in_sync"


def test_default_tolerances_accept_different_weights() -> None:
    """Tiny weights that differ by a factor of nine are close, equal NaN is not, and the order of arguments matters."""
    first, nine = torch.full((4,), 1e-9), torch.full((4,), 9e-9)
    assert torch.allclose(first, nine)
    torch.testing.assert_close(torch.full((4,), 1e-6), torch.full((4,), 9e-6))
    nan = torch.full((4,), float("nan"))
    assert not torch.equal(nan, nan.clone())
    assert torch.equal(torch.zeros(4), -torch.zeros(4))
    np.testing.assert_allclose(nan.numpy(), nan.numpy())
    assert torch.allclose(torch.tensor(1.0), torch.tensor(1.5), rtol=0.34, atol=0)
    assert not torch.allclose(torch.tensor(1.5), torch.tensor(1.0), rtol=0.34, atol=0)
    with pytest.raises(TypeError):
        torch.zeros(1, dtype=torch.bfloat16).numpy()


def test_assert_close_names_the_first_tensor_only() -> None:
    """For a state dict with two different tensors, the message contains only the first name."""
    first, second = small().state_dict(), small().state_dict()
    first = copy_values(first)
    second["0.weight"] += 1
    second["2.weight"] += 1
    with pytest.raises(AssertionError) as raised:
        torch.testing.assert_close(second, first)
    assert [name for name in ("0.weight", "2.weight") if name in str(raised.value)] == ["0.weight"]


@pytest.mark.syncheck(ranks=2, group=False)
def test_ddp_compares_shapes_of_trained_parameters(syncheck_rank: Rank) -> None:
    """For a trained parameter of another shape, rank 1 raises and rank 0 times out. A frozen parameter passes."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    ddp = torch.nn.parallel.DistributedDataParallel
    shape = (2, 8) if syncheck_rank.rank else (4, 4)
    model = torch.nn.Linear(4, 2)
    model.fixed = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
    ddp(model)
    model.fixed.requires_grad = True
    message = "appears not to match sizes of the same param" if syncheck_rank.rank else "(?i)timed? ?out|closed"
    with pytest.raises(RuntimeError, match=message):
        ddp(model)


@pytest.mark.parametrize("level", ["OFF", "INFO"])
@pytest.mark.syncheck(ranks=2, group=False)
def test_ddp_compares_no_values(syncheck_rank: Rank, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a changed weight on one rank, DDP trains without an error, and the ranks end out of sync."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = torch.nn.parallel.DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.module[0].weight[0, 0] += syncheck_rank.rank
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    dist.monitored_barrier()
    with pytest.raises(syncheck.OutOfSync, match=r"0\.weight"):
        assert_in_sync(model, optimizer)


@pytest.mark.syncheck(ranks=2, group=False)
def test_detail_compares_collectives_and_no_values(syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """At level DETAIL, a collective with different shapes raises on both ranks, and different values pass."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    dist.broadcast(torch.full((2,), float(syncheck_rank.rank)), 0)
    with pytest.raises(RuntimeError, match="mismatch"):
        dist.all_reduce(torch.zeros(2 + syncheck_rank.rank))


@pytest.mark.syncheck(ranks=2)
def test_monitored_barrier_names_missing_ranks(syncheck_rank: Rank) -> None:
    """Rank 0 raises with the number of the missing rank."""
    group = dist.new_group(backend="gloo")
    if syncheck_rank.rank == 0:
        with pytest.raises(RuntimeError, match="Rank 1"):
            dist.monitored_barrier(group, timeout=timedelta(seconds=1))
    dist.barrier()
