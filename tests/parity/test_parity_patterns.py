"""Causes from weights alone: matching weights, and near misses that must stay unexplained."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from syncheck.parity.check import explain_pattern
from syncheck.parity.factors import match_factor
from syncheck.parity.measurements import Owner, Partial, Refined, Solution, TensorWeights
from syncheck.parity.patterns import Situation, find_patterns, find_right
from syncheck.parity.weights import Copy, Mechanism

if TYPE_CHECKING:
    from syncheck.findings import Finding

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
    findings = find_all(rows, wrong, refined, residual, owners)
    assert all(str(finding.evidence) for finding in findings)
    return [(finding.code, finding.certainty) for finding in findings]


def find_finding(rows: dict[int, tuple[float, ...]], wrong: tuple[str, ...]) -> Finding:
    """Return the only finding."""
    [finding] = find_all(rows, wrong, None, 0.0, OWNERS)
    return finding


def find_all(
    rows: dict[int, tuple[float, ...]],
    wrong: tuple[str, ...],
    refined: Refined | None,
    residual: float,
    owners: tuple[Owner, ...],
) -> list[Finding]:
    """Return the finding of each pattern."""
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
    return [explain_pattern(situation, pattern) for pattern in situation.patterns]


def same(*row: float) -> dict[int, tuple[float, ...]]:
    """Return equal rows on two ranks."""
    return {0: row, 1: row}


PAIRS = tuple(55 / 4 / owner.terms for owner in OWNERS)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (same(4, 4, 4, 4), ("SYN441", "proved")),
        (same(0, 0, 0, 0), ("SYN441", "proved")),
        # A factor that matches no size is still a factor, and nothing says which code has it.
        (same(*(4 * [math.pi])), ("SYN441", "consistent")),
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
        # All ranks read the samples of rank 0; with a mean over its own terms, the weight is 55 / 25.
        (same(2, 2, -7e-17, 0), ("SYN447", "proved")),
        (same(2.2, 2.2, 0, 0), ("SYN447", "proved")),
        (same(2.3, 2.3, 0, 0), ("SYN447", "consistent")),
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


@pytest.mark.parametrize("factor", [0.3, 1 / 256, 1e-5])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (same(1, 1, 1, 1), ("SYN441", "consistent")),
        (same(*PAIRS), ("SYN442", "consistent")),
        ({0: (2, 2, 0, 0), 1: (0, 0, 2, 2)}, ("SYN443", "proved")),
        (same(1, 1, 0, 1), ("SYN447", "consistent")),
        (same(1, 1, 2, 1), ("SYN447", "consistent")),
        (same(1, 1.5, 1.2, 1.7), ("SYN449", "consistent")),
        ({0: (1, 1, 1, 1), 1: (3, 3, 3, 3)}, ("SYN449", "consistent")),
    ],
)
def test_causes_do_not_depend_on_a_small_factor(
    rows: dict[int, tuple[float, ...]], expected: tuple[str, str], factor: float
) -> None:
    """A loss that is divided by thousands of tokens once more has the same cause, and is not a missing gradient."""
    scaled = {rank: tuple(factor * weight for weight in row) for rank, row in rows.items()}
    assert explain(scaled) == [expected]
    assert explain(scaled, ("b",))[0][0] == expected[0].replace("SYN441", "SYN444")


def test_a_small_factor_is_not_a_missing_gradient() -> None:
    """A weight of 1 / 256 is reported as a factor; only a weight of zero is a missing gradient."""
    for weight, names in ((1 / 256, ["FACTOR"]), (0.0, ["NONE"])):
        for wrong in (NAMES, ("b",)):
            facts = [fact.code.name for fact in find_finding(same(*4 * [weight]), wrong).facts]
            assert facts[:1] == names


def test_weights_of_some_tensors() -> None:
    """A factor in some tensors is another cause than a factor in all tensors; unknown weights contradict nothing."""
    assert explain(same(0, 0, 0, 0), ("b",)) == [("SYN444", "proved")]
    assert explain({0: (2, NAN, 2, NAN), 1: (NAN, 2, NAN, 2)}) == [("SYN441", "proved")]
    assert explain({0: (2, NAN, 2, 2), 1: (2, NAN, 2, 2)}) == [("SYN449", "consistent")]


@pytest.mark.parametrize(
    ("factor", "cause", "certainty"),
    [
        (2, "CAUSE", "consistent"),
        (0.5, "CAUSE", "consistent"),
        (4, "CAUSE", "consistent"),
        (3, "CAUSE_FACTOR", "proved"),
        (-1, "CAUSE_FACTOR", "proved"),
        # The number of terms is no number of reductions.
        (1 / 55, "CAUSE_FACTOR", "proved"),
        (0, "CAUSE_NONE", "proved"),
    ],
)
def test_causes_of_a_factor_in_some_tensors(factor: float, cause: str, certainty: str) -> None:
    """A reduction is a possible cause of a factor that is a size of the run, and no cause of any other factor."""
    finding = find_finding(same(*4 * [factor]), ("b",))
    assert (finding.code, finding.cause.code.name, finding.certainty) == ("SYN444", cause, certainty)


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


def test_tensors_are_listed_in_the_order_of_execution() -> None:
    """The last wrong tensor is the last that ran, whatever its name or its doubt; names that did not run are last."""
    tensors = {name: TensorWeights(name, (8,), {0: Solution((1.0,), 0.0, 0.0, 1e-9)}, {}) for name in NAMES}
    situation = Situation(tensors, ("c", "b"), OWNERS, (), [], {"dp": 2}, {}, {}, 8.0)
    assert situation.sort(["a", "b", "c"]) == ["c", "b", "a"]


def test_copies_of_different_parts_are_no_partial_sums() -> None:
    """Shards of one tensor on two ranks, each half of its definition, do not add up to anything."""
    mechanism = Mechanism(None, SimpleNamespace(mesh={"dp": 2}), None, scale=1.0, threshold=1e-13)  # type: ignore[arg-type]
    whole = torch.arange(1.0, 6.0, dtype=torch.float64)
    shards = [Copy((rank,), f"box {rank}", part / 2, part) for rank, part in enumerate(whole.chunk(2))]
    assert mechanism._find_dimensions(shards) is None
    copies = [Copy((rank,), "all", whole * share, whole) for rank, share in enumerate((0.25, 0.75))]
    assert mechanism._find_dimensions(copies) == Partial(("dp",), 1.0)
    # Unequal shards along `tp`, each of which is a sum along `dp`.
    mechanism.program.mesh = {"tp": 2, "dp": 2}
    parts = [
        Copy((tp, dp), f"box {tp}", whole[3 * tp :][:3] / 2, whole[3 * tp :][:3]) for tp in (0, 1) for dp in (0, 1)
    ]
    assert mechanism._find_dimensions(parts) == Partial(("dp",), 1.0)


def test_rounding_errors_are_written_as_zero() -> None:
    """A weight of 1e-17 is 0."""
    tensors = {"a": TensorWeights("a", (8,), dict.fromkeys((0, 1), Solution((-0.5, 7e-17), 0.0, 1.0, 1e-9)), {})}
    [pattern] = find_patterns(tensors, 1e-13)
    owners = (Owner(0, 0, 4, (0,)), Owner(1, 0, 4, (1,)))
    situation = Situation(tensors, ("a",), owners, (), [pattern], {"dp": 2}, {}, {}, 8.0)
    assert "the weights -0.5, 0 for" in explain_pattern(situation, pattern).evidence


def test_texts_of_factors_and_tokens() -> None:
    """A factor of counts alone suggests micro_batches, stages hold no replicas, and a token is named once."""
    weights = dict.fromkeys((0, 1), Solution((27.5,) * 4, 0.0, 1.0, 1e-9))
    for ranks, names in (((0, 1), ["dp"]), ((0,), [])):
        solutions = {rank: Solution((2.0,) * 4, 0.0, 1.0, 1e-9) for rank in ranks}
        tensors = {
            "a": TensorWeights("a", (8,), solutions, {}),
            "b": TensorWeights("b", (8,), dict.fromkeys((0, 1), Solution(ONES, 0.0, 0.0, 1e-9, size=1.0)), {}),
        }
        [pattern] = find_patterns(tensors, 1e-13)
        situation = Situation(tensors, NAMES, OWNERS, ("b",), [pattern], {"dp": 2}, {"dp": 2}, {}, 55.0)
        facts = explain_pattern(situation, pattern).facts
        assert [fact.parameters["dimension"] for fact in facts if fact.code.name == "DIMENSION"] == names
    tensors = {"a": TensorWeights("a", (8,), weights, {})}
    [pattern] = find_patterns(tensors, 1e-13)
    situation = Situation(tensors, NAMES, OWNERS, (), [pattern], {"dp": 2}, {"dp": 2}, {"terms": 55.0}, 55.0)
    assert "set micro_batches if the program" in explain_pattern(situation, pattern).evidence
    refined = Refined("token", ((3, 8), (3, 9), (4, 0)), (1, 1, 1), (0.0, 0.0, 1.0), ("a",))
    unexplained = Solution((NAN,) * 4, 1.0, 1.0, math.inf)
    tensors = {"a": TensorWeights("a", (8,), dict.fromkeys((0, 1), unexplained), {})}
    [pattern] = find_patterns(tensors, 1e-13, refined)
    situation = Situation(tensors, NAMES, OWNERS, (), [pattern], {"dp": 2}, {}, {}, 3.0, refined)
    assert "token 8 of sample 3, token 9 of sample 3 do not enter" in explain_pattern(situation, pattern).evidence


def test_factors_are_matched_to_sizes() -> None:
    """All simple products and quotients are listed; counts of terms only if the sizes have no match."""
    sizes = {"dp": 4, "accumulation": 2, "tp": 1, "cp": 2}
    counts = {"terms": 55}
    assert match_factor(8, sizes, counts) == ("dp (4) * accumulation (2)", "dp (4) * cp (2)")
    assert match_factor(0.25, sizes, counts) == ("1 / accumulation (2) / cp (2)", "1 / dp (4)")[::-1]
    assert match_factor(55, sizes, counts) == ("terms (55)",)
    assert match_factor(4.001, sizes, counts) == match_factor(4, sizes, counts)
    assert match_factor(4.1, sizes, counts) == ()


def test_a_weight_close_to_1() -> None:
    """A wrong weight has as many digits as it needs to differ from 1, and a right one is 1."""
    for wrong in (NAMES, ("a",)):
        for factor, written in ((1 + 1e-9, "1.000000001"), (1 - 1e-8, "0.99999999"), (1.0001, "1.0001")):
            fact = find_finding(same(*(4 * [factor])), wrong).facts[0]
            assert (fact.code.name, f" {written}, expected 1" in str(fact)) == ("FACTOR", True)
    # One rank deviates by less than the error of an unclear weight.
    facts = find_finding({0: ONES, 1: (1.0, 1.0, 1 + 1e-5, 1.0)}, ("a",)).facts
    assert facts[1].parameters["weights"] == ("1", "1", "1.00001", "1")
    assert explain({0: ONES, 1: 4 * (1.005,)}) == [("SYN449", "consistent")]
