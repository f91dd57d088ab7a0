"""Tensors with equal weights, and what the weights show. Pure functions of numbers, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from syncheck.parity.factors import match_factor
from syncheck.parity.measurements import CLEAR, CLOSE, UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from numpy.typing import NDArray

    from syncheck.parity.measurements import Owner, Refined, TensorWeights

    Row = NDArray[np.float64]

# Rounding of weights beyond their measured doubt.
_EQUAL = 1e-6
# A tensor smaller than this many thresholds could have another weight without a visible error.
_VISIBLE = 100
# A gradient that nobody computed is exactly zero; a loss may be divided by millions of tokens twice.
ZERO = 1e-12


@dataclass(slots=True)
class Pattern:
    """Wrong tensors with equal weights.

    names: of the tensors.
    rows: [owners] weights by rank, NaN if unknown.
    doubt: the largest error of a weight.
    assumed: see `weights.Solution`.
    partial: dimensions and factor of `weights.Partial`.
    is_explained: whether weights explain the copies.
    is_refined: whether weights of samples or tokens do.
    is_finite: whether all copies are finite.
    missing: ranks without a gradient, if other ranks have one.
    frozen: ranks on which the program freezes the tensors, so that terms are absent.
    is_extra: whether the program trains the tensors, and `build` freezes them.
    untied: names of parameters that are one tensor in `build`.
    """

    names: list[str]
    rows: dict[int, Row]
    doubt: float = 0.0
    assumed: bool = False
    partial: tuple[tuple[str, ...], float] | None = None
    is_explained: bool = True
    is_refined: bool = False
    is_finite: bool = True
    missing: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    is_extra: bool = False
    untied: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The number of tensors."""
        return len(self.names)


