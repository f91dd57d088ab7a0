"""Two runs: with the state of an optimizer in both files, causes of `compare` explain differences, without a proof."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.found_causes import compare

if TYPE_CHECKING:
    from pathlib import Path

    from support.found_causes import State


def train(
    *, steps: int = 12, lr: float = 1e-2, scale: float = 1.0, data: int = 0, optimizer: str = "adam", skipped: int = -1
) -> State:
    """Return the checkpoint of a small run. scale: of the gradients. data: the seed of the batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.ReLU(), torch.nn.Linear(24, 4))
    if optimizer == "adam":
        created: Any = torch.optim.AdamW(model.parameters(), lr=lr)
    else:
        created = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    generator = torch.Generator().manual_seed(data)
    for step in range(steps):
        batch = torch.randn(32, 12, generator=generator)
        labels = torch.randint(0, 4, (32,), generator=generator)
        created.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), labels).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= scale
        if step != skipped:
            created.step()
    return {"model": model.state_dict(), "optimizer": created.state_dict(), "step": steps}


RUNS: list[tuple[dict[str, Any], str, str]] = [
    ({"scale": 0.5}, "SYN213", "likely"),
    ({"scale": 8.0}, "SYN213", "likely"),
    ({"scale": 0.2, "optimizer": "sgd"}, "SYN213", "consistent"),
    ({"lr": 2e-2}, "SYN107", "likely"),
    ({"lr": 1.5e-2, "optimizer": "sgd"}, "SYN107", "likely"),
    ({"steps": 14}, "SYN106", "consistent"),
    ({"steps": 10, "optimizer": "sgd"}, "SYN106", "consistent"),
    ({"skipped": 9}, "SYN214", "consistent"),
]


@pytest.mark.parametrize(("change", "code", "certainty"), RUNS, ids=lambda value: str(value))
def test_two_runs(tmp_path: Path, change: dict[str, Any], code: str, certainty: str) -> None:
    """Gradients of another scale, another learning rate, other steps, and a skipped step."""
    optimizer = change.get("optimizer", "adam")
    findings, _ = compare(tmp_path, train(optimizer=optimizer), train(**change))
    assert next(iter(findings)) == code
    assert findings.keys() <= {code, "SYN399"}
    assert findings[code].certainty == certainty
    assert bool(findings[code].alternatives) == (certainty == "consistent")
    assert not findings[code].ranks


def test_models_without_an_optimizer(tmp_path: Path) -> None:
    """Without the state of an optimizer in both files, nothing shows why two runs differ."""
    a, b = train(), train(scale=0.5)
    del b["optimizer"]
    findings, _ = compare(tmp_path, a, b)
    assert findings.keys() <= {"SYN101", "SYN399"}
    del a["optimizer"]
    findings, _ = compare(tmp_path, a, {**train(steps=14), "optimizer": {}})
    assert findings.keys() == {"SYN399"}


def test_other_batches(tmp_path: Path) -> None:
    """Two runs on other data have no cause, and moments without a correlation are not unrelated tensors."""
    for optimizer in ("adam", "sgd"):
        findings, _ = compare(tmp_path, train(optimizer=optimizer), train(optimizer=optimizer, data=1, steps=12))
        assert findings.keys() == {"SYN399"}


def test_steps_without_a_stored_step(tmp_path: Path) -> None:
    """Two files of unknown steps show no skipped step, and their learning rates may follow a schedule."""
    a, b = train(), train(steps=13, lr=2e-2)
    del a["step"], b["step"]
    findings, _ = compare(tmp_path, a, b)
    assert findings.keys() == {"SYN106"}


@pytest.mark.parametrize("steps", [11, 13, 40])
@pytest.mark.parametrize("is_stored", [False, True])
def test_optimizer_state_of_another_step(tmp_path: Path, steps: int, is_stored: bool) -> None:
    """The weights are equal, so the counters of the optimizer are the evidence, whatever step the files store."""
    a, b = train(), train()
    b["optimizer"] = train(steps=steps)["optimizer"]
    if not is_stored:
        del a["step"], b["step"]
    for number, (first, second, counts) in enumerate(((a, b, [12, steps]), (b, a, [steps, 12]))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (finding,) = compare(folder, first, second)[0].values()
        assert (finding.code, finding.certainty, len(finding.tensors)) == ("SYN106", "consistent", 12)
        assert list(finding.facts[0].parameters["counts"].values()) == counts


class Traced(torch.nn.Module):
    """A module with numbers in its code."""

    def __init__(self, numbers: list[float]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(24, len(numbers))
        self.numbers = numbers

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Add the numbers."""
        return self.linear(batch) + torch.tensor(self.numbers)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [1, 80])
def test_constants_of_traced_code(tmp_path: Path, count: int) -> None:
    """Constants of other code are no bit flips, and were not loaded from A."""
    numbers = torch.arange(80.0).tolist()
    remaining = [number + 1 if i < count else number for i, number in enumerate(reversed(numbers))]
    remaining.reverse()
    if count > 1:
        remaining = torch.randn(80, generator=torch.Generator().manual_seed(0)).tolist()
    first, second = Traced(numbers), Traced(remaining)
    second.load_state_dict(first.state_dict())
    for module, label in ((first, "a"), (second, "b")):
        torch.jit.trace(module, torch.ones(2, 24)).save(str(tmp_path / f"{label}.pt"))
    import syncheck

    report = syncheck.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert report.exit_code == 1
    (finding,) = report.groups[-1].findings
    assert (finding.code, finding.tensors) == ("SYN399", ("CONSTANTS.c0",))


def test_an_edited_value_may_be_no_flip(tmp_path: Path) -> None:
    """One element that was replaced, or an integer that differs in one bit, is only consistent with a flip."""
    weights = torch.arange(32.0)
    for position, value in ((8, 9.0), (3, 0.123)):
        edited = weights.clone()
        edited[position] = value
        findings, _ = compare(tmp_path, {"w": weights}, {"w": edited})
        assert findings.keys() == {"SYN220"}
        assert findings["SYN220"].certainty == "consistent"
