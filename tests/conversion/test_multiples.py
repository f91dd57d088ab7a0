"""Adapters that were merged several times, in several roundings, transposed, or into another module are named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from support import llama
from support.states import cast
from test_adapters import ALPHA, MODULES, RANK, codes, compare, make_adapter, merge

from syncheck.diagnose.measures import parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.llama import Weights

    import syncheck

NAMES = [f"{module}.weight" for module in MODULES]
SQUARE = [name for name in NAMES if "q_proj" in name]


def make_deltas(adapter: Weights) -> dict[str, Any]:
    """Return the product of each module, in float32."""
    deltas = {}
    for module in MODULES:
        factors = [adapter[f"base_model.model.{module}.lora_{x}.weight"] for x in "BA"]
        deltas[f"{module}.weight"] = (factors[0] @ factors[1]) * np.float32(ALPHA / RANK)
    return deltas


def list_parameters(report: syncheck.Report) -> dict[str, dict[str, Any]]:
    """Return the parameters of the relations of the tensors that differ."""
    return {diff.name: dict(parameters_of(diff)) for diff in report.groups[-1].tensors if diff.out_of_sync}


# By the factor that a tensor contains: ways to compute it with several roundings.
WAYS: dict[str, tuple[float, Callable[[Any, Any], Any]]] = {
    "twice": (2.0, lambda w, d: (w + d) + d),
    "three times": (3.0, lambda w, d: ((w + d) + d) + d),
    "from a difference": (0.5, lambda w, d: w + np.float32(0.5) * ((w + d) - w)),
    "subtracted twice": (-1.0, lambda w, d: ((w + d) - d) - d),
}


@pytest.mark.parametrize("way", WAYS)
def test_factors_with_several_roundings(tmp_path: Path, way: str) -> None:
    """Each rounding adds its error, which is larger than that of the result if terms cancel."""
    factor, compute = WAYS[way]
    model = llama.make_model()
    adapter = make_adapter(model)
    copy = model | {name: compute(model[name], delta) for name, delta in make_deltas(adapter).items()}
    report = compare(tmp_path, model, adapter, copy)
    assert codes(report) == {"SYN303": len(MODULES)}
    assert [found["factor"] for found in list_parameters(report).values()] == pytest.approx([factor] * 4, rel=1e-3)
    # The factor was fitted to the numbers.
    assert report.groups[-1].findings[0].certainty == "likely"


def test_the_product_of_another_layer(tmp_path: Path) -> None:
    """The adapters of two layers are exchanged, or one module of a layer has the product of the other layer."""
    model = llama.make_model()
    adapter = make_adapter(model)
    exchanged = {}
    for name, factor in adapter.items():
        other = name.replace("layers.0", "layers.x").replace("layers.1", "layers.0").replace("layers.x", "layers.1")
        exchanged[other] = factor
    copy = merge(model, exchanged)
    partners = dict(zip(NAMES, [*NAMES[2:], *NAMES[:2]], strict=True))
    report = compare(tmp_path / "1", model, adapter, copy)
    assert list_parameters(report) == {name: {"product": "other", "other": partners[name]} for name in NAMES}
    single = merge(model, adapter) | {NAMES[0]: copy[NAMES[0]]}
    assert list_parameters(compare(tmp_path / "2", model, adapter, single)).keys() == {NAMES[0]}


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_transposed_product(tmp_path: Path, factor: float) -> None:
    """A square weight gets the product in the other orientation, also from a difference that was rounded before."""
    model = llama.make_model()
    adapter = make_adapter(model)
    merged = merge(model, adapter)
    copy = dict(merged)
    for name in SQUARE:
        copy[name] = model[name] + np.float32(factor) * (merged[name] - model[name]).T
    found = list_parameters(compare(tmp_path, model, adapter, copy))
    assert found.keys() == set(SQUARE)
    for parameters in found.values():
        assert parameters["product"] == "transposed"
        assert parameters.get("factor", 1.0) == pytest.approx(factor, rel=1e-3)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_other_updates_are_no_product(tmp_path: Path, dtype: type) -> None:
    """Weights of another run, twice the product with noise, and the sum of two products are unexplained."""
    model = cast(llama.make_model(), dtype)
    adapter = make_adapter(model)
    wide = cast(model, np.float32)
    noise = np.random.default_rng(5).standard_normal((32, 32), np.float32)
    deltas = make_deltas(adapter)
    first, second = SQUARE
    for number, update in enumerate((noise, 2 * deltas[first] + 0.1 * noise, deltas[first] + deltas[second])):
        copy = cast({**merge(wide, adapter), first: wide[first] + update}, dtype)
        assert "SYN303" not in codes(compare(tmp_path / str(number), model, adapter, copy))
