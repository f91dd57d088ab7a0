"""Compute the differences of replicas from the definitions of the formats, with Python integers and fractions only.

Differential tests compare `syncheck` with this module, which uses neither numpy nor code of `syncheck`. A replica is a
list of the bit patterns of its elements in C order; a complex number is two patterns.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import chain, combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    Bits = Sequence[int]


@dataclass(frozen=True)
class Format:
    """The meaning of the bits of one number. width: in bits. exponent, mantissa: bits of each, 0 for integers.

    special: "ieee" has infinities and NaNs at the highest exponent. "fn" has a NaN only if all bits of exponent and
    mantissa are set. "fnuz" has one NaN, in place of -0.0. "scale" is an exponent alone: no sign, no zero, and a NaN if
    all bits are set.
    """

    width: int
    exponent: int = 0
    mantissa: int = 0
    bias: int = 0
    special: str = "ieee"
    signed: bool = False
    parts: int = 1


FORMATS = {
    "float64": Format(64, 11, 52, 1023),
    "float32": Format(32, 8, 23, 127),
    "float16": Format(16, 5, 10, 15),
    "bfloat16": Format(16, 8, 7, 127),
    # Micikevicius et al. 2022, FP8 formats for deep learning; fnuz: Noune et al. 2022, 8-bit numerical formats.
    "float8_e5m2": Format(8, 5, 2, 15),
    "float8_e4m3fn": Format(8, 4, 3, 7, "fn"),
    "float8_e4m3fnuz": Format(8, 4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": Format(8, 5, 2, 16, "fnuz"),
    "float8_e8m0fnu": Format(8, 8, 0, 127, "scale"),  # OCP Microscaling Formats 1.0, 5.4.1
    "complex64": Format(32, 8, 23, 127, parts=2),
    "complex128": Format(64, 11, 52, 1023, parts=2),
    **{f"int{width}": Format(width, signed=True) for width in (8, 16, 32, 64)},
    **{f"uint{width}": Format(width) for width in (8, 16, 32, 64)},
    "bool": Format(8),
}


@lru_cache(maxsize=100_000)
def value(bits: int, of: Format) -> Fraction | str:
    """Return the number of a bit pattern, or "nan", "inf" or "-inf"."""
    negative = bits >> (of.width - 1)
    if not of.exponent:
        return Fraction(bits - (1 << of.width) if of.signed and negative else bits)
    if of.special == "scale":
        return "nan" if bits == (1 << of.width) - 1 else Fraction(2) ** (bits - of.bias)
    magnitude = bits & ((1 << (of.width - 1)) - 1)
    exponent, mantissa = divmod(magnitude, 1 << of.mantissa)
    top = (1 << of.exponent) - 1
    if of.special == "ieee" and exponent == top:
        return "nan" if mantissa else ("-inf" if negative else "inf")
    if of.special == "fn" and magnitude == (1 << (of.width - 1)) - 1:
        return "nan"
    if of.special == "fnuz" and negative and not magnitude:
        return "nan"
    number = Fraction(mantissa) if not exponent else Fraction(mantissa + (1 << of.mantissa))
    number *= Fraction(2) ** (max(exponent, 1) - of.bias - of.mantissa)
    return -number if negative else number


def steps(bits: int, of: Format) -> int:
    """Return the position of a finite float in ascending order, with both zeros at 0."""
    if of.special == "scale":
        return bits
    magnitude = bits & ((1 << (of.width - 1)) - 1)
    return -magnitude if bits >> (of.width - 1) else magnitude


def rounded(number: Fraction) -> float:
    """Round to the nearest float64; larger numbers become the largest float64."""
    try:
        return float(number)
    except OverflowError:
        return sys.float_info.max


@dataclass
class Numbers:
    """The expected numbers of one tensor in a report; fields as in `syncheck`'s records."""

    clusters: set[frozenset[int]]
    minority: tuple[int, ...]
    mismatched: int
    max_abs: float | int | None
    max_rel: float | None
    max_ulp: int | None
    index: int | None
    nonfinite: dict[int, int]
    extent: str | None
    gaps: list[tuple[Fraction, Fraction, int]]
    """For each measured pair of unequal finite numbers: difference, greater magnitude, steps between the numbers."""
    hopeless: bool
    """Whether an element is not finite on one replica and has another value on another replica."""


