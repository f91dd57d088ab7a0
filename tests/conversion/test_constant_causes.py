"""Constants between two models: a factor, an offset, factors of rows and blocks, missing scales, and rounding steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.found_causes import compare, draw, find, get_parameters

if TYPE_CHECKING:
    from pathlib import Path

WEIGHT, NORM = draw(32, 64), draw(64, seed=1, scale=0.3)
BODY = {"fc.weight": draw(16, 16, seed=2)}


@pytest.mark.parametrize(
    ("offset", "dtype"), [(1.0, "float32"), (-1.0, "bfloat16"), (0.1, "float32"), (1.0, "float16")]
)
def test_an_offset(tmp_path: Path, offset: float, dtype: str) -> None:
    """Norms around another center, also in low precision, of few elements, and of a matrix."""
    kind = getattr(torch, dtype)
    norms = {"norm.weight": NORM, "small.weight": NORM[:12], "w": WEIGHT}
    a = {name: tensor.to(kind) for name, tensor in norms.items()} | BODY
    b = {name: (tensor.float() + offset).to(kind) for name, tensor in a.items() if name in norms} | BODY
    expected = {"norm.weight", "small.weight", "w"}
    if dtype != "float32":
        # Adding 1 rounds nearly all bits of small weights away.
        expected = {"norm.weight", *(["small.weight"] if dtype == "float16" else [])}
    findings = find(tmp_path, a, b)
    assert findings["SYN315"] >= expected
    assert findings.keys() <= {"SYN315", "SYN399"}
    assert get_parameters(tmp_path, a, b, "norm.weight")["offset"] == pytest.approx(offset, rel=1e-3)


@pytest.mark.parametrize("size", [4, 16, 64])
@pytest.mark.parametrize("factor", [0.5, 1 / 3, -1.0, 8.0, 16**0.5 + 0.1])
def test_a_factor(tmp_path: Path, factor: float, size: int) -> None:
    """The factor of a norm, a bias or a matrix of any size."""
    a = BODY | {"norm.weight": NORM[:size]}
    b = BODY | {"norm.weight": NORM[:size] * factor}
    assert find(tmp_path, a, b) == {"SYN312": {"norm.weight"}}
    assert get_parameters(tmp_path, a, b, "norm.weight")["factor"] == pytest.approx(factor, rel=1e-5)


def test_no_constant_by_chance(tmp_path: Path) -> None:
    """Two elements have a factor or an offset by chance, and constant tensors have both."""
    cases = [(NORM[:2], NORM[2:4]), (torch.ones(32), torch.full((32,), 2.0)), (NORM[:2], NORM[:2] * 2)]
    for i, (before, after) in enumerate(cases):
        (tmp_path / str(i)).mkdir()
        assert find(tmp_path / str(i), BODY | {"n": before}, BODY | {"n": after}) == {"SYN399": {"n"}}


def test_a_factor_and_noise_are_no_constant(tmp_path: Path) -> None:
    """A trained tensor that is about twice as large."""
    after = WEIGHT * 2 + draw(32, 64, seed=4, scale=1e-5)
    assert find(tmp_path, {"w": WEIGHT}, {"w": after}) == {"SYN399": {"w"}}


@pytest.mark.parametrize(
    ("block", "dtype"), [((1, 64), "float32"), ((32, 1), "float32"), ((1, 16), "float16"), ((8, 32), "bfloat16")]
)
def test_a_factor_for_each_block(tmp_path: Path, block: tuple[int, int], dtype: str) -> None:
    """Rows, columns and blocks with one factor each."""
    rows, columns = 32 // block[0], 64 // block[1]
    scales = 0.5 + torch.rand(rows, columns, generator=torch.Generator().manual_seed(3))
    factors = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    b = (WEIGHT * factors).to(getattr(torch, dtype))
    findings, _ = compare(tmp_path, BODY | {"w": WEIGHT}, BODY | {"w": b})
    assert findings.keys() == {"SYN316"}
    assert findings["SYN316"].certainty == "likely"
    parameters = get_parameters(tmp_path, BODY | {"w": WEIGHT}, BODY | {"w": b}, "w")
    assert (parameters["block"], parameters["count"]) == (block, rows * columns)
    assert parameters["least"] == pytest.approx(float(scales.min()), rel=0.02)


def test_some_scaled_rows_are_no_missing_scales(tmp_path: Path) -> None:
    """Zeroed rows, and a few rows with a factor, beside unchanged rows."""
    pruned, few = WEIGHT.clone(), WEIGHT.clone()
    pruned[::3] = 0
    few[:8] *= torch.arange(2, 10)[:, None]
    for copy in (pruned, few):
        assert find(tmp_path, {"w": WEIGHT}, {"w": copy}) == {"SYN399": {"w"}}


def quantize(weight: torch.Tensor, levels: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers and their scales, by the largest value of each block."""
    blocks = weight.reshape(-1, length)
    scales = blocks.abs().amax(1, keepdim=True) / levels
    return torch.round(blocks / scales), scales


