"""Local SGD with tied weights: between two averages, both names of a tied weight differ by design."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.listings import list_codes
from torch import nn

import syncheck
from syncheck.live import check

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Group
    from syncheck.testing import Rank


class Tied(nn.Module):
    """Embedding and output layer share a weight; `frozen` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(10, 4), requires_grad=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next word."""
        scores: torch.Tensor = self.head(self.mix(self.embed(words)) * self.frozen.mean())
        return scores


def train(rank: int, steps: int = 2) -> tuple[Tied, torch.optim.Optimizer]:
    """Train alone on the data of the rank, from a common start."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    torch.manual_seed(100 + rank)
    for _ in range(steps):
        words = torch.randint(10, (16,))
        nn.functional.cross_entropy(model(words), (words + 1) % 10).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def block(rank: int, ranks: int, **given: Any) -> dict[str, Any]:
    """Return metadata of the second step after an average."""
    averaging = {"period": 4, "warmup_steps": 0, "last_step": 8}
    return syncheck.metadata(run="diloco", rank=rank, world_size=ranks, step=10, averaging=averaging, **given)


def codes(group: Group) -> list[str]:
    """Return the codes of the findings."""
    return list_codes(group.findings)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cloned", [False, True], ids=["one memory", "two copies"])
@pytest.mark.parametrize("named", [False, True], ids=["numbers", "names"])
def test_both_names_of_a_tied_weight(tmp_path: Path, ranks: int, cloned: bool, named: bool) -> None:
    """The optimizer has the state of one name; the other name differs for the same reason."""
    for rank in range(ranks):
        model, optimizer = train(rank)
        state = {name: tensor.clone() if cloned else tensor for name, tensor in model.state_dict().items()}
        settings = {"model": model, "optimizer": optimizer} if named else {}
        content = {"model": state, "optimizer": optimizer.state_dict(), "syncheck": block(rank, ranks, **settings)}
        torch.save(content, tmp_path / f"rank{rank}.pth")
    (group,) = syncheck.compare(tmp_path).groups
    assert (group.verdict, codes(group)) == ("out_of_sync", ["SYN241"])
    assert {"embed.weight", "head.weight"} <= set(group.findings[0].tensors)


def test_an_untrained_tensor_of_its_own(tmp_path: Path) -> None:
    """A frozen parameter that differs is not explained by the averages."""
    for rank in (0, 1):
        model, optimizer = train(rank)
        model.frozen.data += rank * torch.rand(10, 4)
        described = block(rank, 2, model=model, optimizer=optimizer)
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "syncheck": described}
        torch.save(content, tmp_path / f"rank{rank}.pth")
    (group,) = syncheck.compare(tmp_path).groups
    assert len(group.findings) == 2
    assert all("frozen" not in finding.tensors for finding in group.findings if finding.code == "SYN241")


@pytest.mark.syncheck(ranks=2, timeout=60)
def test_in_a_running_job(syncheck_rank: Rank) -> None:
    """A live check with the metadata of the averages agrees with the files."""
    model, optimizer = train(syncheck_rank.rank)
    report = check((model, {"syncheck": block(0, 1)}), optimizer)
    (group,) = report.groups
    assert (group.verdict, codes(group)) == ("out_of_sync", ["SYN241"])
    assert {"embed.weight", "head.weight"} <= set(group.findings[0].tensors)
