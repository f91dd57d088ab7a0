"""The byte counter and the baselines of `python -m benchmarks live`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from support.agreement import flip, on_all

from syncheck.live import check

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("benchmarks")


def sent(call: Callable[..., Any], *arguments: Any) -> int:
    """Return the bytes that this rank passed to collectives in a call."""
    from benchmarks.traffic import counted

    with counted() as traffic:
        call(*arguments)
    return traffic.sent


def small(tensors: int) -> torch.nn.Module:
    """A model of small parameters, equal on all ranks."""
    torch.manual_seed(0)
    return torch.nn.ParameterDict({f"p{i:04}": torch.nn.Parameter(torch.randn(8)) for i in range(tensors)})


@pytest.mark.syncheck(ranks=2)
def test_every_collective_is_counted_once(syncheck_rank: Any) -> None:
    """An all_gather counts its input, as a list or one tensor; an object at least its pickle; a barrier nothing."""
    row = torch.zeros(100, dtype=torch.float32)
    both = [torch.zeros(100), torch.zeros(100)]
    assert sent(dist.all_gather, both, row) == 400
    assert sent(dist.all_gather_into_tensor, torch.zeros(200), row) == 400
    assert sent(dist.all_reduce, row) == 400
    assert 1000 < sent(on_all, b"x" * 1000) < 1200
    assert sent(dist.barrier) == 0


@pytest.mark.syncheck(ranks=2)
def test_one_way_messages_count_at_the_sender(syncheck_rank: Any) -> None:
    """A broadcast counts at its source and a message at its sender only."""
    rank = syncheck_rank.rank
    row = torch.zeros(100, dtype=torch.float32)
    assert sent(dist.broadcast, row, 1) == (400 if rank == 1 else 0)
    if rank == 0:
        assert sent(dist.send, row, 1) == 400
    else:
        assert sent(dist.recv, row, 0) == 0


@pytest.mark.syncheck(ranks=2)
def test_traffic_in_sync_is_independent_of_model_size(syncheck_rank: Any) -> None:
    """In sync, the bytes sent do not depend on the number of tensors, and are below 64 per tensor for 10."""
    few, many = small(10), small(400)
    first, second = sent(check, few), sent(check, many)
    assert first == second
    assert 0 < first <= 64 * 10


@pytest.mark.syncheck(ranks=2)
def test_a_difference_costs_sixteen_bytes_per_tensor(syncheck_rank: Any) -> None:
    """If one of 400 tensors differs, 200 more tensors cost each rank 16 bytes each, and their names once."""
    spent = []
    for tensors in (200, 400):
        model = small(tensors)
        if syncheck_rank.rank == 1:
            flip(model["p0003"])
        spent.append(sent(check, model))
    # Rank 0 also sends the report, which counts equal tensors without listing them.
    assert 16 * 200 <= spent[1] - spent[0] <= 48 * 200


@pytest.mark.syncheck(ranks=2)
def test_the_baselines_compare_parameters_only(syncheck_rank: Any) -> None:
    """A flipped parameter bit on rank 1 fails in both baselines; only `check` compares BatchNorm's mean."""
    from benchmarks.live_baselines import megatron, naive

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    assert (megatron(model), naive(model)) == (True, True)
    if syncheck_rank.rank == 1:
        model[1].running_mean += 1
    assert (megatron(model), naive(model)) == (True, True)
    assert check(model).verdict == "out_of_sync"
    if syncheck_rank.rank == 1:
        flip(model[0].weight)
    assert on_all((megatron(model), naive(model))) == [(True, True), (False, False)]


def test_reading_reads_every_word() -> None:
    """The reference sum changes with any word of any tensor of any dtype."""
    from benchmarks.live_baselines import reading

    tensors = [torch.zeros(16), torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64)]
    read = reading(tensors)
    assert list(map(int, read())) == [0, 0, 0]
    tensors[1].view(-1)[-1] = 1
    tensors[2][0] = 5
    assert list(map(int, read())) == [0, 0x3F80 << 48, 5]
