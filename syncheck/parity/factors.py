"""Match a factor to the sizes of a run: data-parallel, accumulation, tensor-parallel and context-parallel sizes."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Products of more sizes match any factor by chance.
_MOST_SIZES = 3
_MOST_MATCHES = 4


def match_factor(
    factor: float, sizes: Mapping[str, float], counts: Mapping[str, float], tolerance: float = 1e-3
) -> tuple[str, ...]:
    """Return the products and quotients of sizes that equal a factor, in ascending order of their numbers of sizes.

    sizes: of the mesh and of the accumulation, by name; sizes of 1 are ignored. counts: of terms and samples, which are
    used only if the sizes alone have no match. tolerance: relative. At most four matches: several sizes may explain a
    factor, and the user must see all simple explanations. Empty without a match.
    """
    return _match(factor, sizes, tolerance) or _match(factor, {**sizes, **counts}, tolerance)


def _match(factor: float, sizes: Mapping[str, float], tolerance: float) -> tuple[str, ...]:
    names = [name for name, size in sizes.items() if size != 1]
    matches: list[tuple[int, str]] = []
    for exponents in product((0, 1, -1), repeat=len(names)):
        used = [(name, exponent) for name, exponent in zip(names, exponents, strict=True) if exponent]
        value = 1.0
        for name, exponent in used:
            value *= float(sizes[name]) ** exponent
        # The empty product is no explanation.
        if 0 < len(used) <= _MOST_SIZES and abs(factor - value) <= tolerance * value:
            matches.append((len(used), _write(used, sizes)))
    matches.sort()
    # Beside a simple product, one of three sizes is a coincidence.
    if matches and matches[0][0] < _MOST_SIZES:
        matches = [match for match in matches if match[0] < _MOST_SIZES]
    return tuple(text for _, text in matches[:_MOST_MATCHES])


def _write(used: list[tuple[str, int]], sizes: Mapping[str, float]) -> str:
    """Write a product: 'dp (4) * accumulation (2)', or '1 / cp (2)'."""
    numerator: list[str] = []
    denominator: list[str] = []
    for name, exponent in used:
        # An exponent is 1 or -1.
        side = numerator if exponent > 0 else denominator
        side.append(f"{name} ({sizes[name]:g})")
    return " / ".join([" * ".join(numerator) or "1", *denominator])
