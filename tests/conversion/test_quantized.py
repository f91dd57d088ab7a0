"""Quantized copies: within half a step for each scheme, and wrong scales are a difference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from support import llama
from support.listings import find_texts, list_codes, list_fields, list_names

import syncheck
from syncheck.conversion.scales import are_plausible
from syncheck.diagnose.model_remainder import Unexplained
from syncheck.options import DiffOptions

if TYPE_CHECKING:
    from pathlib import Path

    Pair = tuple[Any, Any]

ROWS, COLUMNS = 160, 256
NAME = "mlp.down_proj.weight"


def per_tensor(w: Any) -> Pair:
    """One scale for the tensor."""
    scale = np.abs(w).max() / 127
    return np.rint(w / scale).astype(np.int8), np.array([scale], np.float32)


def per_row(w: Any) -> Pair:
    """One scale for each row, in bfloat16."""
    scale = (np.abs(w).max(1, keepdims=True) / 127).astype(ml_dtypes.bfloat16)
    return np.rint(w / scale.astype(np.float32)).clip(-128, 127).astype(np.int8), scale


def fp8(w: Any) -> Pair:
    """8-bit floats with one scale for each row."""
    scale = (np.abs(w).max(1) / 448).astype(np.float32)
    return (w / scale[:, None]).astype(ml_dtypes.float8_e4m3fn), scale


def in_blocks(w: Any) -> Pair:
    """8-bit floats with one scale for each block of 128 x 128; the last block of rows is shorter."""
    scale = np.zeros((2, 2), np.float32)
    stored_values = np.zeros(w.shape, ml_dtypes.float8_e4m3fn)
    for i in range(2):
        for j in range(2):
            block = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            scale[i, j] = np.abs(w[block]).max() / 448
            stored_values[block] = (w[block] / scale[i, j]).astype(ml_dtypes.float8_e4m3fn)
    return stored_values, scale


def quantize(name: str, w: Any) -> dict[str, Any]:
    """Return the stored tensors of a scheme."""
    if name == "int4":
        scale = (np.abs(w.reshape(ROWS, -1, 32)).max(2) / 7).astype(np.float32)
        numbers = np.rint(w.reshape(ROWS, -1, 32) / scale[:, :, None]).clip(-8, 7).reshape(w.shape) + 8
        packed = np.zeros((ROWS, COLUMNS // 8), np.uint32)
        for i in range(8):
            packed |= numbers[:, i::8].astype(np.uint32) << np.uint32(4 * i)
        shape = np.array(w.shape, np.int64)
        return {f"{NAME}_packed": packed.view(np.int32), f"{NAME}_scale": scale, f"{NAME}_shape": shape}
    stored_values, scale = {"tensor": per_tensor, "row": per_row, "fp8": fp8, "blocks": in_blocks}[name](w)
    return {NAME: stored_values, f"{NAME}_scale_inv" if name == "blocks" else f"{NAME}_scale": scale}


def compare(tmp_path: Path, copy: dict[str, Any]) -> dict[str, Any]:
    """Return the relation of the weight, by the code of the finding."""
    rng = np.random.default_rng(0)
    norm = rng.standard_normal(8, np.float32)
    model = {NAME: rng.standard_normal((ROWS, COLUMNS), np.float32), "norm.weight": norm}
    report = syncheck.diff(
        llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", {"norm.weight": norm, **copy})
    )
    tensors = dict(list_fields(report.groups[-1].tensors, "name", "evidence"))
    return {f.code: tensors[f.tensors[0]] for f in report.groups[-1].findings}


def weight() -> Any:
    """Return the original weight."""
    rng = np.random.default_rng(0)
    rng.standard_normal(8, np.float32)
    return rng.standard_normal((ROWS, COLUMNS), np.float32)


@pytest.mark.parametrize("name", ["tensor", "row", "fp8", "blocks", "int4"])
def test_schemes(tmp_path: Path, name: str) -> None:
    """Each scheme is named, and the largest difference is at most half a step."""
    findings = compare(tmp_path, quantize(name, weight()))
    assert findings.keys() == {"SYN308"}
    assert 0.3 < findings["SYN308"].relation.parameters["steps"] <= 0.51


@pytest.mark.parametrize("name", ["tensor", "row", "fp8", "blocks", "int4"])
def test_wrong_scales(tmp_path: Path, name: str) -> None:
    """A scale that was not initialized, and exchanged scales."""
    for i, damage in enumerate((np.ones_like, lambda scale: np.roll(scale, 1, 0) * 2)):
        copy = quantize(name, weight())
        key = find_texts(copy, "_scale")[0]
        copy[key] = damage(copy[key]).astype(copy[key].dtype)
        assert "SYN308" not in compare(tmp_path / str(i), copy)


@pytest.mark.parametrize("name", ["row", "fp8"])
def test_scales_that_are_not_in_the_file(tmp_path: Path, name: str) -> None:
    """The scales are fitted to A, and the scheme says so."""
    copy = quantize(name, weight())
    findings = compare(tmp_path, {NAME: copy[NAME]})
    assert findings.keys() == {"SYN308"}
    assert "fitted" in findings["SYN308"].relation.parameters["scheme"]
    second = np.random.default_rng(5).integers(-128, 127, (ROWS, COLUMNS)).astype(np.int8)
    assert "SYN308" not in compare(tmp_path / "2", {NAME: second})


@pytest.mark.parametrize("shape", [(3, 0), (0, 3)])
def test_integers_without_elements_have_no_scales(tmp_path: Path, shape: tuple[int, int]) -> None:
    """A matrix without rows or columns is a difference of dtypes, and no scales are fitted to it."""
    common = {"norm.weight": np.ones(8, np.float32)}
    a = llama.write(tmp_path / "a", {NAME: np.zeros(shape, np.float32), **common})
    b = llama.write(tmp_path / "b", {NAME: np.zeros(shape, np.int8), **common})
    report = syncheck.diff(a, b)
    assert list_names(report.groups[-1].tensors) == [NAME]
    assert "SYN308" not in list_codes(report.groups[-1].findings)


def test_two_quantized_models_are_compared_as_stored(tmp_path: Path) -> None:
    """A changed scale of activations, and a scale and weight that changed together."""
    stored_values = quantize("row", weight())
    model = {**stored_values, "mlp.down_proj.input_scale": np.ones(1, np.float32)}
    a = llama.write(tmp_path / "a", model)
    assert syncheck.diff(a, llama.write(tmp_path / "same", model)).exit_code == 0
    for i, name in enumerate(("mlp.down_proj.input_scale", f"{NAME}_scale")):
        changed = {**model, name: model[name] * 2}
        report = syncheck.diff(a, llama.write(tmp_path / str(i), changed))
        assert list_names(report.groups[-1].tensors) == [name]


def test_tensors_beside_a_quantized_weight_are_reported(tmp_path: Path) -> None:
    """A scale of activations is no part of the weight: B has a tensor that A lacks."""
    findings = compare(tmp_path, {**quantize("row", weight()), "mlp.down_proj.input_scale": np.ones(1, np.float32)})
    assert findings.keys() == {"SYN308", "SYN101"}


def accept(tmp_path: Path, number: int, copy: dict[str, Any]) -> int:
    """Return the exit code of a comparison that accepts quantization."""
    model = {NAME: weight()}
    a = llama.write(tmp_path / f"a{number}", model)
    b = llama.write(tmp_path / f"b{number}", copy)
    return syncheck.diff(a, b, options=DiffOptions(allow=("SYN308",))).exit_code


def test_implausible_scales_are_not_accepted(tmp_path: Path) -> None:
    """Scales that round values to zero or have no meaning, for all rows or for one, are never only a quantization."""
    stored_values, scales = per_row(weight())
    zeros, row = np.zeros_like(stored_values), stored_values.copy()
    row[7] = 0
    first = scales.copy()
    first[7] = 1e30
    copies = [(-stored_values, -scales), (row, first)]
    for number in (1e30, np.inf, np.nan, 0, 2.5 * np.abs(weight()).max()):
        copies += [(stored_values, np.full_like(scales, number)), (zeros, np.full_like(scales, number))]
    for i, (integers, factors) in enumerate(copies):
        assert accept(tmp_path, i, {NAME: integers, f"{NAME}_scale": factors}) == 1, i


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scheme", [per_tensor, per_row, fp8, in_blocks])
def test_scales_that_are_not_finite_are_named(tmp_path: Path, number: float, scheme: Any) -> None:
    """The values with such a scale are NaN or infinite in one model, so neither weight nor scales are missing."""
    numbers, scales = scheme(weight())
    scales = np.asarray(scales, np.float32)
    scales.flat[0] = number
    a = llama.write(tmp_path / "a", {NAME: weight()})
    b = llama.write(tmp_path / "b", {NAME: numbers, f"{NAME}_scale": scales})
    for paths in ((a, b), (b, a)):
        (finding,) = syncheck.diff(*paths, options=DiffOptions(allow=("SYN308",))).groups[0].findings
        assert (finding.code, finding.tensors) == ("SYN399", (NAME,))
        assert Unexplained.NOT_FINITE in list_codes(finding.facts)


def test_plausible_scales_are_accepted(tmp_path: Path) -> None:
    """Powers of two, one scale for the matrix, and any small scale for a row of zeros."""
    _, scales = per_row(weight())
    power = 2.0 ** np.ceil(np.log2(scales.astype(np.float32)))
    copies = [(np.rint(weight() / power).astype(np.int8), power.astype(np.float32)), per_tensor(weight())]
    for i, (integers, factors) in enumerate(copies):
        assert accept(tmp_path, i, {NAME: integers, f"{NAME}_scale": factors}) == 0, i
    peaks = np.array([[1.0], [0.0], [1e-9]])
    for scale in (1.0, 1e-12):
        assert are_plausible(peaks, np.array([[1 / 127], [scale], [1 / 127]]), 127 / 8)
    assert not are_plausible(peaks, np.array([[1 / 127], [1e30], [1 / 127]]), 127 / 8)
