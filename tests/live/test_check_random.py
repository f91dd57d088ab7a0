"""A differential test: `check` on ranks agrees with `syncheck.compare` on the files that the ranks save."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.listings import list_codes
from support.states import copy_values
from torch import nn

import syncheck
from syncheck.diagnose.syn201_bn_local_stats import Text as LocalStatistics
from syncheck.live import check

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.records import Finding, Report
    from syncheck.testing import Rank

    State = dict[str, Any]

RANKS = 3
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
SEEDS = [range(40), pytest.param(range(40, 200), marks=[pytest.mark.slow, pytest.mark.timeout(600)])]


def values(chosen: random.Random, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return numbers of a dtype and shape, sometimes non-finite or strided."""
    result = torch.tensor([chosen.uniform(-9, 9) for _ in range(torch.Size(shape).numel())], dtype=torch.float64)
    result = result.abs() if dtype == torch.uint8 else result
    if dtype.is_floating_point and result.numel() and chosen.random() < 0.2:
        result[chosen.randrange(result.numel())] = chosen.choice([float("inf"), float("nan"), -0.0, 0.0])
    tensor = result.reshape(shape).to(dtype)
    if len(shape) == 2 and chosen.random() < 0.4:
        tensor = tensor.t().contiguous().t()
    return torch.cat([tensor, tensor])[: shape[0]] if shape and chosen.random() < 0.2 else tensor


def state_of(chosen: random.Random) -> State:
    """Return a checkpoint: a model with BatchNorm statistics, unusual tensors, an optimizer after a step."""
    torch.manual_seed(chosen.randrange(99))
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = chosen.choice([torch.optim.AdamW, torch.optim.Adagrad])(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    outlier: State = {}
    for i in range(chosen.randrange(6)):
        shape = tuple(chosen.choice([0, 1, 2, 3, 7, 40]) for _ in range(chosen.randrange(4)))
        outlier[f"odd.{i}"] = values(chosen, chosen.choice(DTYPES), shape)
    if chosen.random() < 0.1:
        outlier["long"] = torch.arange(200_000.0)
    result = {"model": copy_values(model.state_dict()) | outlier}
    return result | ({"optimizer": optimizer.state_dict()} if chosen.random() < 0.7 else {}) | {"epoch": 3}


def tensors_of(state: State) -> list[tuple[State, str]]:
    """Return the container and key of each tensor of a checkpoint."""
    result = [(state["model"], name) for name in state["model"]]
    for source_value in state.get("optimizer", {}).get("state", {}).values():
        result += [(source_value, name) for name in source_value]
    return result


def bit(chosen: random.Random, into: State, name: str) -> None:
    """Flip one bit."""
    tensor = into[name].contiguous().clone()
    if tensor.numel() and tensor.dtype != torch.bool:
        flat = tensor.reshape(-1).view(torch.uint8)
        flat[chosen.randrange(flat.numel())] ^= 1 << chosen.randrange(8)
    into[name] = tensor


def noise(chosen: random.Random, into: State, name: str) -> None:
    """Change some elements."""
    tensor = into[name].clone()
    if tensor.numel():
        for _ in range(chosen.choice([1, 3, 50])):
            index = tuple(chosen.randrange(size) for size in tensor.shape)
            tensor[index] = chosen.choice([chosen.uniform(0, 5), 1, 0]) if tensor.dtype != torch.bool else True
    into[name] = tensor


def others(chosen: random.Random, into: State, name: str) -> None:
    """Change all elements."""
    into[name] = values(chosen, into[name].dtype, tuple(into[name].shape))


def gone(chosen: random.Random, into: State, name: str) -> None:
    """Remove the tensor."""
    into.pop(name)


def converted(chosen: random.Random, into: State, name: str) -> None:
    """Change the dtype."""
    into[name] = into[name].to(chosen.choice(DTYPES))


def reshaped(chosen: random.Random, into: State, name: str) -> None:
    """Change the shape."""
    into[name] = into[name].reshape(-1)


def restrided(chosen: random.Random, into: State, name: str) -> None:
    """Change the strides, which is not a difference."""
    into[name] = into[name].t().contiguous().t() if into[name].dim() == 2 else into[name].clone()


def negative_zero(chosen: random.Random, into: State, name: str) -> None:
    """Negate zeros, which is not a difference."""
    into[name] = torch.where(into[name] == 0, -into[name], into[name]) if into[name].is_floating_point() else into[name]


FAULTS: tuple[Callable[[random.Random, State, str], None], ...] = (
    *(bit, noise, others, gone, converted, reshaped, restrided, negative_zero),
)


def case(seed: int, rank: int) -> State:
    """Return this rank's objects for a case: equal on all ranks except for faults on some."""
    chosen = random.Random(seed)
    state = state_of(random.Random(chosen.randrange(9999)))
    for _ in range(chosen.choice([0, 1, 1, 2, 3, 8])):
        outlier, fault, number = chosen.randrange(RANKS), chosen.choice(FAULTS), chosen.randrange(9999)
        together = chosen.random() < 0.2  # then on all ranks except one
        drawn = random.Random(number)
        if (rank == outlier) != together:
            fault(drawn, *drawn.choice(tensors_of(state)))
    return state


# Advice for files differs from advice for a running job.
ADVICE = {LocalStatistics.SAVE_EARLY_STEPS, LocalStatistics.USE_WRAPPER}
STEP_UNKNOWN = re.compile(r"(; )?the files do not say that they are of one step")


def told(report: Report) -> Any:
    """Return a report without names of replicas, notes on files, and advice."""
    group = report.groups[0]
    found_codes = [(f.code, f.ranks, f.tensors, f.values, f.fails, _evidence(f)) for f in group.findings]
    return report.verdict, report.counts, group.kinds, group.ranks, group.tensors, group.values, found_codes


def _evidence(finding: Finding) -> list[str]:
    return [STEP_UNKNOWN.sub("", str(fact)) for fact in finding.facts if fact.code not in ADVICE]


@pytest.mark.slow
@pytest.mark.syncheck(ranks=RANKS, timeout=500)
@pytest.mark.parametrize("seeds", SEEDS, ids=["some", "many"])
def test_check_agrees_with_compare(syncheck_rank: Rank, seeds: range) -> None:
    """For random checkpoints with random faults, verdict, counts, numbers and findings are equal."""
    rank, verdicts, result = syncheck_rank.rank, set(), []
    for seed in seeds:
        state = case(seed, rank)
        live = check(state)
        result.append(live)
        folder = syncheck_rank.shared / str(seed)
        folder.mkdir(exist_ok=True)
        torch.save(state, folder / f"run_rank{rank}.pth")
        syncheck_rank.barrier()
        stored_values = syncheck.compare(folder)
        assert told(live) == told(stored_values), seed
        verdicts.add(live.verdict)
        if rank == 0:
            print(seed, live.verdict, list_codes(live.groups[0].findings))
    assert verdicts == {"in_sync", "out_of_sync"}
    assert len({repr(reports) for reports in syncheck_rank.gather(result)}) == 1
