"""The numbers of a difference equal those of `exact`, computed with integers and fractions in all dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import compare_ranks
from support.exact import FORMATS, numbers

import syncheck
from syncheck.tensors import blocks
from syncheck.tensors.blocks import BLOCK

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import TensorDiff

    Array = np.ndarray[Any, Any]

NAN, INF = np.float32("nan"), np.float32("inf")
FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
TOP = {name: float(np.finfo(name).max) for name in ("float32", "float64")}


def array(dtype: str, *values: Any) -> Array:
    """Return a 1-d array of a dtype of numpy or ml_dtypes."""
    return np.array(values, getattr(ml_dtypes, dtype, dtype))


def from_bits(dtype: str, *bits: int) -> Array:
    """Return floats with the given bits."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return np.array(bits, f"uint{kind.itemsize * 8}").view(kind)


def compared(folder: Path, *arrays: Array, **options: Any) -> TensorDiff:
    """Compare replicas with one differing tensor each, and return the diff."""
    report = compare_ranks(folder, *({"w": array} for array in arrays), suffix=".safetensors", **options)
    return report.groups[0].tensors[0]


def check(folder: Path, *arrays: Array, **tolerance: Any) -> TensorDiff:
    """Compare replicas, assert that all numbers equal the direct computation, and return the diff."""
    diff, source_value = compared(folder, *arrays, **tolerance), FORMATS[arrays[0].dtype.name]
    bits = [array.reshape(-1).view(f"uint{source_value.width}").tolist() for array in arrays]
    expected = numbers(bits, source_value, tolerance=bool(tolerance))
    assert {frozenset(ranks) for ranks in diff.clusters} == expected.clusters
    assert (diff.minority, diff.mismatched, diff.extent) == (expected.minority, expected.mismatched, expected.extent)
    assert (diff.max_abs, diff.max_ulp, diff.nonfinite) == (expected.max_abs, expected.max_ulp, expected.nonfinite)
    assert diff.max_rel == (expected.max_rel and pytest.approx(expected.max_rel, rel=8e-16, abs=0))
    assert diff.index == (None if expected.index is None else np.unravel_index(expected.index, arrays[0].shape))
    return diff


def with_ones(*positions: int) -> tuple[Array, Array]:
    """Return 600 zeros, and a copy with 1 at the given positions."""
    second = np.zeros((30, 20), np.float32)
    second.reshape(-1)[list(positions)] = 1
    return np.zeros((30, 20), np.float32), second


ANY_TOLERANCE = {"rtol": 1.0, "atol": 1e30, "ulp": 2**31}
CASES: list[tuple[str, tuple[Array, ...], dict[str, Any]]] = [
    # Zeros of both signs, and NaNs with other bits.
    ("equal", (array("float32", 0.0, 1.0), array("float32", -0.0, 1.0)), {}),
    ("equal", (from_bits("float32", 0x7FC00000, 0), from_bits("float32", 0x7FC00001, 0)), {}),
    # NaN and infinity on one rank, which are outside any tolerance.
    ("different", (array("float32", 1, 2, 3, 4), array("float32", 1.5, NAN, 3, -INF)), {}),
    *(
        ("different", (array("float32", a), array("float32", b)), ANY_TOLERANCE)
        for a, b in ((1.0, NAN), (INF, -INF), (3e38, INF))
    ),
    # Integers over their whole range, and beyond 2**53. They are never close.
    *(
        ("different", (array(dtype, low), array(dtype, high)), {})
        for dtype, low, high in (
            ("int64", -(2**63), 2**62),
            ("uint64", 0, 2**64 - 1),
            ("int64", 2**53, 2**53 + 1),
            ("int8", -128, 127),
            ("bool", True, False),
        )
    ),
    ("different", (array("int64", 1000), array("int64", 1001)), {"rtol": 0.5, "atol": 10.0, "ulp": 5}),
    # Neighbours, also around zero and next to 1.0.
    *(
        ("different", (from_bits(dtype, a), from_bits(dtype, b)), {})
        for dtype in FLOATS
        for sign in [1 << (FORMATS[dtype].width - 1)]
        for one in [FORMATS[dtype].bias << FORMATS[dtype].mantissa]
        for a, b in ((one, one + 1), (one, one + 5), (1, sign | 1), (0, sign | 3))
    ),
    # Differences beyond the range of float32 or float64; the largest is capped, because JSON has no infinity.
    ("different", (array("float32", 1, TOP["float32"], 2), array("float32", -1, -TOP["float32"] / 2, 3)), {}),
    ("different", (array("float64", TOP["float64"]), array("float64", -TOP["float64"])), {}),
    # Complex numbers, by their parts.
    ("different", (array("complex64", 1 + 2j, 3j), array("complex64", 1 + 2.5j, 3j)), {}),
    # Zeros equal to the majority's, beside other differences: 0/0 hides no relative difference.
    *(
        ("different", tuple(array(dtype, *values) for values in ((0, 8, 1), (0, 8, 1), (0, 6, 1), last)), {})
        for dtype in ("float32", "float64", "int64", "uint8")
        for last in ((5, 8, 1), (0, 4, 1))
    ),
    # One element, a run in and across blocks, scattered elements, all elements.
    *(("different", with_ones(*at), {}) for at in ((3,), (3, 4, 5), range(120, 140), (3, 5), (0, 599), range(600))),
    # One element beyond a tolerance among close elements.
    ("close", (np.ones(600, np.float32), np.full(600, 1.000001, np.float32)), {"rtol": 1e-3, "atol": 0.0}),
    (
        "different",
        (np.ones(600, np.float32), np.append(np.full(599, 1.000001, np.float32), np.float32(2))),
        {"rtol": 1e-3, "atol": 0.0},
    ),
]


