"""Damage by memory, disks and arithmetic (SYN220 to SYN223) and rounding (SYN240): matching cases and near misses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from support import cases
from support.cases import DIGEST, diff, group
from support.groups import facts_of
from support.listings import list_names, map_fields

from syncheck.diagnose import syn220_bit_flip as syn220
from syncheck.diagnose import syn221_contiguous_corruption as syn221
from syncheck.diagnose import syn222_nonfinite_on_some_ranks as syn222
from syncheck.diagnose import syn223_damaged_on_disk as syn223
from syncheck.diagnose.localized import Localized
from syncheck.diagnose.statements import Common
from syncheck.diagnose.syn240_rounding_only import Text as Rounding
from syncheck.records import MEASURED, Evidence, Finding, Group, TensorDiff, ValueDiff

RULES = {"SYN220", "SYN221", "SYN222", "SYN223", "SYN240"}
ODD = ((0, 1, 2), (3,))
PAIR = ((0,), (1,))
SHARDS = ((0, 2), (1, 3))
AGREEMENT = (Common.AGREE(ranks=(0, 1, 2)), Common.DIFFERS(ranks=(3,)))
MOMENT = "optimizer.fc.weight.exp_avg"
SMALL_ON_3 = {0: 0.25, 1: 0.25, 2: 0.25, 3: 1e-20}


def make_builder(**defaults: Any) -> Any:
    """Return a function that builds a tensor with default fields."""

    def build(name: str = "fc.weight", kind: str = "parameter", clusters: Any = ODD, **changes: Any) -> TensorDiff:
        return diff(name, kind, clusters, **defaults | changes)

    return build


# One differing element of 8 x 4, in bit 29.
single = make_builder(
    shape=(8, 4), numel=32, mismatched=1, extent="one", index=(2, 1), max_abs=0.25,
    evidence=Evidence(values=SMALL_ON_3, flipped_bits=1, bit=29),
)  # fmt: skip
# Adjacent elements of 8 x 4, the 7th to the 16th.
run = make_builder(shape=(8, 4), numel=32, mismatched=10, extent="contiguous", index=(2, 1), evidence=Evidence(first=6))
rounded = make_builder(max_abs=1e-8, max_ulp=1, max_rel=1e-7)
whole, by_digest = make_builder(), make_builder(**DIGEST)
MEAN = whole("bn.running_mean", "bn_mean", PAIR)
STEP = whole("optimizer.fc.weight.step", "optimizer_step", PAIR, numel=1, mismatched=1)


def four(*tensors: TensorDiff, **fields: Any) -> Group:
    """Return a group of four ranks."""
    return group(*tensors, ranks=4, **fields)


def diagnose_four(*tensors: TensorDiff, earlier: tuple[Group, ...] = (), **fields: Any) -> dict[str, Finding]:
    """Diagnose four ranks, and return the findings of RULES by code."""
    fields = {"stores_progress": True} | fields
    return {code: f for code, f in cases.diagnose_case(four(*tensors, **fields), *earlier).items() if code in RULES}


def test_damaged_files_are_the_suspects() -> None:
    """A wrong checksum makes its file the suspect, even against a majority, and SYN223 covers only that tensor."""
    outlier = single(evidence=Evidence(damaged=(1,), flipped_bits=1))
    fitted = cases.diagnose_case(four(outlier))
    assert map_fields(fitted, "ranks", "tensors") == {
        "SYN223": ((1,), ("fc.weight",)),
        "SYN299": ((3,), ("fc.weight",)),
    }
    assert fitted["SYN223"].facts == (
        syn223.Text.CHANGED(paths=("rank1.pth",)),
        syn223.Text.CHECKSUMS(count=1, ranks=(1,), names=("fc.weight",)),
    )
    assert diagnose_four(outlier, MEAN)["SYN223"].tensors == ("fc.weight",)
    several = diagnose_four(outlier, run("a", evidence=Evidence(damaged=(2, 3))))
    assert several.keys() == {"SYN223"}
    assert several["SYN223"].ranks == (1, 2, 3)
    facts = facts_of(several["SYN223"])
    assert facts[syn223.Text.CHANGED]["paths"] == ("rank1.pth", "rank2.pth", "rank3.pth")
    assert facts[syn223.Text.CHECKSUMS]["names"] == ("fc.weight", "a")


@pytest.mark.parametrize("made", [single(), run(), single(nonfinite={0: 0, 1: 0, 2: 0, 3: 1}), by_digest()])
def test_223_precedes_the_other_rules(made: TensorDiff) -> None:
    """SYN223 precedes the rules on NaNs, flips and runs if a checksum is wrong, and does not match otherwise."""
    assert "SYN223" not in diagnose_four(made)
    evidence = replace(made.evidence or Evidence(), damaged=(3,))
    assert diagnose_four(replace(made, evidence=evidence)).keys() == {"SYN223"}


def test_222() -> None:
    """The rank with additional NaNs is the suspect of SYN222, which covers only the tensor with NaNs."""
    fitted = diagnose_four(single(max_abs=None, nonfinite={0: 0, 1: 0, 2: 0, 3: 1}), whole("a"))
    assert set(fitted) == {"SYN222"}
    assert (fitted["SYN222"].ranks, fitted["SYN222"].tensors) == ((3,), ("fc.weight",))
    assert fitted["SYN222"].facts == (
        syn222.Text.MORE_NONFINITE(ranks=(3,), tensors=1),
        syn222.Text.ELEMENTS(name="fc.weight", most=1, numel=32, ranks=(3,), least=0),
        *AGREEMENT,
    )
    finding = cases.diagnose_case(group(single(clusters=PAIR, nonfinite={0: 3, 1: 2})))["SYN222"]
    assert finding.ranks == (0,)  # no majority, but only rank 0 has an additional NaN
    assert facts_of(finding)[syn222.Text.ELEMENTS]["least"] == 2


@pytest.mark.parametrize(
    ("made", "ranks"),
    [
        (by_digest(nonfinite={0: 0, 1: 0, 2: 0, 3: 2}), (3,)),  # fingerprints contain the counts
        (by_digest(), None),
        (run(nonfinite=dict.fromkeys(range(4), 2)), None),  # equal numbers: masks
        # Only ranks with the same shard are compared.
        (run(clusters=((0,), (2,)), replica_groups=SHARDS, nonfinite={0: 0, 1: 5, 2: 0, 3: 5}), None),
        (run(clusters=((0,), (2,)), replica_groups=SHARDS, nonfinite={0: 0, 1: 5, 2: 1, 3: 5}), (2,)),
    ],
)
def test_222_compares_counts_of_equal_shards(made: TensorDiff, ranks: tuple[int, ...] | None) -> None:
    """NaN counts identify the suspect, even beside digests, unless counts are equal or belong to different shards."""
    finding = diagnose_four(made).get("SYN222")
    assert (finding and finding.ranks) == ranks


def test_222_on_a_rank_without_finite_parameters() -> None:
    """If most parameters of a rank have no finite element, the evidence mentions gradients without averaging."""
    outlier = [whole(f"p{i}", nonfinite={0: 0, 1: 0, 2: 0, 3: 4}) for i in range(6)]
    assert facts_of(diagnose_four(*outlier)["SYN222"])[syn222.Text.NOTHING_ELSE] == {"count": 6}
    assert syn222.Text.NOTHING_ELSE not in facts_of(diagnose_four(*outlier[:5])["SYN222"])


BIT_29 = syn220.Text.BIT(bit=29, part="exponent")
EXAMPLES = {
    "SYN220": (
        single(),
        syn220.Text.FLIPPED(element="fc.weight[2, 1]", bit=BIT_29),
        syn220.Text.VALUES(values=SMALL_ON_3),
        syn220.Text.REST_OF_TENSOR(others=31),
        Localized.REST_AGREES(parameters=10, states=20),
        *AGREEMENT,
    ),
    "SYN221": (
        run(),
        syn221.Text.RUN(length=10, name="fc.weight", numel=32),
        syn221.Text.POSITION(first=6, last=15),
        Common.LARGEST(difference=0.5, element="fc.weight[2, 1]"),
        Localized.REST_AGREES(parameters=10, states=20),
        *AGREEMENT,
    ),
    "SYN240": (
        rounded(max_ulp=4),
        Rounding.ROUNDING_STEPS(ulp=4, elements=4, tensors=1),
        Common.LARGEST(difference=1e-08, element="fc.weight[1]"),
        *AGREEMENT,
    ),
}


@pytest.mark.parametrize("code", EXAMPLES)
def test_evidence(code: str) -> None:
    """A finding of a flip, a run or rounding reports the rank, the elements and the agreement elsewhere."""
    tensor, *facts = EXAMPLES[code]
    fitted = diagnose_four(tensor)
    assert set(fitted) == {code}
    assert (fitted[code].ranks, fitted[code].tensors, fitted[code].facts) == ((3,), ("fc.weight",), tuple(facts))
    assert fitted[code].severity == ("warning" if code == "SYN240" else "error")
    assert cases.diagnose_case(group(replace(tensor, clusters=PAIR, minority=())))[code].ranks == (0, 1)


@pytest.mark.parametrize(
    ("dtype", "bit", "part"),
    [
        ("float32", 22, "mantissa"),
        ("float32", 31, "sign"),
        ("bfloat16", 7, "exponent"),
        ("float16", 15, "sign"),
        ("float8_e8m0fnu", 7, "exponent"),
        ("int64", 3, None),
    ],
)
def test_220_reports_the_part_of_the_number(dtype: str, bit: int, part: str | None) -> None:
    """SYN220 reports the sign, exponent or mantissa according to the dtype, and no part for an integer."""
    created = single(dtype=dtype, evidence=Evidence(flipped_bits=1, bit=bit))
    expected = syn220.Text.BIT(bit=bit, part=part) if part else syn220.Text.INTEGER_BIT(bit=bit)
    assert facts_of(diagnose_four(created)["SYN220"])[syn220.Text.FLIPPED]["bit"] == expected


def test_220_with_more_bits() -> None:
    """Several differing bits are only consistent with a flip; one bit of the element at an earlier step is proof."""
    fitted = diagnose_four(single(evidence=Evidence(values={0: 0.25, 3: 0.5}, flipped_bits=9)))["SYN220"]
    assert fitted.facts[0] == syn220.Text.ONE_ELEMENT(element="fc.weight[2, 1]")
    assert (facts_of(fitted)[syn220.Text.BITS], syn220.Text.CONSISTENT in facts_of(fitted)) == ({"bits": 9}, True)
    assert syn220.Text.CONSISTENT in facts_of(diagnose_four(single(evidence=None))["SYN220"])
    later = {"evidence": Evidence(flipped_bits=9)}
    earlier = four(single(MOMENT, "optimizer"), names={MOMENT: "optimizer"})
    proof = facts_of(diagnose_four(single(**later), step=20, earlier=(earlier,))["SYN220"])[syn220.Text.FLIPPED_EARLIER]
    assert proof == {"step": 10, "element": f"{MOMENT}[2, 1]", "bit": BIT_29}
    elsewhere = replace(earlier, tensors=(replace(earlier.tensors[0], index=(0, 0)),))
    assert syn220.Text.CONSISTENT in facts_of(diagnose_four(single(**later), step=20, earlier=(elsewhere,))["SYN220"])


def test_220_covers_optimizer_state_and_average() -> None:
    """SYN220 of a weight covers the same element of the weight's moment and of its averaged copy."""
    fitted = diagnose_four(single(), single(MOMENT, "optimizer"), single("ema.fc.weight", "ema"))
    assert set(fitted) == {"SYN220"}
    assert len(fitted["SYN220"].tensors) == 3
    assert facts_of(fitted["SYN220"])[Localized.FOLLOWERS] == {"tensors": (MOMENT, "ema.fc.weight")}
    alone = diagnose_four(single(MOMENT, "optimizer"))["SYN220"]
    assert alone.facts[0].parameters["element"] == f"{MOMENT}[2, 1]"


