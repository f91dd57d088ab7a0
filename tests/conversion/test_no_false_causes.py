"""Differences that look like mistakes of a conversion and are none: training, pruning, other orders, initial values."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import pytest
import torch
from support.found_causes import compare, draw, find

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BODY = {"fc.weight": draw(16, 16, seed=9)}
WEIGHT = draw(64, 64)
NORM = 1 + draw(64, seed=1)


def train_in_bfloat16() -> tuple[torch.Tensor, torch.Tensor]:
    """Small steps change few elements of a tensor in bfloat16, by one unit."""
    return WEIGHT.bfloat16(), (WEIGHT + draw(64, 64, seed=3, scale=1e-5)).bfloat16()


def train_norm() -> tuple[torch.Tensor, torch.Tensor]:
    """A norm that was 1: it is no 8-bit rounding of the trained norm."""
    return torch.ones(64), NORM


def train_norm_in_bfloat16() -> tuple[torch.Tensor, torch.Tensor]:
    """The same in low precision, with all but one element unchanged, beside a trained tensor."""
    trained = torch.ones(128).bfloat16()
    trained[3] += 2**-7
    return torch.ones(128).bfloat16(), trained


def round_decimals() -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers with three decimals have steps, and are not quantized."""
    return WEIGHT, (WEIGHT * 1000).round() / 1000


def round_to_floats() -> tuple[torch.Tensor, torch.Tensor]:
    """Steps of 8-bit floats with a scale are of several sizes."""
    scale = WEIGHT.abs().max() / 448
    return WEIGHT, (WEIGHT / scale).to(torch.float8_e4m3fn).float() * scale


def scale_one_half() -> tuple[torch.Tensor, torch.Tensor]:
    """One part of a matrix is twice as large: two factors are no scales of blocks."""
    return WEIGHT, torch.cat([WEIGHT[:32] * 2, WEIGHT[32:]])


def permute_elements() -> tuple[torch.Tensor, torch.Tensor]:
    """The elements in any other order are all of A, although nothing correlates."""
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(2))
    return WEIGHT, WEIGHT.reshape(-1)[order].reshape(64, 64)


def draw_ternary() -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices of -1, 0 and 1 have many equal elements."""
    return WEIGHT.div(0.02).round().clamp(-1, 1), draw(64, 64, seed=4).div(0.02).round().clamp(-1, 1)


def add_identity() -> tuple[torch.Tensor, torch.Tensor]:
    """An identity with noise."""
    return torch.eye(64), torch.eye(64) + WEIGHT


def average() -> tuple[torch.Tensor, torch.Tensor]:
    """A moving average."""
    return WEIGHT, WEIGHT * 0.999 + draw(64, 64, seed=5) * 0.001


def shift_with_noise() -> tuple[torch.Tensor, torch.Tensor]:
    """A constant offset that fits no element exactly."""
    return WEIGHT, WEIGHT + 1 + draw(64, 64, seed=6, scale=1e-4)


def invert() -> tuple[torch.Tensor, torch.Tensor]:
    """A function of each element that is not linear."""
    return WEIGHT, 1 / WEIGHT


CHANGES = [
    train_in_bfloat16,
    train_norm,
    round_decimals,
    round_to_floats,
    scale_one_half,
    permute_elements,
    draw_ternary,
    add_identity,
    average,
    shift_with_noise,
    invert,
]


@pytest.mark.parametrize("change", CHANGES, ids=attrgetter("__name__"))
def test_no_cause_is_stated(tmp_path: Path, change: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Nothing but an unexplained difference, in both directions as far as nothing is lost."""
    a, b = change()
    assert find(tmp_path, BODY | {"norm.weight": a}, BODY | {"norm.weight": b}) == {"SYN399": {"norm.weight"}}


def test_a_trained_norm_is_no_flip(tmp_path: Path) -> None:
    """One changed element of a norm is no damage if another tensor was trained."""
    before, after = train_norm_in_bfloat16()
    weight, trained = train_in_bfloat16()
    findings = find(tmp_path, {"norm.weight": before, "w": weight}, {"norm.weight": after, "w": trained})
    assert findings == {"SYN399": {"norm.weight", "w"}}


def test_initial_values(tmp_path: Path) -> None:
    """A norm or a bias with its initial values was not loaded, and is no rounding of the trained tensor."""
    for trained, initial in ((NORM, torch.ones(64)), (NORM - 1, torch.zeros(64))):
        assert find(tmp_path, BODY | {"n": trained}, BODY | {"n": initial}) == {"SYN311": {"n"}}


def test_columns_in_another_order(tmp_path: Path) -> None:
    """The inputs of a layer in another order, as after a flattened image with its channels last."""
    for order in (torch.randperm(64, generator=torch.Generator().manual_seed(3)), torch.arange(64).reshape(4, 16).T):
        findings, _ = compare(tmp_path, BODY | {"w": WEIGHT}, BODY | {"w": WEIGHT[:, order.reshape(-1)]})
        assert findings.keys() == {"SYN305"}