@pytest.mark.parametrize(("status", "arrays", "tolerance"), CASES)
def test_numbers(
    tmp_path: Path, status: str, arrays: tuple[Array, ...], tolerance: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status follows from the values of floats, integers and complex numbers, and all numbers are exact."""
    monkeypatch.setattr(blocks, "BLOCK", 1 << 9)
    assert check(tmp_path, *arrays, **tolerance).status == status
    if status == "equal":
        assert syncheck.compare(tmp_path).exit_code == 0


def test_equal_nans_are_identical(tmp_path: Path) -> None:
    """NaNs with equal bits are identical."""
    assert compare_ranks(tmp_path, *[{"w": array("float32", NAN, INF)}] * 2).counts.identical == 1


def random_values(random: np.random.Generator, dtype: np.dtype[Any]) -> Array:
    """Return finite numbers of both signs over the whole range of the dtype, with zeros of both signs among them."""
    bits = random.integers(0, 1 << 32, (600, 2), dtype=np.uint32).view(np.uint64)[:, 0]
    result = bits.astype(f"uint{dtype.itemsize * 8}").view(dtype)
    with np.errstate(invalid="ignore"):
        result = np.where(np.isfinite(result), result, np.zeros(1, dtype))
    return (result * 0.25).astype(dtype) if dtype == np.float64 else result  # CASES has the overflow


@pytest.mark.parametrize("majority", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.3, 0.005])
@pytest.mark.parametrize("name", [*FLOATS, "int32", "uint8"])
def test_numbers_of_random_replicas(
    tmp_path: Path, name: str, share: float, majority: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All numbers are exact if all, some or few elements of random replicas differ, in several blocks."""
    monkeypatch.setattr(blocks, "BLOCK", 1 << 8)
    random, dtype = np.random.default_rng([len(name), int(share * 1000), majority]), array(name).dtype
    first = random_values(random, dtype)
    remaining = [np.where(random.random(600) < share, random_values(random, dtype), first) for _ in range(2)]
    check(tmp_path, *(values.reshape(20, 30) for values in (first, *remaining, *([first] if majority else []))))


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16"])
def test_replicas_that_are_nearly_equal(tmp_path: Path, name: str) -> None:
    """Differences indistinguishable in float32 have the order of float64."""
    random = np.random.default_rng(5)
    first = (random.random(1500) + 1).astype(array(name).dtype)
    second = (first.astype(np.float64) * (1 + 1e-6 * random.random(first.size))).astype(first.dtype)
    third = (first.astype(np.float64) - 1.0 - 1e-9 * random.random(first.size)).astype(first.dtype)
    check(tmp_path / "third", first, third)
    if name != "bfloat16":  # the second rounds to the first
        check(tmp_path / "second", first, second)
        check(tmp_path / "all", first, second, third)


def test_relative_differences_that_float32_orders_wrongly(tmp_path: Path) -> None:
    """The larger of two relative differences counts, even if float32 reverses their order."""
    random = np.random.default_rng(0)
    a, close_case = random.random((2, 100_000), np.float32) + np.float32(1)
    b = -close_case / a
    rounded = np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))
    order = np.argsort(np.abs(a.astype(np.float64) - b) / np.maximum(np.abs(a), np.abs(b)))
    wrong = np.flatnonzero(np.diff(rounded[order]) < 0)
    assert wrong.size > 100
    for i in wrong[:20]:
        both = order[[i, i + 1]]
        check(tmp_path, a[both], b[both])


@pytest.mark.parametrize(("first", "second"), [([0, 127, 3], [254, 129, 3]), ([127, 3], [129, 3])])
def test_float_without_a_sign(tmp_path: Path, first: list[int], second: list[int]) -> None:
    """float8_e8m0fnu consists of powers of two without a sign: its steps are steps of the exponent."""
    check(tmp_path, from_bits("float8_e8m0fnu", *first), from_bits("float8_e8m0fnu", *second))


@pytest.mark.parametrize("name", ["float32", "int32", "complex64"])
def test_threads_change_no_number(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers, and the index among equal differences, do not depend on the number of threads."""
    monkeypatch.setattr(blocks, "LARGE", 1)
    first = np.random.default_rng(1).integers(-50, 50, BLOCK).astype(name)
    second, third = first.copy(), first.copy()
    second[[5, BLOCK // 2 + 3, BLOCK - 1]] += 7
    third[BLOCK // 3 : BLOCK // 3 * 2] -= 7
    if name != "int32":
        third[BLOCK - 9] = np.nan
    for arrays in ([first, second], [first, second, third]):
        single, *remaining = (compared(tmp_path, *arrays, jobs=jobs, rtol=0.1, atol=0.0) for jobs in (1, 2, 3))
        assert single.mismatched
        assert remaining == [single, single]


def test_differences_within_the_tolerance_are_close(tmp_path: Path) -> None:
    """Within rtol and atol, or ulp, the status is `close`, beyond it `different`; the tolerance is recorded."""
    a, b = array("float32", 100.0, 1.0), array("float32", 100.5, 1.0)
    close = compared(tmp_path, a, b, rtol=0.005, atol=0.0)
    assert (close.status, close.tolerance) == ("close", "rtol=0.005 atol=0")
    assert compared(tmp_path, a, b, rtol=0.0049, atol=0.0).status == "different"
    assert compared(tmp_path, a, b, rtol=0.0, atol=0.5).status == "close"
    close_case = np.nextafter(np.nextafter(a, b), b)
    assert compared(tmp_path, a, close_case, ulp=2).status == "close"
    assert compared(tmp_path, a, close_case, ulp=1).status == "different"
