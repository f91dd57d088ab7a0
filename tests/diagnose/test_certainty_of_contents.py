"""Certainty of findings on damaged, exchanged or early contents, if code on some ranks explains the values as well."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.cases import diagnose_case, diff, group
from support.groups import facts_of
from support.small_model import ADAM, SGD, make_diff, model, moments, start
from support.small_model import group as small_group

from syncheck.diagnose import syn210_init_not_broadcast as syn210
from syncheck.diagnose import syn220_bit_flip as syn220
from syncheck.diagnose import syn221_contiguous_corruption as syn221
from syncheck.diagnose import syn224_contents_exchanged as syn224
from syncheck.diagnose import syn240_rounding_only as syn240
from syncheck.diagnose import syn241_periodic_averaging as syn241
from syncheck.records import Evidence, Group, TensorDiff
from syncheck.snapshots import Metadata

if TYPE_CHECKING:
    from syncheck.records import Finding

MOMENT, SQUARE = "optimizer.fc.weight.exp_avg", "optimizer.fc.weight.exp_avg_sq"
NAMES = {"fc.weight": "parameter", "fc.bias": "parameter", MOMENT: "optimizer", SQUARE: "optimizer"}
STATELESS = {"fc.weight": "parameter", "fc.bias": "parameter"}


def element(name: str = "fc.weight", kind: str = "parameter", bits: int = 1, bit: int | None = 29,
            **changes: Any) -> TensorDiff:  # fmt: skip
    """Return a tensor of 8 x 4 with one differing element."""
    changes = {"evidence": Evidence(values={0: 0.25, 1: 0.5}, flipped_bits=bits, bit=bit)} | changes
    fields = {"shape": (8, 4), "numel": 32, "mismatched": 1, "extent": "one", "index": (2, 1)}
    return diff(name, kind, **fields | changes)


def run(name: str = "fc.weight", kind: str = "parameter", first: int | None = 6, length: int = 10,
        **changes: Any) -> TensorDiff:  # fmt: skip
    """Return a tensor of 8 x 4 with adjacent differing elements."""
    fields = {"shape": (8, 4), "numel": 32, "mismatched": length, "extent": "contiguous", "index": (2, 1)}
    return diff(name, kind, **fields | {"evidence": Evidence(first=first)} | changes)


def stateless(*tensors: TensorDiff, **fields: Any) -> Group:
    """Return a group without optimizer state."""
    case = group(*tensors, names=STATELESS, **fields)
    for kind in ("optimizer", "optimizer_step"):
        case.kinds.pop(kind, None)
    return case


def result(finding: Finding) -> tuple[str, tuple[str, ...]]:
    """Return certainty and alternatives."""
    return finding.certainty, finding.alternatives


LIKELY: tuple[str, tuple[str, ...]] = ("likely", ())
GRADIENT = ("consistent", ("SYN213", "SYN225"))
MASKED = Evidence(values={0: 0.25, 1: 0.0}, flipped_bits=7)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (group(element(), names=NAMES), LIKELY),
        (group(element(bit=0), names=NAMES), LIKELY),
        (group(element(MOMENT, "optimizer"), names=NAMES), ("consistent", ())),
        # A clipped gradient changes the optimizer state of the same element.
        (group(element(), element(MOMENT, "optimizer", bits=9, bit=None), names=NAMES), GRADIENT),
        (group(element(bits=9, bit=None), element(MOMENT, "optimizer", bits=9), names=NAMES), GRADIENT),
        # A clipped weight differs in several bits, and its optimizer state agrees.
        (group(element(bits=9, bit=None), names=NAMES), ("consistent", ())),
        (group(element(evidence=MASKED), names=NAMES), ("consistent", ("SYN226",))),
        (stateless(element(evidence=MASKED)), ("consistent", ("SYN213", "SYN225", "SYN226"))),
        # Without optimizer state, a small change may differ in a single low bit.
        (stateless(element()), LIKELY),
        (stateless(element(bit=6)), LIKELY),
        (stateless(element(bit=5)), GRADIENT),
        (stateless(element(bits=9, bit=None)), GRADIENT),
        # Several elements: each must be clear.
        (group(element(), element("fc.bias", bits=9, bit=None), names=NAMES), ("consistent", ())),
    ],
)  # fmt: skip
def test_220(case: Group, expected: Any) -> None:
    """A flip is likely if a single bit differs, and no clipped gradient or small change explains the element."""
    findings = diagnose_case(case)["SYN220"]
    if case.tensors[0].name == MOMENT:  # the state of a parameter that agrees
        expected = LIKELY
    assert result(findings) == expected
    assert (findings.cause.code is syn220.Text.CAUSE_UNSURE) is (findings.fix.code is syn220.Text.FIX_UNSURE)
    assert (findings.cause.code is syn220.Text.CAUSE_UNSURE) is (findings.certainty == "consistent")


@pytest.mark.parametrize(
    ("earlier", "expected"),
    [
        (group(element(), names=NAMES), LIKELY),
        (group(element(MOMENT, "optimizer"), names=NAMES), LIKELY),
        (group(element(), element(MOMENT, "optimizer", bits=9), names=NAMES), GRADIENT),
        (group(element(bits=4, bit=None), names=NAMES), GRADIENT),
    ],
)
def test_220_with_an_earlier_step(earlier: Group, expected: Any) -> None:
    """A bit that differed at an earlier step decides, under the same conditions."""
    later = group(element(bits=9, bit=None), element(MOMENT, "optimizer", bits=9), names=NAMES, step=20)
    assert result(diagnose_case(later, earlier)["SYN220"]) == expected


ROWS = ("consistent", ("SYN225", "SYN213", "SYN210"))
FILLED = ("consistent", ("SYN210",))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (group(run(), names=NAMES), LIKELY),
        (group(run(MOMENT, "optimizer"), names=NAMES), LIKELY),
        # A hook keeps elements from being updated: their optimizer state differs too.
        (group(run(), run(MOMENT, "optimizer"), names=NAMES), ROWS),
        # Whole rows may be filled on each rank, and so may the elements of a vector.
        (group(run(first=4, length=8), names=NAMES), FILLED),
        (group(run(shape=(32,), index=(9,)), names=NAMES), FILLED),
        # Several tensors, no optimizer state, and an unknown position.
        (group(run(), run("fc.bias"), names=NAMES), FILLED),
        (stateless(run()), ROWS),
        (group(run(first=None), names=NAMES), FILLED),
        # No optimizer state belongs to buffers and averaged copies.
        (group(run("ema.fc.weight", "ema"), names=NAMES), ("consistent", ("SYN219",))),
    ],
)
def test_221(case: Group, expected: Any) -> None:
    """Corruption of adjacent elements is likely only if the state agrees and no rows were filled or masked."""
    findings = diagnose_case(case)["SYN221"]
    assert result(findings) == expected
    assert (findings.fix.code is syn221.Text.FIX_UNSURE) is (findings.certainty == "consistent")


ROUNDED = {"max_abs": 1e-8, "max_ulp": 1, "max_rel": 1e-7}
WEIGHTS = model(**ROUNDED)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (small_group(*WEIGHTS, *moments(**ROUNDED)), ("consistent", ("SYN213",))),
        (small_group(*moments(**ROUNDED)), ("consistent", ("SYN213",))),
        # Equal gradients: another learning rate while it was small, or a merge and unmerge.
        (small_group(*WEIGHTS), ("consistent", ("SYN107",))),
        (small_group(*WEIGHTS, optimizer=()), ("consistent", ("SYN107", "SYN213"))),
        (
            small_group(make_diff("base.weight", **ROUNDED), more={"base.weight": "parameter"}),
            ("consistent", ("SYN218",)),
        ),
    ],
)
def test_240(case: Group, expected: Any) -> None:
    """Rounding is likely only if the gradients were rounded differently too."""
    findings = diagnose_case(case)["SYN240"]
    assert result(findings) == expected
    has_moments = findings.alternatives == ("SYN213",)
    assert (findings.cause.code is syn240.Text.CAUSE_UNSURE) is not has_moments


MATRICES = [replace(diff, shape=(diff.numel // 2, 2)) for diff in start(3)]


@pytest.mark.parametrize("optimizer", [ADAM, SGD])
def test_210_after_a_step_in_sync(optimizer: Any) -> None:
    """If all parameters agreed at an earlier step, some ranks loaded or reset theirs later."""
    late = small_group(*MATRICES, ranks=3, optimizer=optimizer, step=30)
    agreed = small_group(ranks=3, optimizer=optimizer, step=20)
    findings = diagnose_case(late, agreed)["SYN210"]
    assert result(findings) == LIKELY
    assert facts_of(findings)[syn210.Text.AGREED] == {"step": 20}
    assert (findings.cause.code, findings.fix.code) == (syn210.Text.CAUSE_LATER, syn210.Text.FIX_LATER)
    differing = small_group(*MATRICES, ranks=3, optimizer=optimizer, step=20)
    for alone in (diagnose_case(late)["SYN210"], diagnose_case(late, differing)["SYN210"]):
        assert syn210.Text.AGREED not in facts_of(alone)
        assert alone.cause.code is syn210.Text.CAUSE
    # The last step in sync counts.
    again = small_group(ranks=3, optimizer=optimizer, step=25)
    assert facts_of(diagnose_case(late, differing, again)["SYN210"])[syn210.Text.AGREED] == {"step": 25}


@pytest.mark.parametrize(
    ("contents", "cause"),
    [
        ({"a.weight": "b.weight", "b.weight": "a.weight"}, syn224.Text.CAUSE),
        ({"a.weight": "b.weight"}, syn224.Text.CAUSE_COPIED),
        ({"a.weight": "b.weight", "b.weight": "c.weight"}, syn224.Text.CAUSE_COPIED),
    ],
)
def test_224(contents: dict[str, str], cause: Any) -> None:
    """Values that return under no other name were copied, tied or renamed, but not exchanged."""
    tensors = [make_diff(name) for name in ("a.weight", "b.weight", "c.weight")]
    tensors = [
        replace(first, evidence=Evidence(holds={1: contents[first.name]})) if first.name in contents else first
        for first in tensors
    ]
    more = dict.fromkeys(("a.weight", "b.weight", "c.weight"), "parameter")
    findings = diagnose_case(small_group(*tensors, more=more))["SYN224"]
    assert (findings.certainty, findings.cause.code) == ("proved", cause)


@pytest.mark.parametrize(
    ("ranks", "odd", "expected"),
    [(2, None, ("proved", ())), (3, (), ("proved", ())), (3, (2,), ("consistent", ("SYN211", "SYN213")))],
)
def test_241(ranks: int, odd: Any, expected: Any) -> None:
    """Ranks that train on their own do not hold equal parameters."""
    averaging = Metadata(averaging={"period": 4, "warmup_steps": 0, "last_step": 8}, step=10)
    case = small_group(*model(ranks=ranks, odd=odd), ranks=ranks, metadata=averaging)
    findings = diagnose_case(case)["SYN241"]
    assert result(findings) == expected
    assert (syn241.Text.SOME_EQUAL in facts_of(findings)) is (expected[0] == "consistent")
