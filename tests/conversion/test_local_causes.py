"""A few wrong elements of a tensor are a local change, and never show that the tensor has nothing to do with A."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.found_causes import compare, draw, find, flip

if TYPE_CHECKING:
    from pathlib import Path

WEIGHT = draw(64, 64)


@pytest.mark.parametrize("bit", [3, 19, 23, 26, 30, 31])
def test_one_flipped_bit(tmp_path: Path, bit: int) -> None:
    """A bit of the mantissa, the exponent or the sign: also one that makes an element as large as 1e36."""
    findings = find(
        tmp_path, {"fc.weight": WEIGHT, "b": WEIGHT * 2}, {"fc.weight": flip(WEIGHT, 327, bit), "b": WEIGHT * 2}
    )
    assert findings == {"SYN220": {"fc.weight"}}


def test_a_flip_in_a_norm_of_almost_equal_elements(tmp_path: Path) -> None:
    """The correlation of such a norm is that of the flipped element alone."""
    norm = torch.ones(64) + 1e-6 * draw(64, scale=1.0)
    assert find(tmp_path, {"norm.weight": norm}, {"norm.weight": flip(norm, 7, 19)}) == {"SYN220": {"norm.weight"}}


def test_a_flip_beside_a_conversion(tmp_path: Path) -> None:
    """All other elements are those of A in bfloat16, with and without --cast."""
    words = WEIGHT.bfloat16().view(torch.int16).clone()
    words[3, 4] ^= 1 << 13
    state = {"fc.weight": WEIGHT, "b": WEIGHT * 2}
    copy = {"fc.weight": words.view(torch.bfloat16), "b": WEIGHT.bfloat16() * 2}
    findings = find(tmp_path, state, copy)
    assert findings == {"SYN307": {"b"}, "SYN220": {"fc.weight"}}
    assert find(tmp_path, state, copy, cast="bfloat16") == {"SYN220": {"fc.weight"}}
    assert find(tmp_path, copy, state) == {"SYN307": {"b"}, "SYN220": {"fc.weight"}}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [1, -1])
def test_a_neighbouring_number_is_no_flip(tmp_path: Path, turned: bool, dtype: torch.dtype, step: int) -> None:
    """An element that was rounded another way has the cause of all other tensors, with a few elements or with many."""
    state = {"norm.weight": 1 + WEIGHT[0].abs(), "b.weight": WEIGHT * 2}
    copy = {name: weight.to(dtype) for name, weight in state.items()}
    copy["norm.weight"].view(torch.int16)[5] += step
    copy["b.weight"].view(torch.int16)[:, ::3] += step
    a, b = (copy, state) if turned else (state, copy)
    cast = str(dtype).removeprefix("torch.")
    assert find(tmp_path, state, copy, cast=cast) == {"SYN399": {"norm.weight", "b.weight"}}
    assert find(tmp_path, a, b) == {"SYN102": {"norm.weight", "b.weight"}}


def test_a_flip_beside_trained_tensors(tmp_path: Path) -> None:
    """A huge element is a flipped bit, whatever training changed elsewhere; a small change of one element is not."""
    state = {"a.weight": WEIGHT, "b.weight": WEIGHT * 2}
    trained = WEIGHT * 2 + draw(64, 64, seed=3, scale=1e-3)
    findings = find(tmp_path, state, {"a.weight": flip(WEIGHT, 99, 30), "b.weight": trained})
    assert findings == {"SYN220": {"a.weight"}, "SYN399": {"b.weight"}}
    findings = find(tmp_path, state, {"a.weight": flip(WEIGHT, 99, 0), "b.weight": trained})
    assert findings == {"SYN399": {"a.weight", "b.weight"}}


@pytest.mark.parametrize("count", [2, 40, 400])
def test_some_huge_elements(tmp_path: Path, count: int) -> None:
    """Several wrong elements of any size leave a tensor related to A."""
    broken = WEIGHT.clone()
    broken.view(-1)[torch.randperm(4096, generator=torch.Generator().manual_seed(1))[:count]] = 1e20
    assert find(tmp_path, {"fc.weight": WEIGHT}, {"fc.weight": broken}) == {"SYN399": {"fc.weight"}}


def test_a_part_of_the_rows_is_new(tmp_path: Path) -> None:
    """Half of the rows with large random values: the other rows are still those of A."""
    broken = WEIGHT.clone()
    broken[32:] = draw(32, 64, seed=5, scale=10.0)
    assert find(tmp_path, {"fc.weight": WEIGHT}, {"fc.weight": broken}) == {"SYN399": {"fc.weight"}}


def test_a_new_tensor_is_unrelated(tmp_path: Path) -> None:
    """Random values, also with a few elements in common, a few huge ones, or in another dtype, and constants."""
    random = draw(64, 64, seed=7)
    selected = random.clone()
    selected[0, :40] = WEIGHT[0, :40]
    huge = random.clone()
    huge[1, 2] = 1e30
    for copy in (random, selected, huge, random.bfloat16(), torch.zeros(64, 64)):
        findings = find(tmp_path, {"fc.weight": WEIGHT, "b": WEIGHT * 2}, {"fc.weight": copy, "b": WEIGHT * 2})
        assert findings == {"SYN311": {"fc.weight"}}


def test_outliers_of_a_trained_tensor(tmp_path: Path) -> None:
    """Noise in the largest elements hides the correlation of all other elements."""
    trained = WEIGHT + draw(64, 64, seed=3, scale=1e-3)
    trained.view(-1)[:500] *= -1e6
    assert find(tmp_path, {"fc.weight": WEIGHT}, {"fc.weight": trained}) == {"SYN399": {"fc.weight"}}


def test_a_step_counter_is_not_rounded(tmp_path: Path) -> None:
    """A step of 19 is 20 in an 8-bit dtype, which is no evidence; a rounded bias beside a rounded weight is."""
    state = {"model": {"fc.weight": WEIGHT}, "optimizer.step": torch.tensor(19.0)}
    findings, _ = compare(tmp_path, state, {**state, "optimizer.step": torch.tensor(20.0)})
    assert "SYN307" not in findings
    plain = {"fc.weight": WEIGHT, "fc.bias": WEIGHT[0, :4]}
    rounded = {name: tensor.bfloat16().float() for name, tensor in plain.items()}
    assert find(tmp_path, plain, rounded) == {"SYN307": set(plain)}
    assert find(tmp_path, plain, {**plain, "fc.bias": rounded["fc.bias"]}) == {"SYN399": {"fc.bias"}}
