"""A merge is proven element by element: NaN and infinity count, and bounds follow from the dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
from support import llama
from support.listings import find_all, list_codes, list_names
from support.states import cast
from test_adapters import ALPHA, MODULES, RANK, codes, compare, make_adapter, merge, to_bfloat16

import syncheck
from syncheck.diagnose.statements import Common
from syncheck.options import DiffOptions

if TYPE_CHECKING:
    from pathlib import Path

    from support.llama import Weights

NAME = f"{MODULES[0]}.weight"
FACTOR = f"base_model.model.{MODULES[0]}.lora_B.weight"


def change(weights: Weights, name: str, value: float, index: tuple[int, int] = (3, 4)) -> Weights:
    """Return the weights with another element."""
    changed = weights[name].copy()
    changed[index] = value
    return {**weights, name: changed}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements(tmp_path: Path, value: float) -> None:
    """An infinity or a NaN of the base or of the adapter must be in B, and no other one may be there."""
    model = llama.make_model()
    adapter = make_adapter(model)
    merged = merge(model, adapter)
    assert compare(tmp_path / "1", model, adapter, change(merged, NAME, value)).exit_code == 1
    base = change(model, NAME, value)
    with np.errstate(all="ignore"):
        assert compare(tmp_path / "2", base, adapter, merge(base, adapter)).exit_code == 0
        assert compare(tmp_path / "3", base, adapter, merged).exit_code == 1
        assert compare(tmp_path / "4", base, adapter, change(merged, NAME, np.finfo(np.float32).max)).exit_code == 1
        factor = change(adapter, FACTOR, value, (5, 1))
        assert compare(tmp_path / "5", model, factor, merge(model, factor)).exit_code == 0
        assert compare(tmp_path / "6", model, factor, merged).exit_code == 1
        assert codes(compare(tmp_path / "7", model, factor, model)) == {"SYN303": len(MODULES)}


def test_overflow_to_infinity(tmp_path: Path) -> None:
    """A sum beyond the range of the dtype is infinite in B."""
    model = cast(llama.make_model(), np.float16)
    model = change(model, NAME, 65504)
    adapter = make_adapter(model)
    adapter[FACTOR] = np.abs(adapter[FACTOR]) * 1000
    first = FACTOR.replace("lora_B", "lora_A")
    adapter[first] = np.abs(adapter[first])
    wide = cast(model, np.float32)
    with np.errstate(all="ignore"):
        merged = cast(merge(wide, adapter), np.float16)
    assert np.isinf(merged[NAME][3, 4])
    assert compare(tmp_path / "1", model, adapter, merged).exit_code == 0
    assert compare(tmp_path / "2", model, adapter, change(merged, NAME, 65504)).exit_code == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_product_of_zeros_allows_no_rounding(tmp_path: Path, dtype: type) -> None:
    """With lora_B as it was initialized, the merge is the base model, bit by bit."""
    model = cast(llama.make_model(), dtype)
    adapter = {name: w * ("lora_A" in name) for name, w in make_adapter(model).items()}
    assert compare(tmp_path / "1", model, adapter, model).counts.close == 0
    bits = model[NAME].copy()
    bits.view(f"uint{8 * bits.itemsize}")[2, 3] ^= 1
    assert compare(tmp_path / "2", model, adapter, {**model, NAME: bits}).exit_code == 1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_small_numbers_and_other_dtypes(tmp_path: Path, dtype: type, size: float) -> None:
    """Subnormal numbers are rounded by more than a relative bound; a merge with 0.98 of the product is not close."""
    model = {name: (w * size).astype(dtype) for name, w in llama.make_model().items()}
    wide = cast(model, np.float32)
    adapter = {name: w * np.float32(size if "lora_B" in name else 1) for name, w in make_adapter(model).items()}
    for folder, factor in (("1", 1.0), ("2", 0.98)):
        merged = cast(merge(wide, adapter, factor * ALPHA / RANK), dtype)
        assert compare(tmp_path / folder, model, adapter, merged).exit_code == (factor != 1)


def test_an_adapter_in_another_dtype(tmp_path: Path) -> None:
    """PEFT rounds the product of a bfloat16 adapter to bfloat16 before it adds the product to float32 weights."""
    model = llama.make_model()
    adapter = to_bfloat16(make_adapter(model))
    wide = cast(adapter, np.float32)
    merged = dict(model)
    for module in MODULES:
        prefix = f"base_model.model.{module}"
        product = (wide[f"{prefix}.lora_B.weight"] @ wide[f"{prefix}.lora_A.weight"]) * np.float32(ALPHA / RANK)
        rounded = product.astype(ml_dtypes.bfloat16).astype(np.float32)
        merged[f"{module}.weight"] = model[f"{module}.weight"] + rounded
    assert compare(tmp_path / "1", model, adapter, merged).exit_code == 0
    assert compare(tmp_path / "2", model, adapter, merge(model, wide)).exit_code == 0
    assert compare(tmp_path / "3", model, adapter, merge(model, wide, 1.05 * ALPHA / RANK)).exit_code == 1


@pytest.mark.parametrize("rounded", ["base", "result", "both"])
def test_cast(tmp_path: Path, rounded: str) -> None:
    """--cast accepts a merge in the other dtype, and a merge that was converted; nothing else, and not without it."""
    model = llama.make_model()
    adapter = {name: w * np.float32(0.1 if "lora_B" in name else 1) for name, w in make_adapter(model).items()}
    wide = cast(to_bfloat16(model), np.float32)
    merged = to_bfloat16(merge(model if rounded == "result" else wide, adapter))
    if rounded == "base":  # a wider copy of the values
        merged = cast(merged, np.float32)
    report = compare(tmp_path, model, adapter, merged)
    assert report.exit_code == 1
    sides = [tmp_path / "base", tmp_path / "adapter"], tmp_path / "b"
    assert syncheck.diff(*sides, options=DiffOptions(cast="bfloat16")).exit_code == 0
    assert syncheck.diff(sides[1], sides[0], options=DiffOptions(cast="float16")).exit_code == 1
    assert syncheck.diff(*sides, options=DiffOptions(cast="float16")).exit_code == 1
    for folder, wrong in (("1", merge(wide, adapter, 0.9 * ALPHA / RANK)), ("2", wide)):
        compare(tmp_path / folder, model, adapter, to_bfloat16(wrong))
        sides = [tmp_path / folder / "base", tmp_path / folder / "adapter"], tmp_path / folder / "b"
        assert syncheck.diff(*sides, options=DiffOptions(cast="bfloat16")).exit_code == 1


def test_a_source_that_was_merged_before_the_cast(tmp_path: Path) -> None:
    """A: a merged model in float32. B: the base model in bfloat16, with the adapter."""
    model = to_bfloat16(llama.make_model())
    adapter = make_adapter(model)
    merged = merge(cast(model, np.float32), adapter)
    compare(tmp_path, model, adapter, merged)
    sides = tmp_path / "b", [tmp_path / "base", tmp_path / "adapter"]
    assert syncheck.diff(*sides).exit_code == 1
    assert syncheck.diff(*sides, options=DiffOptions(cast="bfloat16")).exit_code == 0


def test_rounding_that_hides_the_product(tmp_path: Path) -> None:
    """Terms that cancel leave a product of rounding errors, which proves nothing: undecided, never close."""
    model = llama.make_model()
    adapter = make_adapter(model)
    first = FACTOR.replace("lora_B", "lora_A")
    adapter[FACTOR] = np.tile(np.float32([1e15, -1e15, 0, 0]), (len(adapter[FACTOR]), 1))
    adapter[first] = np.ones_like(adapter[first])
    report = compare(tmp_path, model, adapter, {**merge(model, adapter), NAME: model[NAME] * 5})
    assert report.verdict == "undecided"
    assert list_names(find_all(report.groups[-1].tensors, uncompared=True)) == [NAME]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_causes_ignore_no_nonfinite_element(tmp_path: Path, value: float) -> None:
    """A tensor with NaN is not "scaled", and a tensor of NaN is not "constant 0"."""
    model = llama.make_model()
    base = llama.write(tmp_path / "a", model)
    scaled = {**model, NAME: model[NAME] * 2}
    assert codes(syncheck.diff(base, llama.write(tmp_path / "1", scaled))) == {"SYN312": 1}
    for folder, b in (("2", change(scaled, NAME, value)), ("3", {**model, NAME: np.full_like(model[NAME], value)})):
        found_codes = codes(syncheck.diff(base, llama.write(tmp_path / folder, b)))
        assert (sum(found_codes.values()), {"SYN311", "SYN312"} & found_codes.keys()) == (1, set())


def test_infinity_precedes_the_largest_number(tmp_path: Path) -> None:
    """A finding states the element that is infinite in one model, and not the largest finite difference."""
    model = llama.make_model()
    wrong = change({**model, NAME: model[NAME] + 1e-3}, NAME, np.inf)
    report = syncheck.diff(llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", wrong))
    (finding,) = report.groups[-1].findings
    (diff,) = find_all(report.groups[-1].tensors, out_of_sync=True)
    sizes = [fact.parameters["size"] for fact in finding.facts if "size" in fact.parameters]
    assert list_codes(sizes) == [Common.NOT_FINITE_IN]
    assert sizes[0].parameters["element"] == f"{NAME}[{', '.join(map(str, diff.index))}]"


ROUNDED_TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def export_neighbours(folder: Path, dtype: str, *, flips: int = 0) -> syncheck.Report:
    """Compare a merge with its export in a smaller dtype, two elements of which fell on the neighbouring number.

    flips: the bits to change in a further element, which hardly has a product.
    """
    model = llama.make_model()
    adapter = make_adapter(model)
    merged = merge(model, adapter)
    delta = np.abs(merged[NAME] - model[NAME])
    # From sums with hardly a product to sums of terms that cancel, whose rounding is larger than a step.
    order = np.argsort((delta / np.abs(merged[NAME])).reshape(-1))
    exported = cast(merged, ROUNDED_TYPES[dtype])
    words = exported[NAME].reshape(-1).view(np.uint16)
    words[order[-2:]] += 1
    words[order[0]] ^= flips
    return compare(folder, model, adapter, exported)


@pytest.mark.parametrize("dtype", ROUNDED_TYPES)
def test_neighbours_in_an_export_are_no_flips(tmp_path: Path, dtype: str) -> None:
    """Without --cast, elements within the rounding of a merge are part of the conversion, as they are with it."""
    report = export_neighbours(tmp_path, dtype)
    assert codes(report) == {"SYN307": len(llama.make_model())}
    sides = [tmp_path / "base", tmp_path / "adapter"], tmp_path / "b"
    assert codes(syncheck.diff(*sides[::-1])) == {"SYN307": len(llama.make_model())}
    assert syncheck.diff(*sides, options=DiffOptions(cast=dtype)).exit_code == 0


@pytest.mark.parametrize("flips", [1 << 13, 1 << 3, 1 << 15])
@pytest.mark.parametrize("dtype", ROUNDED_TYPES)
def test_a_flip_in_an_export_of_a_merge(tmp_path: Path, dtype: str, flips: int) -> None:
    """A bit beyond the rounding of the merge is found beside neighbours that are within it, with and without --cast."""
    report = export_neighbours(tmp_path, dtype, flips=flips)
    assert codes(report) == {"SYN307": len(llama.make_model()) - 1, "SYN220": 1}
    (damaged,) = [finding for finding in report.groups[-1].findings if finding.code == "SYN220"]
    assert damaged.tensors == (NAME,)
    sides = [tmp_path / "base", tmp_path / "adapter"], tmp_path / "b"
    assert codes(syncheck.diff(*sides[::-1])) == codes(report)
    assert codes(syncheck.diff(*sides, options=DiffOptions(cast=dtype))) == {"SYN220": 1}


def test_a_rounded_merge_in_a_wider_copy(tmp_path: Path) -> None:
    """A merge in bfloat16 that was stored as float32 is a conversion; one with another scale is none to any dtype."""
    model = llama.make_model()
    adapter = make_adapter(model)
    rounded = to_bfloat16(merge(cast(to_bfloat16(model), np.float32), adapter))
    assert codes(compare(tmp_path / "1", model, adapter, cast(rounded, np.float32))) == {"SYN307": len(model)}
    wrong = compare(tmp_path / "2", model, adapter, merge(model, adapter, 0.95 * ALPHA / RANK))
    assert codes(wrong) == {"SYN303": len(MODULES)}
    # These sums are hardly more than the product, so the bounds in bfloat16 are wider than the error of the scale.
    small = {name: weight * np.float32(1e-7) for name, weight in model.items()}
    wrong = compare(tmp_path / "3", small, adapter, merge(small, adapter, 0.999 * ALPHA / RANK))
    assert codes(wrong).keys().isdisjoint({"SYN307"})
    assert wrong.exit_code == 1
