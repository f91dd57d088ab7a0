"""SYN224 and SYN225 on real files: exchanged contents, and parameters that some ranks did not update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.listings import index_by

import syncheck

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncheck.records import Finding

torch = pytest.importorskip("torch")

RANKS = 3


class Rank:
    """A model with two layers of one shape, and its optimizer, on one rank."""

    def __init__(self, optimizer: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.ModuleDict({name: torch.nn.Linear(12, 12) for name in ("a", "b", "c")})
        self.optimizer = optimizer(self.model.parameters())

    def step(self, number: int, skipped: tuple[str, ...] = ()) -> None:
        """Step with the gradients that all ranks have in this step; no gradient of the skipped layers."""
        numbers = torch.Generator().manual_seed(number)
        for name, parameter in self.model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=numbers)
            parameter.grad = None if name.startswith(skipped or ("-",)) else gradient
        self.optimizer.step()


def save(folder: Path, ranks: list[Rank], **more: Any) -> None:
    """Write a file per rank."""
    folder.mkdir(exist_ok=True)
    for rank, each in enumerate(ranks):
        content = {"model": each.model.state_dict(), "optimizer": each.optimizer.state_dict(), **more}
        torch.save(content, folder / f"rank{rank}.pth")


def find(folder: Path) -> dict[str, Finding]:
    """Return the findings of the last step by code."""
    return index_by(syncheck.compare(folder).groups[-1].findings, "code")


def adamw(parameters: Any) -> Any:
    """Return an optimizer that counts steps."""
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> Any:
    """Return an optimizer that counts no steps."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@pytest.mark.parametrize("steps", [0, 5])
def test_exchanged_layers(tmp_path: Path, steps: int) -> None:
    """Two layers of rank 1 are exchanged: proved by equal bytes, and likely after more steps."""
    ranks = [Rank(adamw) for _ in range(RANKS)]
    a = ranks[1].model["a"].weight
    b = ranks[1].model["b"].weight
    retained = a.detach().clone()
    with torch.no_grad():
        a.copy_(b)
        b.copy_(retained)
    for number in range(steps):
        for rank in ranks:
            rank.step(number)
    save(tmp_path, ranks)
    findings = find(tmp_path)
    assert set(findings) == {"SYN224"}
    assert (findings["SYN224"].ranks, findings["SYN224"].tensors) == ((1,), ("a.weight", "b.weight"))
    assert findings["SYN224"].certainty == ("likely" if steps else "proved")


def test_other_values_are_not_exchanged(tmp_path: Path) -> None:
    """Layers with new random values are not exchanged."""
    ranks = [Rank(adamw) for _ in range(RANKS)]
    for name in ("a", "b"):
        torch.nn.init.normal_(ranks[1].model[name].weight)
    save(tmp_path, ranks)
    assert "SYN224" not in find(tmp_path)


def test_no_state_of_one_layer(tmp_path: Path) -> None:
    """Rank 2 never had a gradient of a layer: one finding, without SYN101 for the missing state."""
    ranks = [Rank(adamw) for _ in range(RANKS)]
    for number in range(4):
        for rank, each in enumerate(ranks):
            each.step(number, ("b",) if rank == 2 else ())
    save(tmp_path, ranks)
    findings = find(tmp_path)
    assert set(findings) == {"SYN225"}
    assert findings["SYN225"].ranks == (2,)
    assert {"b.weight", "b.bias"} <= set(findings["SYN225"].tensors)


@pytest.mark.parametrize("skipped", [(), ("a", "b", "c")])
def test_lost_state_and_skipped_steps_of_the_whole_model(tmp_path: Path, skipped: tuple[str, ...]) -> None:
    """A rank that lost its whole state, or skipped a whole step, did not leave out some parameters."""
    ranks = [Rank(adamw) for _ in range(RANKS)]
    for number in range(20):
        for rank, each in enumerate(ranks):
            if rank == 1 and number == 12 and not skipped:
                each.optimizer.state.clear()
            each.step(number, skipped if rank == 1 and number == 12 else ())
    save(tmp_path, ranks, step=20)
    assert set(find(tmp_path)) == {"SYN214" if skipped else "SYN215"}


def test_layer_skipped_in_some_steps(tmp_path: Path) -> None:
    """The step counters of one layer are behind on rank 0, and those of the other layers agree."""
    ranks = [Rank(adamw) for _ in range(RANKS)]
    for number in range(6):
        for rank, each in enumerate(ranks):
            each.step(number, ("c",) if rank == 0 and number in (2, 3) else ())
    save(tmp_path, ranks)
    findings = find(tmp_path)
    assert set(findings) == {"SYN225"}
    assert findings["SYN225"].ranks == (0,)


def test_layer_that_stays_the_same(tmp_path: Path) -> None:
    """Without step counters, the values of the earlier step show the layer that rank 1 did not update."""
    ranks = [Rank(sgd) for _ in range(RANKS)]
    for number in range(6):
        for rank, each in enumerate(ranks):
            each.step(number, ("b",) if rank == 1 and number >= 4 else ())
        if number in (3, 5):
            save(tmp_path / f"step_{number}", ranks)
    findings = find(tmp_path)
    assert set(findings) == {"SYN225"}
    assert findings["SYN225"].ranks == (1,)