@pytest.mark.parametrize("length", [64, 32, 2048])
@pytest.mark.parametrize("levels", [127, 7])
def test_rounded_to_integers_and_stored_as_floats(tmp_path: Path, levels: int, length: int) -> None:
    """Steps of 8 and 4 bits for each tensor, row and block, in both directions."""
    numbers, scales = quantize(WEIGHT, levels, length)
    rounded = {"w": (numbers * scales).reshape(32, 64)} | BODY
    for pair in (({"w": WEIGHT} | BODY, rounded), (rounded, {"w": WEIGHT} | BODY)):
        assert find(tmp_path, *pair) == {"SYN308": {"w"}}
    scheme = get_parameters(tmp_path, {"w": WEIGHT} | BODY, rounded, "w")["scheme"]
    assert ("int8" if levels == 127 else "int4") in scheme


@pytest.mark.parametrize(("levels", "length", "dtype"), [(127, 512, "float16"), (7, 64, "bfloat16")])
def test_rounded_in_low_precision(tmp_path: Path, levels: int, length: int, dtype: str) -> None:
    """The steps are wider than the rounding of the dtype."""
    before = draw(64, 512, seed=11).to(getattr(torch, dtype))
    numbers, scales = quantize(before.float(), levels, length)
    rounded = (numbers * scales).reshape(64, 512).to(getattr(torch, dtype))
    assert find(tmp_path, {"w": before}, {"w": rounded}) == {"SYN308": {"w"}}


def test_rounded_with_a_zero_point(tmp_path: Path) -> None:
    """Asymmetric steps, and the steps of a convolution and of a norm."""
    kernel = draw(16, 4, 3, 3, seed=5)
    norm = torch.rand(200, generator=torch.Generator().manual_seed(6))
    state = {"conv.weight": kernel, "norm.weight": norm}
    rounded = {}
    for name, tensor in state.items():
        rows = tensor.reshape(len(tensor) if tensor.ndim > 1 else 1, -1)
        low = rows.amin(1, keepdim=True)
        step = (rows.amax(1, keepdim=True) - low) / 255
        rounded[name] = ((torch.round(rows / step)) * step).reshape(tensor.shape)
    findings = find(tmp_path, state, rounded)
    # 36 values of a row of the kernel may have fewer common divisors than their step shows.
    assert findings["SYN308"] >= {"norm.weight"}
    assert findings.keys() <= {"SYN308", "SYN399"}


