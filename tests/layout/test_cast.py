"""`--cast`: differences of exactly one conversion are accepted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import find_all, list_fields, list_names

import syncheck

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from pathlib import Path

BF16 = syncheck.DiffOptions(cast="bfloat16")


def states() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a model in float32 and its copy in bfloat16, with a norm that stays in float32 and a counter."""
    torch.manual_seed(0)
    model = {"w": torch.randn(300, 400), "norm": torch.ones(5), "big": torch.tensor([3.4e38, -0.0, float("inf")])}
    copy = {name: tensor.to(torch.bfloat16) for name, tensor in model.items()}
    return {**model, "count": torch.tensor(3)}, {**copy, "norm": model["norm"], "count": torch.tensor(3)}


@pytest.mark.parametrize("again", [None, torch.float32, torch.float64])
def test_one_conversion_is_close(tmp_path: Path, again: Any) -> None:
    """A copy in bfloat16, or converted back, is accepted with --cast only."""
    model, copy = states()
    if again is not None:
        copy = {name: t.to(again) if t.dtype == torch.bfloat16 else t for name, t in copy.items()}
    torch.save(model, tmp_path / "a.pth")
    torch.save(copy, tmp_path / "b.pth")
    assert syncheck.diff(tmp_path / "a.pth", tmp_path / "b.pth").exit_code == 1
    report = syncheck.diff(tmp_path / "a.pth", tmp_path / "b.pth", options=BF16)
    assert (report.exit_code, report.counts.close, report.counts.identical) == (0, 2, 2)
    assert set(list_fields(report.groups[-1].tensors, "tolerance")) == {"cast bfloat16"}
    assert [diff.mismatched is None for diff in report.groups[-1].tensors] == [again is not torch.float32] * 2


@pytest.mark.parametrize("fault", ["one step", "truncated", "integer"])
def test_any_other_difference_is_out_of_sync(tmp_path: Path, fault: str) -> None:
    """One bfloat16 step more, a conversion that truncates, and other integers are not accepted."""
    model, copy = states()
    if fault == "one step":
        copy["w"].view(torch.int16)[7, 9] += 1
    elif fault == "truncated":
        copy["w"] = (model["w"].view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    else:
        copy["count"] = torch.tensor(4)
    torch.save(model, tmp_path / "a.pth")
    torch.save(copy, tmp_path / "b.pth")
    report = syncheck.diff(tmp_path / "a.pth", tmp_path / "b.pth", options=BF16)
    name = "count" if fault == "integer" else "w"
    assert report.exit_code == 1
    assert list_names(find_all(report.groups[-1].tensors, out_of_sync=True)) == [name]


@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("cast", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_conversions_of_torch_are_accepted(tmp_path: Path, source: str, cast: str) -> None:
    """Numbers of every magnitude, converted by torch to each dtype and to B's dtype, are close."""
    torch.manual_seed(0)
    most = {"float8_e4m3fn": 400, "float16": 6e4, "float8_e5m2": 5e4}.get(cast, 1e5)
    numbers = (torch.randn(1 << 18).double() * torch.logspace(-9, 6, 1 << 18).double()).clamp(-most, most)
    a = torch.cat([numbers, torch.randn(1 << 18).double()]).to(getattr(torch, source))
    torch.save({"w": a}, tmp_path / "a.pth")
    for b in {cast, "float32"}:
        torch.save({"w": a.to(getattr(torch, cast)).to(getattr(torch, b))}, tmp_path / "b.pth")
        options = syncheck.DiffOptions(cast=cast)
        assert syncheck.diff(tmp_path / "a.pth", tmp_path / "b.pth", options=options).verdict == "in_sync"


@pytest.mark.parametrize("cast", ["float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_numbers_beyond_the_range_are_out_of_sync(tmp_path: Path, source: str, cast: str) -> None:
    """A number that becomes infinite, or the largest one, is no conversion; infinity itself is."""
    # float8_e4m3fn has no infinity, and NaN has several forms in float8_e5m2.
    numbers = {"float16": [math.inf, math.nan], "float8_e5m2": [math.inf], "float8_e4m3fn": [math.nan]}
    for number in (1e5, *numbers[cast]):
        model = torch.tensor([number, 1.1]).to(getattr(torch, source))
        torch.save({"w": model}, tmp_path / "a.pth")
        torch.save({"w": model.to(getattr(torch, cast))}, tmp_path / "b.pth")
        options = syncheck.DiffOptions(cast=cast)
        report = syncheck.diff(tmp_path / "a.pth", tmp_path / "b.pth", options=options)
        assert report.exit_code == (1 if number == 1e5 else 0)


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("cast", ["float32", "float64", "float16"])
def test_a_second_rounding_is_out_of_sync(tmp_path: Path, stored: str, cast: str) -> None:
    """Only one conversion is accepted: the dtype of B must hold the numbers of the other dtype."""
    model = torch.randn(8, 8)
    torch.save({"w": model}, tmp_path / "a.pth")
    torch.save({"w": model.to(getattr(torch, stored))}, tmp_path / "b.pth")
    report = syncheck.diff(tmp_path / "a.pth", tmp_path / "b.pth", options=syncheck.DiffOptions(cast=cast))
    assert report.exit_code == (0 if stored == cast else 1)


def test_shards_are_converted(tmp_path: Path) -> None:
    """The conversion applies to tensors in several files, and to tensors larger than a block."""
    import numpy as np
    from support.dtensors import save_ranks

    complete = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    (tmp_path / "ranks").mkdir()
    save_ranks(tmp_path / "ranks", {0: complete[:4], 1: complete[4:]}, ["S(0)"], [2])
    torch.save({"w": torch.from_numpy(complete).half()}, tmp_path / "half.pth")
    options = syncheck.DiffOptions(cast="float16")
    assert syncheck.diff(tmp_path / "ranks", tmp_path / "half.pth", options=options).exit_code == 0
    assert syncheck.diff(tmp_path / "ranks", tmp_path / "half.pth", options=BF16).exit_code == 1
