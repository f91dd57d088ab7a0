"""Scales of a quantized tensor that do not fit its numbers are named, with their block and their factor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import syncheck
from syncheck.diagnose.measures import parameters_of
from syncheck.options import DiffOptions

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAME = "layers.1.proj.weight"


def quantize_blocks(weight: Any) -> tuple[Any, Any]:
    """Return the 8-bit floats and the scale of each block of 16 x 16."""
    rows, columns = weight.shape
    scales = weight.float().view(rows // 16, 16, columns // 16, 16).abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
    return (weight.float() / spread).to(torch.float8_e4m3fn), scales


def quantize_rows(weight: Any) -> tuple[Any, Any]:
    """Return integers and the scale of each row."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scales).round().to(torch.int8), scales


def compare(folder: Path, quantize: Any, damage: Callable[[Any, Any], None], *, is_first: bool = True) -> Any:
    """Compare weights with their quantized copy, in which one tensor has another damage; return the report."""
    torch.manual_seed(0)
    model, copy = {"norm.weight": torch.ones(8)}, {"norm.weight": torch.ones(8)}
    for layer in range(3):
        name = f"layers.{layer}.proj.weight"
        model[name] = torch.randn(32, 64).bfloat16()
        numbers, scales = quantize(model[name])
        if name == NAME:
            damage(numbers, scales)
        copy |= {name: numbers, f"{name}_scale": scales}
    paths = folder / "a.pt", folder / "b.pt"
    for path, content in zip(paths, (model, copy), strict=True):
        torch.save(content, path)
    options = DiffOptions(allow=("SYN308",))
    return syncheck.diff(*(paths if is_first else paths[::-1]), options=options)


def scale(index: Any, factor: float) -> Callable[[Any, Any], None]:
    """Return the damage that multiplies scales."""

    def damage(_numbers: Any, scales: Any) -> None:
        scales[index] *= factor

    return damage


CASES = [
    (quantize_blocks, scale((1, 0), 2.0), 1, (1, 0), 2.0),
    (quantize_blocks, scale((0, 3), 0.25), 1, (0, 3), 0.25),
    (quantize_blocks, scale(slice(None), 448.0), 8, (0, 0), 448.0),
    (quantize_rows, scale((5, 0), 10.0), 1, (5, 0), 10.0),
    (quantize_rows, scale((slice(4, 6), 0), -1.0), 2, (4, 0), -1.0),
]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(("quantize", "damage", "wrong", "first", "factor"), CASES)
def test_wrong_scales(
    tmp_path: Path, quantize: Any, damage: Any, wrong: int, first: tuple[int, int], factor: float, is_first: bool
) -> None:
    """An accepted quantization does not accept them."""
    report = compare(tmp_path, quantize, damage, is_first=is_first)
    assert report.exit_code == 1
    (finding,) = [finding for finding in report.findings if finding.fails]
    assert (finding.code, finding.certainty, finding.tensors) == ("SYN316", "likely", (NAME,))
    (diff,) = [diff for diff in report.tensors if diff.name == NAME]
    parameters = parameters_of(diff)
    assert (parameters["wrong"], parameters["first"]) == (wrong, first)
    assert parameters["least"] == pytest.approx(factor, rel=0.02)
    assert parameters["most"] == pytest.approx(factor, rel=0.02)


def exchange_numbers(numbers: Any, _scales: Any) -> None:
    """Transpose the numbers of one block."""
    numbers[:16, :16] = numbers[:16, :16].float().t().to(numbers.dtype)


def set_numbers(numbers: Any, _scales: Any) -> None:
    """Set the numbers of one block to other numbers."""
    numbers[:16, :16] = (torch.randn(16, 16) * 90).to(numbers.dtype)


@pytest.mark.parametrize("quantize", [quantize_blocks, quantize_rows])
@pytest.mark.parametrize("damage", [exchange_numbers, set_numbers, scale((0, 0), 0.0), scale((0, 0), float("nan"))])
def test_other_damages_are_no_scales(tmp_path: Path, quantize: Any, damage: Any) -> None:
    """Numbers at wrong places, other numbers, and scales that hide the numbers."""
    report = compare(tmp_path, quantize, damage)
    assert report.exit_code == 1
    assert "SYN316" not in {finding.code for finding in report.findings if finding.fails}