def test_221_beside_other_tensors() -> None:
    """SYN221 covers one element of another tensor too, and reports whole rows, which may have another cause."""
    fitted = diagnose_four(run(), single("fc.bias"))
    assert set(fitted) == {"SYN221"}
    assert facts_of(fitted["SYN221"])[Localized.ONE_ELEMENT] == {"element": "fc.bias[2, 1]", "numel": 32}
    rows = run(mismatched=8, index=(1, 2), evidence=Evidence(first=4))
    assert facts_of(diagnose_four(rows)["SYN221"])[syn221.Text.ROWS] == {"first": 1, "last": 2}
    assert facts_of(diagnose_four(replace(rows, mismatched=4))["SYN221"])[syn221.Text.ONE_ROW] == {"first": 1}
    for second in (replace(rows, evidence=None), run(shape=(32,), index=(8,), evidence=Evidence(first=4))):
        assert syn221.Text.ROWS not in facts_of(diagnose_four(second)["SYN221"])


MOMENTUM = run("optimizer.fc.weight.momentum_buffer", "optimizer", mismatched=7, extent="scattered")
ALONE = single("bn.running_mean", "bn_mean")
FLIPS = [single(f"p{i}") for i in range(5)]


@pytest.mark.parametrize(
    ("tensors", "codes"),
    [
        ([single(), replace(single(MOMENT, "optimizer"), index=(2, 2))], set()),  # another element
        ([run(), MOMENTUM], {"SYN221"}),
        ([run(), replace(MOMENTUM, index=(7, 3))], set()),
        ([run(), replace(MOMENTUM, shape=(32,), index=(9,))], set()),
        # Unsynchronized running statistics do not hide a flip.
        ([single(), MEAN], {"SYN220"}),
        ([ALONE], {"SYN220"}),
        ([replace(ALONE, evidence=Evidence(flipped_bits=9))], set()),
        ([ALONE, single("bn.running_var", "bn_var")], set()),
        ([ALONE, whole("bn.running_var", "bn_var", PAIR)], set()),
        # The gradient of a single element may be zero elsewhere, so the other tensors must agree.
        ([single(), whole("a")], set()),
        ([single(), whole(MOMENT, "optimizer")], set()),
        ([single(), by_digest("a")], set()),
        ([single(), STEP], set()),
        ([run(), whole("a")], set()),
        ([run(), STEP], set()),
        # A tensor of one element, digests, and too many tensors.
        ([single("logit_scale", shape=(), numel=1, index=(), extent="all")], set()),
        ([by_digest()], set()),
        (FLIPS[:4], {"SYN220"}),
        (FLIPS, set()),
        # The numbers describe one of two replica groups.
        ([single(clusters=((0,), (2,), (1,), (3,)), replica_groups=SHARDS)], set()),
        ([single(clusters=((0,), (2,)), replica_groups=SHARDS)], {"SYN220"}),
        # Most elements, scattered elements, all elements.
        ([run(mismatched=17)], set()),
        ([run(extent="scattered")], set()),
        ([run(mismatched=32, extent="all")], set()),
        ([run(shape=(2,), numel=2, mismatched=2, extent="all", index=(0,))], set()),
    ],
)
def test_near_misses_of_localized_damage(tensors: list[TensorDiff], codes: set[str]) -> None:
    """SYN220 and SYN221 require few elements of few tensors, and agreement elsewhere."""
    assert set(diagnose_four(*tensors)) == codes