@dataclass(frozen=True, slots=True)
class Situation:
    """All numbers that a cause may use.

    tensors: by name.
    order: names in the order of execution.
    owners: of the terms, in the order of the weights.
    right: names of right tensors whose gradient is large enough to show another weight.
    patterns: of the wrong tensors.
    mesh: sizes by the names of the dimensions.
    sizes, counts: of the run, by name, for `match_factor`.
    divisor: of the sum of all terms.
    refined: weights of samples or tokens of unexplained tensors.
    threshold: the largest error of a right tensor, relative to the whole gradient.
    """

    tensors: Mapping[str, TensorWeights]
    order: Sequence[str]
    owners: Sequence[Owner]
    right: Sequence[str]
    patterns: Sequence[Pattern]
    mesh: Mapping[str, int]
    sizes: Mapping[str, float]
    counts: Mapping[str, float]
    divisor: float
    refined: Refined | None = None
    threshold: float = 0.0

    @property
    def is_uniform(self) -> bool:
        """Whether one pattern explains all tensors. Those too small to show a weight are neither right nor wrong."""
        # A parameter that the definition does not train has no weights.
        extra = sum(map(attrgetter("is_extra"), self.patterns))
        return not self.right and len(self.patterns) == 1 + extra

    @property
    def is_coarse(self) -> bool:
        """Whether rounding changes weights so much that several causes fit them."""
        return self.threshold > CLEAR

    def match(self, factor: float) -> tuple[str, ...]:
        """Return the products of sizes that equal a factor."""
        return match_factor(factor, self.sizes, self.counts)

    def matches_counts_only(self, factor: float) -> bool:
        """Whether a factor equals a product with counts of terms, which may be a coincidence, and none of sizes."""
        return bool(self.match(factor)) and not match_factor(factor, self.sizes, {})

    def list_wrong_ranks(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks with a wrong copy of any of some tensors."""
        ranks: set[int] = set()
        for name in names:
            ranks |= self.tensors[name].list_wrong_ranks(self.threshold)
        return tuple(sorted(ranks))

    def sort(self, names: Sequence[str]) -> list[str]:
        """Return names in the order of execution; names of modules that did not run come last."""
        executed = [name for name in self.order if name in names]
        return executed + [name for name in names if name not in executed]


class Share(NamedTuple):
    """Weights that are inverse to the numbers of terms.

    level: of whose terms: `rank and micro-batch`, `rank`, `micro-batch` or `sample`.
    factor: of all weights, in addition to a mean of means.
    weights, counts, labels: of the parts.
    """

    level: str
    factor: float
    weights: Sequence[float]
    counts: Sequence[float]
    labels: Sequence[str]


def is_near(a: float, b: float, tolerance: float = _EQUAL) -> bool:
    """Whether two numbers are equal within an absolute error. NaN is equal to nothing."""
    return abs(a - b) <= tolerance


def find_patterns(
    tensors: Mapping[str, TensorWeights], threshold: float, refined: Refined | None = None
) -> list[Pattern]:
    """Group the wrong tensors by equal weights on all ranks, the largest group first.

    refined: the weights of samples or tokens, and the tensors that they explain.
    """
    refined_names = () if refined is None else refined.names
    wrong = [tensor for tensor in tensors.values() if tensor.is_wrong(threshold)]
    # The clearest weights represent a group.
    wrong.sort(key=attrgetter("doubt"))
    patterns: list[Pattern] = []
    for tensor in wrong:
        pattern = _make_pattern(tensor, threshold, is_refined=tensor.name in refined_names)
        for candidate in patterns:
            if _agree(candidate, pattern):
                _merge(candidate, pattern)
                break
        else:
            patterns.append(pattern)
    patterns.sort(key=attrgetter("size"), reverse=True)
    return patterns


def _make_pattern(tensor: TensorWeights, threshold: float, *, is_refined: bool) -> Pattern:
    """Return the pattern of one tensor."""
    pattern = Pattern(
        [tensor.name],
        {},
        is_refined=is_refined,
        is_finite=tensor.is_finite,
        is_extra=tensor.is_extra,
        untied=tensor.untied,
    )
    missing = tensor.list_ranks("missing")
    # A tensor without a gradient on all ranks has weights 0 in any case.
    if len(missing) < len(tensor.solutions):
        pattern.missing = missing
    pattern.is_explained = tensor.is_explained(threshold) and not is_refined
    if pattern.is_explained:
        for rank, solution in tensor.solutions.items():
            pattern.rows[rank] = np.array(solution.weights)
        pattern.doubt = tensor.doubt
        pattern.assumed = tensor.is_assumed
    elif tensor.partial is not None:
        pattern.partial = (tensor.partial.dimensions, round(tensor.partial.factor, 3))
    frozen = tensor.list_ranks("frozen")
    # A parameter may also be frozen after its gradient was computed.
    if _lacks_terms(pattern, frozen):
        pattern.frozen = frozen
    return pattern


def _lacks_terms(pattern: Pattern, ranks: Sequence[int]) -> bool:
    """Whether the copy of one of some ranks lacks terms. The weights of a rank without a gradient may be unknown."""
    is_absent = not set(ranks).isdisjoint(pattern.missing)
    cut = find_cut(pattern)
    for rank in pattern.rows.keys() & set(ranks):
        is_absent |= bool((np.abs(pattern.rows[rank]) <= cut).any())
    return is_absent


def _agree(a: Pattern, b: Pattern) -> bool:
    """Whether two patterns are one: the weights that both know are equal."""
    if (a.is_explained, a.is_refined, a.partial) != (b.is_explained, b.is_refined, b.partial):
        return False
    if (a.is_finite, a.missing, a.frozen) != (b.is_finite, b.missing, b.frozen):
        return False
    if (a.is_extra, a.untied) != (b.is_extra, b.untied):
        return False
    tolerance = _EQUAL + min(a.doubt, CLEAR) + min(b.doubt, CLEAR)
    for rank in a.rows.keys() & b.rows.keys():
        scale = np.maximum(1.0, np.abs(a.rows[rank]))
        # Comparisons with NaN are false: an unknown weight contradicts nothing.
        if (np.abs(a.rows[rank] - b.rows[rank]) > tolerance * scale).any():
            return False
    return True


def _merge(pattern: Pattern, added: Pattern) -> None:
    """Add the names of a pattern, and the weights that the first pattern does not know."""
    pattern.names += added.names
    pattern.assumed &= added.assumed
    for rank, row in added.rows.items():
        first = pattern.rows.get(rank, row)
        pattern.rows[rank] = np.where(np.isnan(first), row, first)


def find_right(tensors: Mapping[str, TensorWeights], threshold: float) -> list[str]:
    """Return the names of right tensors whose gradient is large enough to show another weight."""
    right = []
    for tensor in tensors.values():
        if not tensor.is_wrong(threshold) and tensor.size > _VISIBLE * threshold:
            right.append(tensor.name)
    return right


def find_cut(pattern: Pattern) -> float:
    """Return the largest weight that counts as absent.

    It is relative to the largest weight below 1, because the whole gradient may be divided by the number of ranks or
    tokens once too often. It is never below the error of a weight.
    """
    weights = np.abs(np.array(list(pattern.rows.values())))
    return max(ZERO, min(pattern.doubt, CLEAR), CLEAR * _find_scale(weights))


def _find_scale(weights: Row) -> float:
    """Return the largest of some weights, at most 1. Unknown weights are ignored."""
    known = np.abs(weights[~np.isnan(weights)])
    return min(1.0, float(known.max(initial=0.0)))


def find_common_row(pattern: Pattern) -> Row | None:
    """Return the weights if all ranks have the same weights; None otherwise, or if some weight is unknown."""
    if not pattern.rows:
        return None
    rows = np.array(list(pattern.rows.values()))
    unknown = np.isnan(rows)
    # Every owner needs one rank that knows its weight.
    if unknown.all(0).any():
        return None
    largest = np.where(unknown, -np.inf, rows).max(0)
    smallest = np.where(unknown, np.inf, rows).min(0)
    tolerance = np.maximum(find_cut(pattern), CLEAR * np.abs(largest))
    # Known weights that differ by less than one percent still differ, and one of them is wrong.
    rounding = (_EQUAL + 2 * min(pattern.doubt, CLEAR)) * np.maximum(1.0, np.abs(largest))
    if (largest - smallest > np.minimum(tolerance, rounding)).any():
        return None
    # Without NaN, the first rank that knows a weight.
    first = rows[(~unknown).argmax(0), np.arange(rows.shape[1])]
    return np.asarray(first)


def find_constant(row: Row | None) -> float | None:
    """Return the weight of all owners if it is one number."""
    if row is None:
        return None
    spread = float(row.max() - row.min())
    tolerance = max(ZERO, CLOSE * float(np.abs(row).max()))
    return float(row[0]) if spread <= tolerance else None


def find_share(row: Row, owners: Sequence[Owner], divisor: float) -> Share | None:
    """Return by the counts of which parts weights are divided: ranks, micro-batches, or both. None: of none of them."""
    tolerance = CLOSE * _find_scale(row)
    for level in ("rank", "micro-batch", "rank and micro-batch"):
        counts: dict[Hashable, float] = {}
        weights: dict[Hashable, float] = {}
        labels: dict[Hashable, str] = {}
        are_equal = True
        for owner, weight in zip(owners, row.tolist(), strict=True):
            part, label = _find_part(level, owner)
            counts[part] = counts.get(part, 0) + owner.amount
            labels[part] = label
            are_equal &= is_near(weights.setdefault(part, weight), weight, tolerance)
        # A part has one weight.
        if are_equal:
            share = make_share(level, list(weights.values()), list(counts.values()), list(labels.values()), divisor)
            if share is not None:
                return share
    return None


def _find_part(level: str, owner: Owner) -> tuple[Hashable, str]:
    """Return the part of the batch at a level that an owner belongs to, and its name."""
    if level == "rank":
        return owner.rank, f"data rank {owner.rank}"
    if level == "micro-batch":
        return owner.micro_batch, f"micro-batch {owner.micro_batch}"
    return (owner.rank, owner.micro_batch), f"data rank {owner.rank}, micro-batch {owner.micro_batch}"


def make_share(
    level: str, weights: Sequence[float], counts: Sequence[float], labels: Sequence[str], divisor: float
) -> Share | None:
    """Return the share if weights times counts are one number, and the counts differ."""
    if len(set(counts)) < 2:
        return None
    products = np.array(weights) * np.array(counts)
    if products[0] <= 0 or (np.abs(products - products[0]) > CLOSE * products[0]).any():
        return None
    # A mean of k means gives each part the weight divisor / (k * count).
    factor = float(products[0]) * len(counts) / divisor
    return Share(level, factor, weights, counts, labels)


def find_usual(weights: Row, counts: Row) -> float:
    """Return the weight of the batch without its lost or repeated parts; NaN without a usual weight.

    It is 1 if any part has the weight 1, else the weight of more than half of the terms. If parts of the batch replace
    other parts, the result is 1 if all weights are whole, else the smallest weight of the parts that entered.
    """
    if (np.abs(weights - 1) <= CLOSE).any():
        return 1.0
    tolerance = CLOSE * _find_scale(weights)
    # In ascending order of weights, the term in the middle has the weight of more than half of the terms, if any.
    ascending = np.argsort(weights)
    middle = np.searchsorted(np.cumsum(counts[ascending]), counts.sum() / 2)
    usual = float(weights[ascending][middle])
    terms = counts[np.abs(weights - usual) <= tolerance].sum()
    if 2 * terms > counts.sum() and usual > tolerance:
        return usual
    entered = weights[np.abs(weights) > tolerance]
    # Without a lost part, nothing was replaced; a negative weight is no repetition.
    if len(entered) in (0, len(weights)) or entered.min() < 0:
        return UNKNOWN
    if (np.abs(weights - np.rint(weights)) <= tolerance).all():
        return 1.0
    return float(entered.min())


def find_multiples(weights: Row, usual: float) -> dict[int, list[int]]:
    """Return the parts with 0, 2, 3, ... times the usual weight, by this multiple; empty if a weight is another one."""
    ratios = weights / usual
    # NaN, without a usual weight, is never near. No loss and no repetition makes a weight negative.
    are_whole = (np.abs(ratios - np.rint(ratios)) <= CLOSE).all()
    if not are_whole or (ratios < -CLOSE).any():
        return {}
    parts: dict[int, list[int]] = {}
    for number, multiple in enumerate(np.rint(ratios).astype(int).tolist()):
        parts.setdefault(multiple, []).append(number)
    parts.pop(1, None)
    return parts
