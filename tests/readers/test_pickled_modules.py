"""Pickled modules: `torch.save(model)` has the names of `torch.save(model.state_dict())`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.listings import list_codes

import syncheck

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Rotary(torch.nn.Module):
    """A module with a buffer that its state dict does not contain, and with a submodule named `model`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.head = torch.nn.Linear(4, 2, bias=False)
        self.register_buffer("inv_freq", torch.rand(2), persistent=False)


class Tied(torch.nn.Module):
    """A module whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.lm_head = torch.nn.Linear(4, 5, bias=False)
        self.lm_head.weight = self.embed.weight


MODELS = [
    Rotary,
    Tied,
    lambda: torch.nn.ModuleDict({"network": Rotary(), "weights": torch.nn.BatchNorm2d(3)}),
    lambda: torch.nn.ParameterList([torch.nn.Parameter(torch.rand(3))]),
]


@pytest.mark.parametrize("make_model", MODELS)
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: {"model": model, "step": 3}])
def test_names_of_a_pickled_module(tmp_path: Path, make_model: Callable[[], Any], wrap: Callable[[Any], Any]) -> None:
    """A module and its state dict are in sync, and so are two modules; a change of one tensor has its own finding."""
    model = make_model()
    torch.save(wrap(model), tmp_path / "rank0.pt")
    torch.save(wrap(model.state_dict()), tmp_path / "rank1.pt")
    names = [set(syncheck.read(str(tmp_path / f"rank{rank}.pt")).tensors) for rank in range(2)]
    assert names[0] == names[1] == set(model.state_dict())
    report = syncheck.compare(tmp_path)
    assert (report.exit_code, list_codes(report.groups[0].findings)) == (0, [])
    assert syncheck.diff(tmp_path / "rank0.pt", tmp_path / "rank1.pt").exit_code == 0

    with torch.no_grad():
        next(model.parameters()).add_(1)
    torch.save(wrap(model), tmp_path / "rank1.pt")
    (group,) = syncheck.compare(tmp_path).groups
    assert {diff.name for diff in group.tensors} <= set(model.state_dict())
    assert group.verdict == "out_of_sync"


def test_modes_of_modules(tmp_path: Path) -> None:
    """A mode that one file does not store is no other mode; eval() on one of three ranks is a warning."""
    model = Rotary()
    torch.save(model, tmp_path / "rank0.pt")
    torch.save(model.state_dict(), tmp_path / "rank1.pt")
    assert list_codes(syncheck.compare(tmp_path).groups[0].findings) == []
    torch.save(model.eval(), tmp_path / "rank2.pt")
    (finding,) = syncheck.compare(tmp_path).groups[0].findings
    assert (finding.code, finding.fails) == ("SYN107", False)
