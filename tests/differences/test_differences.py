"""By how much: every number equals one computed directly, in every dtype, without overflow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import save_safetensors

import syncheck

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import TensorDiff

NAN, INF = np.float32("nan"), np.float32("inf")


def compared(folder: Path, *arrays: Any, **options: Any) -> TensorDiff:
    """Compare replicas with one tensor each that are not identical, and return the answer."""
    for i, array in enumerate(arrays):
        save_safetensors(folder / f"rank{i}.safetensors", {"w": np.asarray(array)})
    (group,) = syncheck.compare(folder, options=syncheck.Options(**options)).groups
    (diff,) = group.tensors
    return diff


def floats(*values: Any, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Return a 1-d array."""
    return np.array(values, dtype)


def test_zeros_of_both_signs_are_equal(tmp_path: Path) -> None:
    """0.0 and -0.0 have different bits and equal values: the status is `equal`, not `identical`."""
    diff = compared(tmp_path, floats(0.0, 1.0), floats(-0.0, 1.0))
    assert (diff.status, diff.mismatched, diff.extent) == ("equal", 0, None)
    assert syncheck.compare(tmp_path).exit_code == 0


def test_nan_of_another_payload_is_equal(tmp_path: Path) -> None:
    """NaNs with different payloads are equal."""
    a, b = np.array([0x7FC00000, 0], np.uint32).view(np.float32), np.array([0x7FC00001, 0], np.uint32).view(np.float32)
    diff = compared(tmp_path, a, b)
    assert (diff.status, diff.nonfinite) == ("equal", {0: 1, 1: 1})


def test_equal_nans_are_identical(tmp_path: Path) -> None:
    """NaNs with equal bits are identical."""
    for i in range(2):
        save_safetensors(tmp_path / f"rank{i}.safetensors", {"w": floats(NAN, INF)})
    assert syncheck.compare(tmp_path).counts.identical == 1


def test_nonfinite_on_one_side(tmp_path: Path) -> None:
    """A NaN or infinity on one side is a difference, counted by rank; finite differences are measured, too."""
    diff = compared(tmp_path, floats(1, 2, 3, 4), floats(1.5, NAN, 3, -INF))
    assert diff.status == "different"
    assert diff.nonfinite == {0: 0, 1: 2}
    assert (diff.mismatched, diff.max_abs, diff.index) == (3, 0.5, (1,))


def test_no_tolerance_excuses_a_nonfinite_element(tmp_path: Path) -> None:
    """NaN against a number, and +inf against -inf, differ at any tolerance."""
    for a, b in ((1.0, NAN), (INF, -INF), (3e38, INF)):
        assert compared(tmp_path, floats(a), floats(b), rtol=1.0, atol=1e30, ulp=2**31).status == "different"


def test_integers_do_not_overflow_or_round(tmp_path: Path) -> None:
    """Differences of integers are exact over the whole range, also beyond 2^53."""
    low, high = -(2**63), 2**62
    assert compared(tmp_path, floats(low, dtype=np.int64), floats(high, dtype=np.int64)).max_abs == 2**62 + 2**63
    assert compared(tmp_path, floats(0, dtype=np.uint64), floats(2**64 - 1, dtype=np.uint64)).max_abs == 2**64 - 1
    near = compared(tmp_path, floats(2**53, dtype=np.int64), floats(2**53 + 1, dtype=np.int64))
    assert (near.status, near.max_abs) == ("different", 1)
    assert compared(tmp_path, floats(-128, dtype=np.int8), floats(127, dtype=np.int8)).max_abs == 255
    assert compared(tmp_path, floats(True, dtype=bool), floats(False, dtype=bool)).max_abs == 1


def test_integers_are_never_close(tmp_path: Path) -> None:
    """Tolerances apply to floats only: a counter that differs by 1 is different."""
    diff = compared(tmp_path, floats(1000, dtype=np.int64), floats(1001, dtype=np.int64), rtol=0.5, atol=10.0, ulp=5)
    assert diff.status == "different"


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_ulp_are_steps_of_the_dtype(tmp_path: Path, name: str) -> None:
    """Neighbours differ by one ULP in every float dtype, also around zero; both zeros are equal."""
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    bits = np.dtype(f"uint{dtype.itemsize * 8}")
    sign = 1 << (dtype.itemsize * 8 - 1)
    one = int(np.array([1], dtype).view(bits)[0])
    for a, b, steps in ((one, one + 1, 1), (one, one + 5, 5), (1, sign | 1, 2), (0, sign | 3, 3)):
        left, right = (np.array([value], bits).view(dtype) for value in (a, b))
        assert compared(tmp_path, left, right).max_ulp == steps


def test_bf16_value(tmp_path: Path) -> None:
    """bfloat16 is measured in its own values."""
    diff = compared(tmp_path, floats(1.0, 2.0, dtype=ml_dtypes.bfloat16), floats(1.5, 2.0, dtype=ml_dtypes.bfloat16))
    assert (diff.dtype, diff.max_abs, diff.index, diff.max_rel) == ("bfloat16", 0.5, (0,), 0.5 / 1.5)