def test_wrong_rounding_is_not_quantized(tmp_path: Path) -> None:
    """Steps that lose the values, values beyond half a step, other values on a grid, and pruning."""
    largest = float(WEIGHT.abs().max())
    lost = torch.round(WEIGHT / largest) * largest
    numbers, scales = quantize(WEIGHT, 127, 64)
    shifted = ((numbers + 1) * scales).reshape(32, 64)
    second = (quantize(draw(32, 64, seed=9), 127, 64)[0] * scales).reshape(32, 64)
    pruned = torch.where(WEIGHT.abs() < 0.01, 0, WEIGHT)
    for copy in (lost, shifted, second, pruned):
        findings, _ = compare(tmp_path, {"w": WEIGHT}, {"w": copy}, allow=("SYN308",))
        assert "SYN308" not in findings


@pytest.mark.parametrize("length", [64, 32, 2048])
def test_integers_without_scales(tmp_path: Path, length: int) -> None:
    """B holds the integers of each row, block or tensor as floats, and A the values."""
    numbers, _ = quantize(WEIGHT, 127, length)
    findings, _ = compare(tmp_path, {"w": WEIGHT} | BODY, {"w": numbers.reshape(32, 64)} | BODY)
    assert findings.keys() == {"SYN316"}


@pytest.mark.parametrize("scale_shape", [(), (32, 1), (4, 8)])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_stored_numbers_without_their_scales(tmp_path: Path, scale_shape: tuple[int, ...], dtype: str) -> None:
    """A has numbers and scales for the tensor, for rows or for blocks of 8 x 8, and B the numbers alone: a proof."""
    name = "mlp.up_proj.weight"
    most = 127 if dtype == "int8" else 448
    numbers = torch.round(WEIGHT / WEIGHT.abs().max() * most).to(getattr(torch, dtype))
    scales = 0.001 + torch.rand(scale_shape, generator=torch.Generator().manual_seed(2)) / 100
    a = {name: numbers, f"{name}_scale": scales} | BODY
    for copy in (numbers.bfloat16(), numbers.float()):
        findings, _ = compare(tmp_path, a, {name: copy} | BODY)
        assert findings.keys() == {"SYN316"}
        assert findings["SYN316"].certainty == "proved"
        findings, _ = compare(tmp_path, {name: copy} | BODY, a, cast="bfloat16")
        assert findings.keys() == {"SYN316"}


def test_a_cast_that_was_passed_is_no_fix(tmp_path: Path) -> None:
    """With --cast, other values in another dtype are compared, and the fix is another one."""
    a, b = {"w": WEIGHT} | BODY, {"w": (WEIGHT + draw(32, 64, seed=3, scale=1e-3)).bfloat16()} | BODY
    plain, _ = compare(tmp_path, a, b)
    assert plain.keys() == {"SYN102"}
    accepted, _ = compare(tmp_path, a, b, cast="bfloat16")
    assert accepted.keys() == {"SYN399"}
    same_dtype, _ = compare(tmp_path, a, {"w": b["w"].float()} | BODY)
    assert same_dtype["SYN399"].fix != accepted["SYN399"].fix


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("factor", [-1.0, 0.5, -4.0])
def test_powers_of_two_are_exact(tmp_path: Path, factor: float, dtype: str) -> None:
    """The rounding of an element is no part of a factor that changes only its sign or its exponent."""
    for seed in range(4):
        weight = draw(32, 64, seed=seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        pair = [{"up.weight": weight} | BODY, {"up.weight": (weight * factor).to(getattr(torch, dtype))} | BODY]
        assert get_parameters(folder, *pair, "up.weight")["factor"] == factor


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_no_offset_within_the_rounding(tmp_path: Path, dtype: str) -> None:
    """Weights that are 1 % smaller and rounded to few bits differ by less than a step, and by no constant."""
    scales = (1e-3, 1e-2, 1.0, 10.0)
    weights = {f"layers.{seed}.up.weight": draw(32, 48, seed=seed, scale=scales[seed % 4]) for seed in range(24)}
    a = {name: weight.bfloat16() for name, weight in weights.items()}
    copies = {name: (weight.float() * 0.984).to(getattr(torch, dtype)) for name, weight in a.items()}
    assert "SYN315" not in find(tmp_path, a | BODY, copies | BODY)