NORMS = Evidence(norms=dict.fromkeys(range(4), 2.0))  # root mean square 1
NEAR_ZERO = rounded(max_ulp=5000, max_abs=2.0**-21, evidence=NORMS)
# Norms cover only the first elements of a large tensor, and so does the root mean square.
FIRST = Evidence(norms=dict.fromkeys(range(4), 0.01 * math.sqrt(MEASURED)))
COPY = rounded("ema.fc.weight", "ema")
STATISTIC = rounded("bn.running_mean", "bn_mean")
LARGER = {"max_ulp": 10**6}


@pytest.mark.parametrize(
    ("tensors", "fits"),
    [
        ([rounded(), rounded(MOMENT, "optimizer", max_ulp=4), STATISTIC], True),
        ([STATISTIC], True),
        ([replace(STATISTIC, max_ulp=500)], False),
        ([NEAR_ZERO], True),
        ([replace(NEAR_ZERO, max_abs=2.0**-17)], False),
        ([replace(NEAR_ZERO, max_abs=2.0**-17, evidence=None)], False),
        ([rounded(numel=2**24, max_ulp=99, max_abs=30 * 2.0**-23 * 0.01, evidence=FIRST)], True),
        # 16-bit floats allow 1 ULP, because 4 ULP of bfloat16 are 3 %. Shorter floats and integers allow no ULP.
        ([rounded(dtype="float64", max_ulp=4)], True),
        ([rounded(dtype="complex64", max_ulp=4)], True),
        ([rounded(max_ulp=5)], False),
        ([rounded(dtype="bfloat16")], True),
        ([rounded(dtype="bfloat16", max_ulp=2)], False),
        ([rounded(dtype="float16", max_ulp=2)], False),
        ([rounded(dtype="float8_e4m3fn")], False),
        ([rounded(dtype="int64", max_ulp=None)], False),
        # One larger difference excludes rounding.
        ([rounded(), whole("a", **LARGER)], False),
        ([rounded(), whole("optimizer.a.exp_avg", "optimizer", **LARGER)], False),
        ([rounded(), whole("optimizer.a.step", "optimizer_step", **LARGER)], False),
        ([rounded(), rounded("n", "buffer", dtype="int64", max_abs=1, max_ulp=None)], False),
        ([rounded(), by_digest("a")], False),
        # A bit flip, a tensor of one element, a possibly stale averaged copy, and a NaN on one rank.
        ([single(max_ulp=1)], False),
        ([rounded("tiny", numel=1, mismatched=1)], False),
        ([COPY], False),
        ([rounded(), COPY], True),
        ([rounded(nonfinite={0: 0, 1: 0, 2: 0, 3: 1})], False),
    ],
)
def test_240(tensors: list[TensorDiff], fits: bool) -> None:
    """Differences of a few ULP, or small relative to the tensor, are SYN240 if no larger difference exists."""
    finding = diagnose_four(*tensors).get("SYN240")
    assert (finding is not None) is fits
    assert finding is None or finding.tensors == tuple(list_names(tensors))


def test_240_beside_other_evidence() -> None:
    """SYN240 does not cover larger drift, excludes different settings, and mentions short floats without state."""
    assert diagnose_four(rounded(), replace(MEAN, max_ulp=10**6))["SYN240"].tensors == ("fc.weight",)
    facts = facts_of(diagnose_four(NEAR_ZERO)["SYN240"])[Rounding.ROUNDING_EPSILONS]
    assert (facts["epsilons"], facts["ulp"]) == (pytest.approx(4), 5000)
    rates = {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.2}
    setting = ValueDiff("optimizer.param_groups.0.lr", rates, counts=True, kind="setting")
    assert "SYN240" not in diagnose_four(rounded(), values=(setting,))
    short = four(rounded(dtype="bfloat16"))
    assert Rounding.SHORT_FLOATS not in facts_of(cases.diagnose_case(short)["SYN240"])
    del short.kinds["optimizer"]  # without compared state, 1 ULP is also consistent with different updates
    assert Rounding.SHORT_FLOATS in facts_of(cases.diagnose_case(short)["SYN240"])
