"""What docs/reference/other-tools.md says of torch's own checks and of scripts is so, with the torch installed here."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import syncheck
from syncheck.testing import assert_in_sync

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank

pytestmark = pytest.mark.slow


def small() -> Any:
    """A network with one BatchNorm."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def test_hashes_of_torch_files_tell_nothing(tmp_path: Path) -> None:
    """Equal tensors saved under two names are two hashes, for the name stands in the file; as safetensors it is one."""
    from safetensors.torch import save_file

    state = small().state_dict()
    for rank in range(2):
        torch.save(state, tmp_path / f"rank{rank}.pth")
        save_file(state, tmp_path / f"rank{rank}.safetensors")
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(tmp_path.iterdir())]
    assert hashes[0] != hashes[2]
    assert hashes[1] == hashes[3]
    assert syncheck.compare(str(tmp_path / "*.pth")).verdict == "in_sync"


def test_tolerances_of_the_field_pass_what_differs() -> None:
    """Tiny weights that are nine times as large pass at the defaults, NaN of equal bits fails, sides count."""
    one, nine = torch.full((4,), 1e-9), torch.full((4,), 9e-9)
    assert torch.allclose(one, nine)
    torch.testing.assert_close(torch.full((4,), 1e-6), torch.full((4,), 9e-6))
    nan = torch.full((4,), float("nan"))
    assert not torch.equal(nan, nan.clone())
    assert torch.equal(torch.zeros(4), -torch.zeros(4))
    np.testing.assert_allclose(nan.numpy(), nan.numpy())
    assert torch.allclose(torch.tensor(1.0), torch.tensor(1.5), rtol=0.34, atol=0)
    assert not torch.allclose(torch.tensor(1.5), torch.tensor(1.0), rtol=0.34, atol=0)
    with pytest.raises(TypeError):
        torch.zeros(1, dtype=torch.bfloat16).numpy()


def test_assert_close_names_the_first_only() -> None:
    """Of a state dict with two tensors that differ the message has one; what differs by name comes before values."""
    first, second = small().state_dict(), small().state_dict()
    first = {name: value.clone() for name, value in first.items()}
    second["0.weight"] += 1
    second["2.weight"] += 1
    with pytest.raises(AssertionError) as raised:
        torch.testing.assert_close(second, first)
    assert [name for name in ("0.weight", "2.weight") if name in str(raised.value)] == ["0.weight"]


@pytest.mark.syncheck(ranks=2, group=False)
def test_ddp_compares_shapes_of_trained_parameters_once(syncheck_rank: Rank) -> None:
    """Of a trained parameter of another shape rank 1 is told and rank 0 waits; of a frozen one nobody is told."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    ddp = torch.nn.parallel.DistributedDataParallel
    shape = (2, 8) if syncheck_rank.rank else (4, 4)
    model = torch.nn.Linear(4, 2)
    model.fixed = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
    ddp(model)
    model.fixed.requires_grad = True
    told = "appears not to match sizes of the same param" if syncheck_rank.rank else "(?i)timed? ?out|closed"
    with pytest.raises(RuntimeError, match=told):
        ddp(model)


@pytest.mark.parametrize("level", ["OFF", "INFO"])
@pytest.mark.syncheck(ranks=2, group=False)
def test_ddp_looks_at_no_value(syncheck_rank: Rank, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a weight changed on one rank it trains on without a word, and the ranks are out of sync at the end."""
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
def test_detail_compares_calls_and_no_values(syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """At DETAIL both ranks are told of a collective of other shapes, and nobody of one of other values."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    dist.broadcast(torch.full((2,), float(syncheck_rank.rank)), 0)
    with pytest.raises(RuntimeError, match="mismatch"):
        dist.all_reduce(torch.zeros(2 + syncheck_rank.rank))


@pytest.mark.syncheck(ranks=2)
def test_monitored_barrier_names_who_does_not_come(syncheck_rank: Rank) -> None:
    """The rank that does not come is named on rank 0, which is what this barrier is for."""
    group = dist.new_group(backend="gloo")
    if syncheck_rank.rank == 0:
        with pytest.raises(RuntimeError, match="Rank 1"):
            dist.monitored_barrier(group, timeout=timedelta(seconds=1))
    dist.barrier()
