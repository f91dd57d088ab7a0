"""Optimizer state that is 0, scaled or counts other steps on some ranks, although all parameters agree."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import syncheck
from syncheck.diagnose import syn213_per_rank_gradient_scale as syn213
from syncheck.diagnose import syn215_optimizer_state_not_restored as syn215
from syncheck.diagnose import syn299_unexplained_difference as syn299

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Moments = dict[str, Any]
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5),
}


def train(optimizer: str) -> dict[str, Any]:
    """Return a checkpoint after five steps."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    chosen = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(5):
        chosen.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        chosen.step()
    return copy.deepcopy({"model": model.state_dict(), "optimizer": chosen.state_dict(), "step": 5})


def scale(checkpoint: dict[str, Any], factor: float, *, parameters: int = 4, name: str = "") -> dict[str, Any]:
    """Return a checkpoint with scaled moments of the first parameters. name: of the only scaled moment."""
    scaled = copy.deepcopy(checkpoint)
    for state in list(scaled["optimizer"]["state"].values())[:parameters]:
        for key in state.keys() - {"step"}:
            # Second moments are squares.
            power = 2 if key in ("exp_avg_sq", "square_avg") else 1
            state[key] = state[key] * factor**power if name in ("", key) else state[key]
    return scaled


def diagnose(folder: Path, checkpoints: list[dict[str, Any]]) -> syncheck.Finding:
    """Return the only finding of ranks with these checkpoints."""
    for rank, checkpoint in enumerate(checkpoints):
        torch.save(checkpoint, folder / f"rank{rank}.pt")
    (finding,) = syncheck.compare(folder).groups[0].findings
    return finding


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("ranks", "zero_ranks"), [(3, (2,)), (2, (0,)), (4, (0, 1, 2))])
def test_moments_of_zero_are_a_reset(tmp_path: Path, optimizer: str, ranks: int, zero_ranks: tuple[int, ...]) -> None:
    """If all parameters agree, ranks whose moments are all 0 have lost their state: SYN215, and not SYN213."""
    checkpoint = train(optimizer)
    reset = scale(checkpoint, 0.0)
    finding = diagnose(tmp_path, [reset if rank in zero_ranks else checkpoint for rank in range(ranks)])
    assert (finding.code, finding.certainty, finding.ranks) == ("SYN215", "likely", zero_ranks)
    assert finding.facts[0].code is syn215.Text.ZEROS


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_scaled_moments_beside_equal_parameters(tmp_path: Path, optimizer: str) -> None:
    """Clipping is no fact if all parameters agree: the text says so, and SYN215 is another possible cause."""
    checkpoint = train(optimizer)
    finding = diagnose(tmp_path, [checkpoint, checkpoint, scale(checkpoint, 0.3)])
    assert (finding.code, finding.certainty) == ("SYN213", "consistent")
    assert "SYN215" in finding.alternatives
    assert finding.facts[0].code in (syn213.Text.CONSISTENT, syn213.Text.SCALED_CONSISTENT)
    assert syn213.Text.PARAMETERS_AGREE in [fact.code for fact in finding.facts]


@pytest.mark.parametrize("change", ["some parameters", "one kind", "parameters"])
def test_other_zeros_are_no_reset(tmp_path: Path, change: str) -> None:
    """Zeros in some moments, or beside parameters that differ, are not SYN215."""
    checkpoint = train("adam")
    altered = scale(checkpoint, 0.0, parameters=1 if change == "some parameters" else 4)
    if change == "one kind":
        altered = scale(checkpoint, 0.0, name="exp_avg_sq")
    if change == "parameters":
        altered["model"]["0.weight"] += 0.1
    finding = diagnose(tmp_path, [checkpoint, checkpoint, altered])
    assert finding.code != "SYN215"


@pytest.mark.parametrize("number", [4, 6, 60])
@pytest.mark.parametrize("parameters", [1, 4])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_step_counters_alone(tmp_path: Path, number: int, parameters: int, as_tensor: bool) -> None:
    """If all moments agree too, code has set the counters, and the fix mentions no moments."""
    checkpoint = train("adam")
    for state in checkpoint["optimizer"]["state"].values():
        state["step"] = state["step"] if as_tensor else 5
    altered = copy.deepcopy(checkpoint)
    for state in list(altered["optimizer"]["state"].values())[:parameters]:
        state["step"] = torch.tensor(float(number)) if as_tensor else number
    finding = diagnose(tmp_path, [checkpoint, checkpoint, altered])
    assert (finding.code, finding.ranks) == ("SYN299", (2,))
    assert finding.fix.code is (syn299.Text.FIX_COUNTERS if as_tensor else syn299.Text.FIX_VALUES)
