"""Causes from weights alone: matching weights, and near misses that must stay unexplained."""

from __future__ import annotations

import math

import pytest

from syncheck.parity.check import explain_pattern
from syncheck.parity.factors import match_factor
from syncheck.parity.measurements import Owner, Refined, Solution, TensorWeights
from syncheck.parity.patterns import Situation, find_patterns, find_right

NAMES = ("a", "b", "c")
# Two data ranks with two micro-batches.
OWNERS = (Owner(0, 0, 7, (0, 4)), Owner(0, 1, 18, (2, 6)), Owner(1, 0, 21, (1, 5)), Owner(1, 1, 9, (3, 7)))
ONES = (1.0,) * 4
NAN = math.nan


def explain(
    rows: dict[int, tuple[float, ...]],
    wrong: tuple[str, ...] = NAMES,
    refined: Refined | None = None,
    residual: float = 0.0,
    owners: tuple[Owner, ...] = OWNERS,
) -> list[tuple[str, str]]:
    """Return code and certainty of each pattern. rows: weights by rank of the wrong tensors."""
    tensors = {}
    for name in NAMES:
        is_wrong = name in wrong
        solutions = {}
        for rank, row in rows.items():
            weights = row if is_wrong else (1.0,) * len(owners)
            error = residual + 1.0 if is_wrong else 0.0
            solutions[rank] = Solution(weights, residual if is_wrong else 0.0, error, 1e-9, size=1.0)
        tensors[name] = TensorWeights(name, (8,), solutions, {})
    situation = Situation(
        tensors=tensors,
        order=NAMES,
        owners=owners,
        right=find_right(tensors, 1e-13),
        patterns=find_patterns(tensors, 1e-13, refined),
        mesh={"dp": 2},
        sizes={"dp": 2, "accumulation": 2},
        counts={"terms": 55.0},
        divisor=55.0,
        refined=refined,
    )
    findings = [explain_pattern(situation, pattern) for pattern in situation.patterns]
    assert all(str(finding.evidence) for finding in findings)
    return [(finding.code, finding.certainty) for finding in findings]


def same(*row: float) -> dict[int, tuple[float, ...]]:
    """Return equal rows on two ranks."""
    return {0: row, 1: row}


PAIRS = tuple(55 / 4 / owner.terms for owner in OWNERS)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (same(4, 4, 4, 4), ("SYN441", "proved")),
        (same(0, 0, 0, 0), ("SYN441", "proved")),
        # A factor that matches no size is still a factor.
        (same(*(4 * [math.pi])), ("SYN441", "proved")),
        (same(*PAIRS), ("SYN442", "proved")),
        (same(*(2 * w for w in PAIRS)), ("SYN442", "proved")),
        # A mean of means with a factor that matches nothing may be another cause.
        (same(*(math.pi * w for w in PAIRS)), ("SYN442", "consistent")),
        (same(1.1, 1.1, 11 / 12, 11 / 12), ("SYN442", "proved")),
        # Means per micro-batch over both ranks: 28 and 27 terms.
        (same(55 / 56, 55 / 54, 55 / 56, 55 / 54), ("SYN442", "proved")),
        ({0: (2, 2, 0, 0), 1: (0, 0, 2, 2)}, ("SYN443", "proved")),
        # One rank has all terms, the other one its own.
        ({0: (1, 1, 1, 1), 1: (0, 0, 2, 2)}, ("SYN443", "proved")),
        (same(2, 1, 2, 1), ("SYN447", "proved")),
        (same(1, 0, 1, 0), ("SYN447", "proved")),
        # Inputs that no description of the task mentions.
        (same(1, 1.5, 1, 1.5), ("SYN449", "consistent")),
        ({0: (2, 2, 2, 2), 1: (1, 1, 1, 1)}, ("SYN449", "consistent")),
        (same(1, -1, 1, -1), ("SYN449", "consistent")),
        ({0: (1, 0, 0, 1), 1: (0, 1, 1, 0)}, ("SYN449", "consistent")),
        ({0: (1, 1, 0, 0), 1: (1, 1, 0, 0)}, ("SYN447", "proved")),
    ],
)
def test_weights_of_all_tensors(rows: dict[int, tuple[float, ...]], expected: tuple[str, str]) -> None:
    """Each row of weights has this cause and certainty."""
    assert explain(rows) == [expected]


def test_weights_of_some_tensors() -> None:
    """A factor in some tensors is another cause than a factor in all tensors; unknown weights contradict nothing."""
    assert explain(same(2, 2, 2, 2), ("b",)) == [("SYN444", "proved")]
    assert explain(same(0, 0, 0, 0), ("b",)) == [("SYN444", "proved")]
    assert explain({0: (2, NAN, 2, NAN), 1: (NAN, 2, NAN, 2)}) == [("SYN441", "proved")]
    assert explain({0: (2, NAN, 2, 2), 1: (2, NAN, 2, 2)}) == [("SYN449", "consistent")]


def test_weights_of_samples() -> None:
    """Weights of samples show means per sample, lost samples, and nothing if they follow no rule."""
    units = tuple((number,) for number in range(4))
    counts = (4, 9, 22, 20)
    for weights, expected in (
        (tuple(55 / 4 / count for count in counts), ("SYN442", "proved")),
        ((1.0, 1.0, 0.0, 1.0), ("SYN447", "proved")),
        ((1.25, 1.25, 2.5, 1.25), ("SYN447", "consistent")),
        ((0.3, 0.9, 1.7, 1.1), ("SYN449", "consistent")),
    ):
        refined = Refined("sample", units, counts, weights, NAMES)
        assert explain(same(*ONES), refined=refined, residual=0.1) == [expected]
    assert explain(same(*ONES), residual=0.1) == [("SYN449", "consistent")]


def test_factors_are_matched_to_sizes() -> None:
    """All simple products and quotients are listed; counts of terms only if the sizes have no match."""
    sizes = {"dp": 4, "accumulation": 2, "tp": 1, "cp": 2}
    counts = {"terms": 55}
    assert match_factor(8, sizes, counts) == ("dp (4) * accumulation (2)", "dp (4) * cp (2)")
    assert match_factor(0.25, sizes, counts) == ("1 / accumulation (2) / cp (2)", "1 / dp (4)")[::-1]
    assert match_factor(55, sizes, counts) == ("terms (55)",)
    assert match_factor(4.001, sizes, counts) == match_factor(4, sizes, counts)
    assert match_factor(4.1, sizes, counts) == ()