def test_gaps_of_finite_numbers_may_not_become_infinite(tmp_path: Path) -> None:
    """The largest possible difference is capped, because JSON has no infinity."""
    top = np.finfo(np.float64).max
    diff = compared(tmp_path, floats(top, dtype=np.float64), floats(-top, dtype=np.float64))
    assert (diff.max_abs, diff.max_rel) == (top, 2.0)


def test_complex_is_measured_by_its_parts(tmp_path: Path) -> None:
    """A different imaginary part counts as one element, with the difference of this part."""
    diff = compared(tmp_path, floats(1 + 2j, 3j, dtype=np.complex64), floats(1 + 2.5j, 3j, dtype=np.complex64))
    assert (diff.mismatched, diff.max_abs, diff.index, diff.numel) == (1, 0.5, (0,), 2)


@pytest.mark.parametrize(
    "positions, extent",
    [([3], "one"), ([3, 4, 5], "contiguous"), ([3, 5], "scattered"), (range(12), "all"), ([0, 11], "scattered")],
)
def test_extent(tmp_path: Path, positions: Any, extent: str) -> None:
    """The extent is one element, a contiguous range, all elements, or scattered elements."""
    a, b = np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float32)
    b.reshape(-1)[list(positions)] = 1
    diff = compared(tmp_path, a, b)
    assert (diff.extent, diff.mismatched) == (extent, len(positions))


def test_contiguous_over_a_block_boundary(tmp_path: Path) -> None:
    """A contiguous range may cross a block boundary."""
    a, b = np.zeros(600_000, np.float32), np.zeros(600_000, np.float32)
    b[262_140:262_150] = 1
    assert compared(tmp_path, a, b).extent == "contiguous"
    b[599_999] = 1
    assert compared(tmp_path, a, b).extent == "scattered"


def test_differences_within_the_tolerance_are_close(tmp_path: Path) -> None:
    """Within rtol and atol, or ulp, the status is `close`, beyond it `different`; the tolerance is recorded."""
    a, b = floats(100.0, 1.0), floats(100.5, 1.0)
    close = compared(tmp_path, a, b, rtol=0.005, atol=0.0)
    assert (close.status, close.tolerance) == ("close", "rtol=0.005 atol=0")
    assert compared(tmp_path, a, b, rtol=0.0049, atol=0.0).status == "different"
    assert compared(tmp_path, a, b, rtol=0.0, atol=0.5).status == "close"
    near = np.nextafter(np.nextafter(a, b), b)
    assert compared(tmp_path, a, near, ulp=2).status == "close"
    assert compared(tmp_path, a, near, ulp=1).status == "different"


def test_one_element_beyond_the_tolerance_is_enough(tmp_path: Path) -> None:
    """One element beyond the tolerance among a million close elements is a difference."""
    a = np.ones(300_000, np.float32)
    b = a + np.float32(1e-6)
    b[-1] = 2
    diff = compared(tmp_path, a, b, rtol=1e-3, atol=0.0)
    assert (diff.status, diff.mismatched, diff.index) == ("different", 300_000, (299_999,))


@pytest.mark.parametrize(
    "options",
    [{"rtol": 0.1}, {"atol": 0.1}, {"rtol": 2.0, "atol": 0.0}, {"rtol": 0.1, "atol": -1.0}, {"ulp": -1}],
    ids=repr,
)
def test_invalid_tolerances(tmp_path: Path, options: dict[str, Any]) -> None:
    """One of rtol and atol alone, a negative value, or one that passes everything is a usage error."""
    with pytest.raises(syncheck.UsageError):
        compared(tmp_path, floats(1), floats(2), **options)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8])
@pytest.mark.parametrize("seed", range(3))
def test_numbers_equal_a_direct_computation(tmp_path: Path, dtype: Any, seed: int) -> None:
    """All numbers of random replicas equal a computation in Python, element by element."""
    rng = np.random.default_rng(seed)
    # Only gaps that are not tied: then the place of the worst is one.
    a = (rng.standard_normal((6, 7)) * 50 + 60).astype(dtype)
    b = np.where(rng.random((6, 7)) < 0.5, a, (rng.standard_normal((6, 7)) * 50 + 60).astype(dtype)).astype(dtype)
    diff = compared(tmp_path, a, b)
    pairs = [(float(x), float(y)) for x, y in zip(a.reshape(-1), b.reshape(-1), strict=True)]
    gaps = [abs(x - y) for x, y in pairs]
    assert diff.mismatched == sum(x != y for x, y in pairs)
    assert diff.max_abs == max(gaps)
    assert diff.max_rel == pytest.approx(
        max(g / max(abs(x), abs(y)) for g, (x, y) in zip(gaps, pairs, strict=True) if g)
    )
    assert diff.index is not None
    assert gaps[diff.index[0] * 7 + diff.index[1]] == max(gaps)
