"""Simulate quantizers, and count plausible scales: python -m benchmarks.quantization_scales.

Prints, for each share of the range of integers, how many correctly quantized matrices and how many matrices with wrong
scales are plausible. The shares in syncheck/conversion/scales.py accept all correct and no wrong matrices on even
seeds; odd seeds are the test.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from syncheck.conversion.scales import SHARES, are_plausible

ROWS, COLUMNS = 64, 256
SEEDS = 100
BLOCKS = {"tensor": (ROWS, COLUMNS), "row": (1, COLUMNS), "block": (32, 32), "group": (1, 32)}
# Largest number, smallest number and least peak of 8-bit floats, as in syncheck/conversion/quantized.py.
FLOATS = {"float8_e4m3fn": (448.0, 2.0**-9, 2.0**-6), "float8_e5m2": (57344.0, 2.0**-16, 2.0**-14)}


def list_matrices(rng: np.random.Generator) -> list[Any]:
    """Return weights: normal, with rows of different sizes, with outliers, and with heavy tails."""
    normal = rng.standard_normal((ROWS, COLUMNS)) * 0.02
    rows = normal * np.exp(rng.standard_normal((ROWS, 1)))
    outliers = normal * np.where(rng.random((1, COLUMNS)) < 0.01, 20, 1)
    dead = normal * (rng.random((ROWS, 1)) > 0.1)
    return [normal, rows, outliers, dead, rng.standard_t(3, (ROWS, COLUMNS)) * 0.02]


def find_peaks(matrix: Any, block: tuple[int, int]) -> Any:
    """Return the largest magnitude of each block."""
    rows, columns = (size // length for size, length in zip(matrix.shape, block, strict=True))
    return np.abs(matrix).reshape(rows, block[0], columns, block[1]).max((1, 3))


def list_scales(peaks: Any, top: float, rng: np.random.Generator) -> dict[str, Any]:
    """Return the scales of quantizers by name; the scale of zeros is 1.

    Quantizers that clip (by percentiles or the mean square error) are no candidates: they exceed half a step. Matrices
    of one layer, whose sizes have a ratio of exp(0.6 z), share a scale of 8 bits if a server fuses them.
    """
    exact = np.where(peaks, peaks, top) / top
    # Scales of 4 and 2 bits belong to groups of one matrix.
    spread = 0.6 * (top > 7)
    fused = np.where(peaks, exact * np.exp(np.abs(rng.standard_normal()) * spread), 1.0)
    return {
        "largest value": exact,
        "powers of two": 2.0 ** np.ceil(np.log2(exact)),
        "full range": exact * top / (top + 0.5),
        "clamped": np.maximum(exact, 1e-7),
        "fused matrices": fused,
    }


def list_wrong_scales(peaks: Any, top: float, bottom: float, rng: np.random.Generator) -> dict[str, Any]:
    """Return scales with which every value of a block is within half a step of 0, and uninitialized scales.

    bottom: the smallest number above 0.
    """
    exact = np.where(peaks, peaks, top) / top
    # The block with the largest value, so that its error is no rounding of small values.
    index = np.unravel_index(int(np.argmax(peaks)), peaks.shape)
    single = exact.copy()
    single[index] = 2.5 * peaks[index] / bottom
    memory = rng.integers(0, 2**32, exact.shape, np.uint32).view(np.float32).astype(np.float64)
    return {
        "too large": 2.5 * exact * top / bottom,
        "huge": np.full_like(exact, 1e30),
        "one block": single,
        "infinite": np.full_like(exact, np.inf),
        "not a number": np.full_like(exact, np.nan),
        "negative": -exact,
        "zero": np.zeros_like(exact),
        "random memory": np.abs(memory) + 1e6,
    }


def count(bits: int, share: float, seeds: range) -> dict[str, tuple[int, int]]:
    """Return how many matrices are plausible, and how many there are, by quantizer."""
    top = 2 ** (bits - 1) - 1
    # Formats with fewer bits have a scale for each row or group of 32 columns.
    blocks = {8: list(BLOCKS)}.get(bits, ["row", "group"])
    return count_numbers(float(top), 1.0, share * top, seeds, blocks)


def count_numbers(
    top: float, bottom: float, least: float, seeds: range, blocks: list[str]
) -> dict[str, tuple[int, int]]:
    """Count like `count`, for numbers between bottom and top. least: the least plausible peak. blocks: of `BLOCKS`."""
    counts: dict[str, tuple[int, int]] = {}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        for matrix in list_matrices(rng):
            for name in blocks:
                peaks = find_peaks(matrix, BLOCKS[name])
                right, wrong = list_scales(peaks, top, rng), list_wrong_scales(peaks, top, bottom, rng)
                for kind, rows in (("right", right), ("wrong", wrong)):
                    for scheme, scales in rows.items():
                        accepted, total = counts.get(f"{kind}: {scheme}", (0, 0))
                        plausible = are_plausible(peaks, scales, least)
                        counts[f"{kind}: {scheme}"] = accepted + plausible, total + 1
    return counts


def print_counts(title: str, counts: dict[str, tuple[int, int]]) -> None:
    """Print one line for each kind, with the schemes that are not all right."""
    for kind in ("right", "wrong"):
        accepted, total, exceptions = 0, 0, []
        for name, (plausible, matrices) in counts.items():
            if not name.startswith(kind):
                continue
            accepted, total = accepted + plausible, total + matrices
            # Correct scales should all be plausible, and wrong scales never.
            expected = {"right": matrices, "wrong": 0}[kind]
            if plausible != expected:
                exceptions.append(f"{name}: {plausible} of {matrices}")
        print(f"{title:24} {kind}: {accepted:6} of {total:6} plausible {'; '.join(exceptions)}")


def main() -> None:
    """Choose on even seeds, and test on odd seeds."""
    for bits in SHARES:
        for share in (1 / 2, 1 / 4, 1 / 8, 1 / 16):
            print_counts(f"{bits} bits, share 1/{1 / share:.0f}", count(bits, share, range(0, SEEDS, 2)))
    for bits, share in SHARES.items():
        print_counts(f"test: {bits} bits", count(bits, share, range(1, SEEDS, 2)))
    for dtype, limits in FLOATS.items():
        print_counts(f"test: {dtype}", count_numbers(*limits, range(1, SEEDS, 2), list(BLOCKS)))


if __name__ == "__main__":
    main()
