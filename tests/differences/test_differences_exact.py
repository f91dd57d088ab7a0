"""Every number equals the one that float64 arithmetic on each element gives, however the work is cut and shortened."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import save_header, save_safetensors

import syncheck
from syncheck.differences.measurement import measure_differences
from syncheck.kernel import blocks, shares
from syncheck.kernel.blocks import BLOCK, Files
from syncheck.tolerance import Tolerance

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.differences.statistics import Statistics

    Array = np.ndarray[Any, Any]

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def dtype_of(name: str) -> Any:
    """Return a numpy dtype by name, those of ml_dtypes too."""
    return np.dtype(getattr(ml_dtypes, name, name))


def measured(folder: Path, arrays: list[Array], *, jobs: int = 1, majority: bool = False, **tolerance: Any) -> Any:
    """Write replicas and measure them."""
    tensors = []
    for i, array in enumerate(arrays):
        path = save_safetensors(folder / f"rank{i}.safetensors", {"w": array})
        tensors.append(syncheck.read(str(path)).tensors["w"])
    with Files(jobs=jobs) as files:
        return measure_differences(tensors, files, Tolerance(**tolerance), majority=majority)


def steps(array: Array) -> Array:
    """Place floats on a line of Python integers by counting their bit patterns."""
    width = array.itemsize * 8
    bits = array.view(f"uint{width}").astype(object)
    half = 1 << (width - 1)
    return np.array([b if b < half else half - b for b in bits], object)


def directly(arrays: list[Array], majority: bool) -> dict[str, Any]:
    """Compute what `measure` should find, element by element, from finite floats."""
    wide = [array.astype(np.float64) for array in arrays]
    place = [steps(array) for array in arrays]
    differs = np.logical_or.reduce([other != wide[0] for other in wide[1:]])
    every = range(len(arrays))
    pairs = [(0, i) for i in every[1:]] if majority else [(i, j) for i in every for j in every if i < j]
    gaps = np.max([np.abs(wide[i] - wide[j]) for i, j in pairs], axis=0)
    with np.errstate(all="ignore"):
        relative = [np.abs(wide[i] - wide[j]) / np.maximum(np.abs(wide[i]), np.abs(wide[j])) for i, j in pairs]
        if not majority:  # of the two that lie farthest apart in each element
            low, high = np.min(wide, axis=0), np.max(wide, axis=0)
            relative = [(high - low) / np.maximum(np.abs(low), np.abs(high))]
    where = np.flatnonzero(differs)
    return {
        "mismatched": where.size,
        "beyond": where.size,
        "max_abs": gaps.max(),
        "max_rel": np.nanmax(relative),
        "max_ulp": max(max(np.abs(place[i] - place[j])) for i, j in pairs),
        "worst": int(np.argmax(gaps)),
        "first": where[0],
        "last": where[-1],
    }


def agree(found: Statistics, expected: dict[str, Any]) -> None:
    """Fail where a number is another one than computed directly."""
    assert {name: getattr(found, name) for name in expected} == expected


def values(random: np.random.Generator, dtype: Any, size: int) -> Array:
    """Return finite floats of both signs over the whole range of the dtype, with zeros of both signs among them."""
    bits = random.integers(0, 1 << 32, (size, 2), dtype=np.uint32).view(np.uint64)[:, 0]
    found = bits.astype(f"uint{dtype.itemsize * 8}").view(dtype)
    with np.errstate(invalid="ignore"):
        found = np.where(np.isfinite(found), found, np.zeros(1, dtype))
    if dtype == np.float64:  # gaps that overflow have a test of their own
        found = found * 0.25
    return found.astype(dtype)


@pytest.mark.parametrize("majority", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.3, 0.001])
@pytest.mark.parametrize("name", FLOATS)
def test_every_number_of_random_floats(
    tmp_path: Path, name: str, share: float, majority: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random floats of any size, of which all, some or few differ, in more than one block: each number is exact."""
    random = np.random.default_rng([len(name), int(share * 1000), majority])
    dtype = dtype_of(name)
    size = 20_000
    monkeypatch.setattr(blocks, "BLOCK", 1 << 13)
    first = values(random, dtype, size)
    arrays = [first] + [np.where(random.random(size) < share, values(random, dtype, size), first) for _ in range(2)]
    agree(measured(tmp_path, arrays, majority=majority), directly(arrays, majority))


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16"])
def test_replicas_that_are_nearly_equal(tmp_path: Path, name: str) -> None:
    """Gaps that float32 cannot tell apart are still ordered as float64 orders them."""
    random = np.random.default_rng(5)
    first = (random.random(BLOCK // 4 + 1000) + 1).astype(dtype_of(name))
    second = (first.astype(np.float64) * (1 + 1e-6 * random.random(first.size))).astype(first.dtype)
    third = (first.astype(np.float64) - 1.0 - 1e-9 * random.random(first.size)).astype(first.dtype)
    for arrays in ([first, second], [first, third], [first, second, third]):
        if not all((array == first).all() for array in arrays[1:]):
            agree(measured(tmp_path, arrays), directly(arrays, majority=False))


def test_relative_gaps_that_float32_orders_wrongly(tmp_path: Path) -> None:
    """Of two elements the one with the greater relative gap counts, though in float32 it is the smaller one."""
    random = np.random.default_rng(0)
    a, near = random.random((2, 100_000), np.float32) + np.float32(1)
    b = -near / a
    rounded = np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))
    exact = np.abs(a.astype(np.float64) - b) / np.maximum(np.abs(a), np.abs(b))
    order = np.argsort(exact)
    wrong = np.flatnonzero(np.diff(rounded[order]) < 0)
    assert wrong.size > 100
    for i in wrong[:20]:
        both = order[[i, i + 1]]
        agree(measured(tmp_path, [a[both], b[both]]), directly([a[both], b[both]], majority=False))


