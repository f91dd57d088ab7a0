"""What a check measures: owners of terms, and the weights of their gradients in each rank's copy of a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

# The units whose weights are refined.
Level = Literal["sample", "token"]
# Weights that are compared with each other or with whole numbers.
CLOSE = 1e-3
UNKNOWN = float("nan")
# A weight is known if errors below the threshold change it by less than this.
CLEAR = 0.01


@dataclass(frozen=True, slots=True)
class Owner:
    """The terms that one data rank computes in one micro-batch.

    terms: their number.
    samples: of the terms.
    share_of_count: part of the divisor, if the case counts other amounts than terms.
    """

    rank: int
    micro_batch: int
    terms: int
    samples: tuple[int, ...]
    share_of_count: float | None = None

    @property
    def amount(self) -> float:
        """The part of the divisor that the terms contribute."""
        return self.terms if self.share_of_count is None else self.share_of_count


@dataclass(frozen=True, slots=True)
class Solution:
    """A rank's copy of a gradient as a combination of the owners' gradients.

    weights: by owner, NaN if the copy does not determine it.
    residual: relative norm of the part that no weights explain, for each unit of the largest weight above 1.
    error: relative distance to the definition.
    doubt: the largest error of a weight.
    assumed: whether one factor for all owners was assumed, because the tensor has too few elements.
    size: relative norm of the definition.
    not_finite: number of elements of the copy that are NaN or infinite.
    missing: whether the rank has no gradient.
    frozen: whether the program freezes the parameter on the rank.
    """

    weights: tuple[float, ...]
    residual: float
    error: float
    doubt: float
    assumed: bool = False
    size: float = 0.0
    not_finite: int = 0
    missing: bool = False
    frozen: bool = False

    @property
    def is_determined(self) -> bool:
        """Whether any weight is known."""
        return not all(map(math.isnan, self.weights))

    @property
    def is_complete(self) -> bool:
        """Whether all weights are known."""
        return not any(map(math.isnan, self.weights))


@dataclass(frozen=True, slots=True)
class Partial:
    """The sum of the ranks' copies along some mesh dimensions is `factor` times the definition; no copy itself is."""

    dimensions: tuple[str, ...]
    factor: float


@dataclass(slots=True)
class TensorWeights:
    """The solutions of one tensor by rank.

    boxes: the runs that each rank holds. placements: of a DTensor on its first rank. partial: see `Partial`.
    max_error: largest absolute error of an element. differing: elements with an error, on the rank with most of them.
    is_extra: whether the program trains the parameter, and `build` freezes it.
    untied: names of the program's parameters, if `build` ties them and their gradients differ on some rank.
    split: mesh dimensions along which copies of an unexplained tensor differ, although their ranks have equal samples.
    """

    name: str
    shape: tuple[int, ...]
    solutions: dict[int, Solution]
    boxes: dict[int, Any]
    placements: Mapping[str, str] = field(default_factory=dict)
    partial: Partial | None = None
    max_error: float = 0.0
    differing: int = 0
    is_extra: bool = False
    untied: tuple[str, ...] = ()
    split: tuple[str, ...] = ()

    @property
    def doubt(self) -> float:
        """The largest error of a weight on any rank; infinite if a rank knows no weight."""
        return self._find_largest("doubt")

    @property
    def size(self) -> float:
        """The relative norm of the definition, on the rank with the largest part."""
        return self._find_largest("size")

    @property
    def residual(self) -> float:
        """The largest residual on any rank."""
        return self._find_largest("residual")

    @property
    def is_assumed(self) -> bool:
        """Whether one factor for all owners was assumed."""
        return bool(self._find_largest("assumed"))

    @property
    def is_finite(self) -> bool:
        """Whether all copies are finite."""
        return not self._find_largest("not_finite")

    def list_ranks(self, flag: str) -> tuple[int, ...]:
        """Return the ranks for whose solution a flag is set."""
        return tuple(rank for rank, solution in self.solutions.items() if getattr(solution, flag))

    def list_wrong_ranks(self, threshold: float) -> set[int]:
        """Return the ranks whose copy differs from the definition by more than rounding."""
        ranks = set()
        for rank, solution in self.solutions.items():
            # A NaN is never within the threshold.
            if not solution.error <= threshold:
                ranks.add(rank)
        return ranks

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def _find_largest(self, name: str) -> float:
        """Return the largest value of a field of the solutions; NaN if any is NaN."""
        values = [getattr(solution, name) for solution in self.solutions.values()]
        # Python's `max` would skip a NaN that is not the first value.
        return float(np.max(values))

    def is_wrong(self, threshold: float) -> bool:
        """Whether some rank's copy differs from the definition by more than rounding."""
        return bool(self.list_wrong_ranks(threshold))

    def is_explained(self, threshold: float) -> bool:
        """Whether each rank's copy is a combination of the owners' gradients, with known weights."""
        return self.residual <= threshold and self.doubt < float("inf")

    def is_open(self, threshold: float) -> bool:
        """Whether some copy is wrong, and weights or partial sums may explain the copies, and do not yet."""
        # A gradient that should not exist, that consists of two, or that has a NaN, is no sum of others.
        if self.is_extra or self.untied or not self.is_finite:
            return False
        is_settled = self.partial is not None or self.is_explained(threshold)
        return self.is_wrong(threshold) and not is_settled


@dataclass(frozen=True, slots=True)
class Refined:
    """The weights of samples or tokens, equal on all ranks.

    units: (sample,) or (sample, token).
    counts: terms of each unit.
    weights: of each unit.
    names: the explained tensors.
    """

    level: Level
    units: tuple[tuple[int, ...], ...]
    counts: tuple[int, ...]
    weights: tuple[float, ...]
    names: tuple[str, ...]
