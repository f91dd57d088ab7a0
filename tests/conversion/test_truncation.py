"""A conversion that cuts off bits is told from one that rounds, if the bytes prove it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import syncheck
from syncheck.diagnose.model_values import Cast
from syncheck.options import DiffOptions

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Report


def truncate(tensor: Any, bits: int) -> Any:
    """Return a float32 without its last bits."""
    words = tensor.view(torch.int32)
    return ((words >> bits) << bits).view(torch.float32)


def diff(tmp_path: Path, a: Any, b: Any, options: DiffOptions | None = None) -> Report:
    """Return the report of two models with one weight each."""
    for name, tensor in (("a", a), ("b", b)):
        torch.save({"fc.weight": tensor, "head.weight": torch.ones(4)}, tmp_path / f"{name}.pth")
    return syncheck.diff(str(tmp_path / "a.pth"), str(tmp_path / "b.pth"), options=options)


def draw() -> Any:
    """Return a matrix with tiny, large, infinite and negative numbers."""
    weight = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    weight[0] *= 1e-39
    weight[1] *= 1e37
    weight[2, :3] = torch.tensor([float("inf"), -float("inf"), -0.0])
    return weight


# The bits that a float32 loses, and the dtype of the copy.
TRUNCATIONS = [
    (16, torch.bfloat16, "bfloat16"),
    # The copy keeps the dtype of the original.
    (16, torch.float32, "bfloat16"),
    (13, torch.float16, "float16"),
]


@pytest.mark.parametrize(("bits", "dtype", "name"), TRUNCATIONS)
def test_truncation(tmp_path: Path, bits: int, dtype: Any, name: str) -> None:
    """A truncated weight is SYN307 with its own statement, cause and fix, from either side."""
    weight = draw() if bits == 16 else torch.rand(32, 16) - 0.5
    # Numbers below the smallest normal number of float16 keep fewer bits.
    weight = weight if bits == 16 else torch.where(weight.abs() < 0.01, 0.25, weight)
    truncated = truncate(weight, bits).to(dtype)
    for side, pair in (("B", (weight, truncated)), ("A", (truncated, weight))):
        (finding,) = diff(tmp_path, *pair).findings
        (fact,) = finding.facts
        assert (finding.code, finding.certainty, fact.code) == ("SYN307", "proved", Cast.TRUNCATED)
        assert (fact.parameters["side"], fact.parameters["dtype"]) == (side, name)
        assert (finding.cause.code, finding.fix.code) == (Cast.CAUSE_TRUNCATED, Cast.FIX_TRUNCATED)


def test_float64(tmp_path: Path) -> None:
    """A float64 that was cut off to a float32."""
    weight = torch.randn(32, 16, dtype=torch.float64)
    rounded = weight.float()
    next_smaller = torch.nextafter(rounded, torch.zeros(()))
    truncated = torch.where(rounded.double().abs() > weight.abs(), next_smaller, rounded)
    (finding,) = diff(tmp_path, weight, truncated).findings
    assert finding.facts[0].code == Cast.TRUNCATED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_is_no_truncation(tmp_path: Path, dtype: Any) -> None:
    """A rounded weight is stated as a conversion, and one that is neither has no relation."""
    weight = draw()
    rounded = weight.bfloat16().to(dtype)
    (finding,) = diff(tmp_path, weight, rounded).findings
    assert (finding.code, finding.facts[0].code) == ("SYN307", Cast.CAST)
    mixed = truncate(weight, 16).to(dtype)
    mixed[16:] = rounded[16:]
    (finding,) = diff(tmp_path, weight, mixed).findings
    assert finding.code in {"SYN102", "SYN399"}


def test_cast_does_not_accept_truncation(tmp_path: Path) -> None:
    """The option accepts the conversion of torch only."""
    weight = draw()
    options = DiffOptions(cast="bfloat16")
    report = diff(tmp_path, weight, truncate(weight, 16).bfloat16(), options)
    assert report.exit_code == 1
    assert [finding.code for finding in report.findings] == ["SYN307"]
    assert diff(tmp_path, weight, weight.bfloat16(), options).exit_code == 0


def test_rounded_and_truncated_tensors(tmp_path: Path) -> None:
    """Tensors of both kinds have a statement each; the fix is that of truncation."""
    weight = draw()
    paths = []
    for name, rounded, truncated in (("a", weight, weight), ("b", weight.bfloat16(), truncate(weight, 16).bfloat16())):
        paths.append(str(tmp_path / f"{name}.pth"))
        torch.save({"up.weight": rounded, "down.weight": truncated}, paths[-1])
    (finding,) = syncheck.diff(*paths).findings
    assert [fact.code for fact in finding.facts] == [Cast.CAST, Cast.TRUNCATED]
    assert (finding.cause.code, finding.fix.code) == (Cast.CAUSE, Cast.FIX_TRUNCATED)