def test_float_without_a_sign(tmp_path: Path) -> None:
    """float8_e8m0fnu holds powers of two and no sign: its steps are those of the exponent, over the whole range."""
    for first, second, expected in (
        ([0, 127, 3], [254, 129, 3], (254, 2.0**127, 1.0, 2)),
        ([127, 3], [129, 3], (2, 3.0, 0.75, 1)),
    ):
        entry = {"dtype": "F8_E8M0", "shape": [len(first)], "data_offsets": [0, len(first)]}
        for i, bits in enumerate((first, second)):
            save_header(tmp_path / f"rank{i}.safetensors", {"w": entry}, bytes(bits))
        (diff,) = syncheck.compare(tmp_path).groups[0].tensors
        assert (diff.max_ulp, diff.max_abs, diff.max_rel, diff.mismatched) == expected


def test_gap_too_large_for_float32(tmp_path: Path) -> None:
    """The gap of two finite float32 may be no float32: it is computed in float64."""
    top = np.finfo(np.float32).max
    arrays = [np.array([1, top, 2], np.float32), np.array([-1, -top / 2, 3], np.float32)]
    found = measured(tmp_path, arrays)
    assert (found.max_abs, found.max_rel, found.worst) == (1.5 * float(top), 2.0, 1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8"])
def test_zeros_beside_a_difference_hide_no_relative_gap(tmp_path: Path, dtype: str) -> None:
    """Where two of three replicas hold 0, 0/0 must not stand for the relative gap of the others."""
    arrays = [np.array(x, dtype) for x in ([0, 8, 1], [0, 6, 1], [5, 8, 1])]
    found = measured(tmp_path, arrays, majority=True)
    assert (found.max_rel, found.max_abs, found.worst) == (1.0, 5, 0)
    assert measured(tmp_path, [arrays[0], arrays[1], np.array([0, 4, 1], dtype)], majority=True).max_rel == 0.5


@pytest.mark.parametrize("name", ["float32", "int32", "complex64"])
def test_threads_change_no_number(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One, two or three threads give the same numbers, the place of the worst of equal gaps included."""
    monkeypatch.setattr(shares, "LARGE", 1)
    random = np.random.default_rng(1)
    first = random.integers(-50, 50, BLOCK).astype(name)
    second, third = first.copy(), first.copy()
    second[[5, BLOCK // 2 + 3, BLOCK - 1]] += 7
    third[BLOCK // 3 : BLOCK // 3 * 2] -= 7
    if name != "int32":
        third[BLOCK - 9] = np.nan
    for arrays in ([first, second], [first, second, third]):
        one, *others = (asdict(measured(tmp_path, arrays, jobs=jobs, rtol=0.1, atol=0.0)) for jobs in (1, 2, 3))
        assert one["mismatched"] > 0
        assert others == [one, one]
