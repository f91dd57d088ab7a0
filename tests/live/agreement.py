"""What a call did on all ranks of a test, known on each of them, and a small net to call it with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.records import Finding, Report


needs_fsdp2 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), reason="FSDP2 of this torch does not run on CPU"
)


def on_all(mine: Any) -> list[Any]:
    """Return what each rank has, on all of them."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


@dataclass
class Outcome:
    """What a call did on one rank: returned a report, or raised an error, which may have a report too."""

    error: str = ""
    text: str = ""
    report: Report | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        assert self.report is not None
        return self.report.groups[0].findings

    @property
    def codes(self) -> list[str]:
        return [finding.code for finding in self.findings]


def each_rank(call: Callable[..., Report], *things: Any, **options: Any) -> list[Outcome]:
    """Make a call on all ranks; return, on all of them, what each one's did."""
    # In a group of its own: a rank that returns too early must not answer messages of the others' calls.
    group = dist.new_group()
    try:
        mine = Outcome(report=call(*things, **options))
    except Exception as error:  # noqa: BLE001
        mine = Outcome(type(error).__name__, str(error), getattr(error, "report", None))
    print(mine.error or "returned", mine.text)  # shown for a rank that then waits for the others in vain
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, mine, group=group)
    return outcomes


def all_raise(outcomes: list[Outcome], error: str = "OutOfSync") -> Outcome:
    """Assert that all ranks raised one error with one text and one report, and return it."""
    assert [outcome.error for outcome in outcomes] == [error] * len(outcomes), outcomes
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]


def all_pass(outcomes: list[Outcome]) -> Report:
    """Assert that no rank raised and that all have one report, and return it."""
    assert [outcome.text for outcome in outcomes] == [""] * len(outcomes)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0].report is not None
    return outcomes[0].report


class Net(nn.Module):
    """A small net, with or without BatchNorm."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.fc(x)))


def trained(norm: bool = False, steps: int = 2) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Train on unlike data under plain DDP, so that parameters stay equal and BatchNorm's statistics do not."""
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
