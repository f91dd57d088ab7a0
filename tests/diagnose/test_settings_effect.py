"""Which differences the settings of SYN107 explain; all others keep a finding of their own."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.cases import diagnose_case
from support.listings import index_by, list_codes, list_fields
from support.small_model import HALF, MODEL, group, model, moments

import syncheck
from syncheck.diagnose.syn107_settings_differ import Text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncheck.records import Finding

torch = pytest.importorskip("torch")

STEPS = 30
EVENT = 20  # the step of a fault


def describe(value: Any) -> str:
    """Return the name of a function, or the text of settings."""
    return getattr(value, "__name__", str(value))


def adamw(parameters: Any) -> Any:
    """Return an optimizer with decoupled weight decay."""
    return torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01)


def sgd(parameters: Any) -> Any:
    """Return an optimizer whose momentum contains the weight decay."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)


def keep(network: Any, number: int) -> None:
    """Change nothing."""


def double(network: Any, number: int) -> None:
    """Double the gradients of a step."""
    for parameter in network.parameters():
        if number == EVENT:
            parameter.grad.mul_(2)


def disturb(network: Any, number: int) -> None:
    """Add noise to the weights once."""
    for parameter in network.parameters():
        if number == EVENT:
            parameter.data.add_(torch.randn(parameter.shape) * 1e-2)


def disturb_layer(network: Any, number: int) -> None:
    """Add noise to the gradients of a layer in each step."""
    for parameter in network[2].parameters():
        parameter.grad.add_(torch.randn(parameter.shape))


def run(folder: Path, make: Callable[..., Any], settings: dict[str, Any], fault: Any) -> dict[str, Finding]:
    """Train three ranks with averaged gradients; return the findings by code.

    settings, fault: of rank 1.
    """
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
    models = [copy.deepcopy(first) for _ in range(3)]
    optimizers = [make(each.parameters()) for each in models]
    optimizers[1].param_groups[0].update(settings)
    for number in range(STEPS):
        data = torch.randn(3, 6, 8)
        target = data.roll(1, 2).repeat(1, 1, 2)
        for each, x, y in zip(models, data, target, strict=True):
            each.zero_grad()
            torch.nn.functional.mse_loss(each(x), y).backward()
        for parameters in zip(*(each.parameters() for each in models), strict=True):
            mean = sum(list_fields(parameters, "grad")) / 3
            for parameter in parameters:
                parameter.grad = mean.clone()
        fault(models[1], number)
        for optimizer in optimizers:
            optimizer.step()
    for rank, (each, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        torch.save({"model": each.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"rank{rank}.pth")
    (compared,) = syncheck.compare(folder).groups
    return index_by(compared.findings, "code")


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (adamw, {"lr": 4e-3}),
        (adamw, {"lr": 2.01e-3}),
        (adamw, {"lr": 2.0002e-3}),
        (adamw, {"eps": 1e-3}),
        (adamw, {"weight_decay": 0.1}),
        (adamw, {"betas": (0.5, 0.9)}),
        (sgd, {"lr": 0.1}),
        (sgd, {"weight_decay": 5e-2}),
        (sgd, {"weight_decay": 5.01e-4}),
        (sgd, {"momentum": 0.5}),
    ],
    ids=describe,
)
def test_settings_that_explain_everything(tmp_path: Path, make: Any, settings: dict[str, Any]) -> None:
    """Without another fault, SYN107 is the only finding, and covers the parameters."""
    findings = run(tmp_path, make, settings, keep)
    assert set(findings) == {"SYN107"}
    assert findings["SYN107"].certainty == "proved"
    assert {"0.weight", "2.weight"} <= set(findings["SYN107"].tensors)


@pytest.mark.parametrize("fault", [double, disturb])
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (adamw, {"foreach": True}),
        (adamw, {"lr": 2.0000002e-3}),
        (adamw, {"weight_decay": 0.0100001}),
        (sgd, {"foreach": True}),
        (sgd, {"lr": 0.05000001}),
    ],
    ids=describe,
)
def test_settings_without_effect(tmp_path: Path, make: Any, settings: dict[str, Any], fault: Any) -> None:
    """A setting that changes only rounding, or by a tiny part, leaves the differences to another finding."""
    findings = run(tmp_path, make, settings, fault)
    assert findings["SYN107"].tensors == ()
    remaining = [finding for code, finding in findings.items() if code != "SYN107"]
    assert any("0.weight" in finding.tensors for finding in remaining)
    assert set(list_codes(findings["SYN107"].facts)) & {Text.ONLY_ROUNDING, Text.UNEXPLAINED}


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_layer_with_other_gradients(tmp_path: Path, make: Any) -> None:
    """Another learning rate does not explain the moments of a layer with other gradients."""
    findings = run(tmp_path, make, {"lr": 0.01}, disturb_layer)
    assert "2.weight" not in findings["SYN107"].tensors
    assert any("2.weight" in finding.tensors for code, finding in findings.items() if code != "SYN107")


def test_only_the_implementation_differs(tmp_path: Path) -> None:
    """The cause of different implementations is rounding, not unequal steps."""
    findings = run(tmp_path, adamw, {"foreach": True}, keep)
    assert set(findings) == {"SYN107"}
    assert findings["SYN107"].cause.code is Text.CAUSE_ROUNDING


@pytest.mark.parametrize(("decoupled", "codes"), [(1.0, {"SYN107", "SYN211"}), (0.0, {"SYN107"})])
def test_moments_differ_too(decoupled: float, codes: set[str]) -> None:
    """Moments of the same direction are an effect of a learning rate only with weight decay in the gradients."""
    settings = {"lr": 0.2, "weight_decay": 1.0, "decoupled_weight_decay": decoupled}
    findings = diagnose_case(group(*model(), *moments(cosine=0.99), values=(HALF,), hyperparameters=settings))
    assert bool(findings["SYN107"].tensors) is (codes == {"SYN107"})
    assert (len(findings) > 1) is (codes != {"SYN107"})


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        ({0: 0.1, 1: 0.05}, ("consistent", ("SYN211", "SYN213"))),
        ({0: 0.1, 1: 0.1, 2: 0.05}, ("consistent", ("SYN213",))),
    ],
)
def test_107_without_moments(by_rank: dict[int, float], expected: Any) -> None:
    """Without moments, the gradients may differ too, unless ranks with equal settings agree."""
    count = len(by_rank)
    rate = replace(HALF, by_rank=by_rank)
    findings = diagnose_case(group(*model(ranks=count), ranks=count, values=(rate,), optimizer=()))
    assert set(findings["SYN107"].tensors) == {*MODEL}
    assert (findings["SYN107"].certainty, findings["SYN107"].alternatives) == expected