def clusters_of(replicas: Sequence[Bits]) -> list[list[int]]:
    """Group replicas with equal bits, the largest group first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, bits in enumerate(replicas):
        groups.setdefault(tuple(bits), []).append(rank)
    return sorted(groups.values(), key=lambda ranks: -len(ranks))


def numbers(replicas: Sequence[Bits], of: Format, *, tolerance: bool = False) -> Numbers:
    """Compute all numbers of one tensor. replicas: by rank, at least two, not all equal.

    tolerance: whether a tolerance is set. If so, `gaps` includes all pairs of replicas, and the numbers are for the
    lowest and highest value of each element.
    """
    sets = clusters_of(replicas)
    majority = len(sets[0]) > len(sets[1])
    representatives = [replicas[ranks[0]] for ranks in sets]
    positions: dict[int, None] = {}
    outlier: list[int] = []
    worst: tuple[Fraction, int] | None = None
    gaps: list[tuple[Fraction, Fraction, int]] = []
    every: list[tuple[Fraction, Fraction, int]] = []
    for position, patterns in enumerate(zip(*representatives, strict=True)):
        if patterns == (patterns[0],) * len(patterns):
            continue
        elements = [(value(bits, of), steps(bits, of)) for bits in patterns]
        if len({number for number, _ in elements}) == 1:
            continue
        positions[position // of.parts] = None
        finite = [(number, step) for number, step in elements if isinstance(number, Fraction)]
        if len(finite) < len(elements):
            outlier.append(position // of.parts)
            continue
        pairs = [(min(finite), max(finite))]
        if majority and not tolerance:
            pairs = [(finite[0], second) for second in finite[1:]]
        if tolerance:
            every += [(abs(a - b), max(abs(a), abs(b)), abs(m - n)) for (a, m), (b, n) in combinations(finite, 2)]
        for (a, low), (b, high) in pairs:
            gaps.append((abs(a - b), max(abs(a), abs(b)), abs(high - low)))
            gap = abs(a - b) if not of.exponent else Fraction(rounded(abs(a - b)))
            if worst is None or gap > worst[0]:
                worst = gap, position // of.parts
    indices = sorted(positions)
    return Numbers(
        clusters={frozenset(ranks) for ranks in sets},
        minority=tuple(sorted(chain.from_iterable(sets[1:]))) if majority else (),
        mismatched=len(indices),
        max_abs=None if worst is None else int(worst[0]) if not of.exponent else float(worst[0]),
        max_rel=max((float(gap / scale) for gap, scale, _ in gaps if gap), default=None if worst is None else 0.0),
        max_ulp=max((ulp for _, _, ulp in gaps), default=None) if of.exponent else None,
        index=outlier[0] if outlier else worst[1] if worst else None,
        nonfinite={rank: _nonfinite(bits, of) for rank, bits in enumerate(replicas)},
        extent=_extent(indices, len(representatives[0]) // of.parts),
        gaps=[gap for gap in every if gap[0]] if tolerance else gaps,
        hopeless=bool(outlier),
    )


def _nonfinite(bits: Bits, of: Format) -> int:
    outlier = {pattern for pattern in set(bits) if isinstance(value(pattern, of), str)}
    return len({position // of.parts for position, pattern in enumerate(bits) if pattern in outlier}) if outlier else 0


def _extent(indices: list[int], numel: int) -> str | None:
    if not indices:
        return None
    if len(indices) == numel:
        return "all"
    if len(indices) == 1:
        return "one"
    return "contiguous" if indices[-1] - indices[0] + 1 == len(indices) else "scattered"


def is_close(numbers: Numbers, of: Format, rtol: float | None, atol: float | None, ulp: int | None) -> bool | None:
    """Return whether all differences are within a tolerance; None if this depends on the rounding of the limit."""
    if not of.exponent or numbers.hopeless:
        return False
    verdicts: list[bool | None] = []
    for gap, scale, step in numbers.gaps:
        close_case: bool | None = ulp is not None and step <= ulp
        if not close_case and rtol is not None and atol is not None:
            limit = Fraction(atol) + Fraction(rtol) * scale
            # Relative to the limit, but at least one step of float64, which has no smaller numbers.
            rounding = max(limit * Fraction(1, 10**14), Fraction(1, 2**1074))
            close_case = None if abs(gap - limit) <= rounding else gap <= limit
        verdicts.append(close_case)
    return False if False in verdicts else None if None in verdicts else True
