"""Outcomes of a call on all ranks of a test, gathered on every rank, and a small network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from support.listings import list_codes, list_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.records import Finding, Report


needs_fsdp2 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), reason="FSDP2 of this torch does not run on CPU"
)


def on_all(mine: Any) -> list[Any]:
    """Return the values of all ranks, on all ranks."""
    result: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(result, mine)
    return result


@dataclass
class Outcome:
    """The outcome of a call on one rank: a report, or an error and possibly its report."""

    error: str = ""
    text: str = ""
    report: Report | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        assert self.report is not None
        return self.report.groups[0].findings

    @property
    def codes(self) -> list[str]:
        return list_codes(self.findings)


def each_rank(call: Callable[..., Report], *things: Any, **options: Any) -> list[Outcome]:
    """Make a call on all ranks; return all outcomes on all ranks."""
    # Uses a separate group: a rank that returns early must not interfere with collectives of its peers.
    group = dist.new_group()
    try:
        mine = Outcome(report=call(*things, **options))
    except Exception as error:  # noqa: BLE001
        mine = Outcome(type(error).__name__, str(error), getattr(error, "report", None))
    print(mine.error or "returned", mine.text)  # shown if a rank waits in vain
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, mine, group=group)
    return outcomes


def all_raise(outcomes: list[Outcome], error: str = "OutOfSync") -> Outcome:
    """Assert that all ranks raised the same error, text and report; return the outcome."""
    assert list_fields(outcomes, "error") == [error] * len(outcomes), outcomes
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]


def all_pass(outcomes: list[Outcome]) -> Report:
    """Assert that no rank raised and that all returned the same report; return it."""
    assert list_fields(outcomes, "text") == [""] * len(outcomes)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0].report is not None
    return outcomes[0].report


class Net(nn.Module):
    """A small network, with or without BatchNorm."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.fc(x)))


def trained(norm: bool = False, steps: int = 2) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Train on different data per rank under plain DDP: equal parameters, different BatchNorm statistics."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(norm))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def flip(tensor: torch.Tensor, index: int = 1, bit: int = 0) -> None:
    """Flip one bit of one element."""
    tensor.detach().view(torch.int32).flatten()[index] ^= 1 << bit
