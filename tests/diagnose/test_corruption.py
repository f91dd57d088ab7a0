"""Damage by memory, disks and arithmetic (SYN220 to SYN223): matching cases and near misses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from groups import facts_of
from test_rules import diff, group
from test_rules import found as all_found

from syncheck.diagnose import syn220_bit_flip as syn220
from syncheck.diagnose import syn221_contiguous_corruption as syn221
from syncheck.diagnose import syn222_nonfinite_on_some_ranks as syn222
from syncheck.diagnose import syn223_damaged_on_disk as syn223
from syncheck.diagnose.case import Common
from syncheck.diagnose.localized import Localized
from syncheck.records import Evidence, Finding, Group, TensorDiff

OURS = {"SYN220", "SYN221", "SYN222", "SYN223", "SYN240"}
THREE_AND_ONE = ((0, 1, 2), (3,))
MEAN = diff("bn.running_mean", "bn_mean")
STEP = diff("optimizer.fc.weight.step", "optimizer_step", numel=1, mismatched=1)


def found(case: Group, *earlier: Group) -> dict[str, Finding]:
    """Diagnose, and return the findings of OURS by code."""
    return {code: finding for code, finding in all_found(case, *earlier).items() if code in OURS}


def single(
    name: str = "fc.weight", kind: str = "parameter", clusters: Any = THREE_AND_ONE, **changes: Any
) -> TensorDiff:
    """Return a tensor of 8 x 4 with one differing element, in bit 29."""
    fields = {"shape": (8, 4), "numel": 32, "mismatched": 1, "extent": "one", "index": (2, 1), "max_abs": 0.25}
    fields |= {"evidence": Evidence(values={0: 0.25, 1: 0.25, 2: 0.25, 3: 1e-20}, flipped_bits=1, bit=29)}
    return replace(diff(name, kind, clusters), **fields | changes)


def run(name: str = "fc.weight", kind: str = "parameter", clusters: Any = THREE_AND_ONE, **changes: Any) -> TensorDiff:
    """Return a tensor of 8 x 4 with 10 adjacent differing elements, the 7th to the 16th."""
    fields = {"shape": (8, 4), "numel": 32, "mismatched": 10, "extent": "contiguous", "index": (2, 1)}
    return replace(diff(name, kind, clusters), **fields | {"evidence": Evidence(first=6)} | changes)


def by_digest(name: str = "fc.weight", kind: str = "parameter", **changes: Any) -> TensorDiff:
    """Return a tensor that differs by its digest."""
    fields = {"mismatched": None, "max_abs": None, "index": None, "extent": None, "reason": "digest"}
    return replace(diff(name, kind, THREE_AND_ONE), **fields | changes)


def four(*tensors: TensorDiff, **fields: Any) -> Group:
    """Return a group of four ranks."""
    return group(*tensors, ranks=4, **fields)


class TestDamagedOnDisk:
    """SYN223."""

    def test_the_suspects_are_the_damaged_files(self) -> None:
        """A wrong checksum makes its file the suspect, even against a majority, and covers that tensor alone."""
        odd = single(evidence=Evidence(damaged=(1,), flipped_bits=1))
        fitted = all_found(four(odd))
        assert set(fitted) == {"SYN223", "SYN299"}
        assert (fitted["SYN223"].ranks, fitted["SYN223"].tensors) == ((1,), ("fc.weight",))
        assert (fitted["SYN299"].ranks, fitted["SYN299"].tensors) == ((3,), ("fc.weight",))
        assert found(four(odd, MEAN))["SYN223"].tensors == ("fc.weight",)
        assert fitted["SYN223"].facts == (
            syn223.Text.CHANGED(paths=("rank1.pth",)),
            syn223.Text.CHECKSUMS(count=1, ranks=(1,), names=("fc.weight",)),
        )

    def test_it_precedes_the_other_rules_on_damage(self) -> None:
        """NaNs, flips and runs with a wrong checksum are SYN223; without a wrong checksum they are not."""
        for made in (single(), run(), single(nonfinite={0: 0, 1: 0, 2: 0, 3: 1})):
            evidence = replace(made.evidence or Evidence(), damaged=(3,))
            assert set(found(four(replace(made, evidence=evidence)))) == {"SYN223"}
            assert "SYN223" not in found(four(made))
        assert "SYN223" not in found(four(by_digest()))

    def test_several_files(self) -> None:
        """All damaged files are suspects and listed."""
        first = single(evidence=Evidence(damaged=(1,)))
        fitted = found(four(first, run("a", evidence=Evidence(damaged=(2, 3)))))
        assert set(fitted) == {"SYN223"}
        assert fitted["SYN223"].ranks == (1, 2, 3)
        facts = facts_of(fitted["SYN223"])
        assert facts[syn223.Text.CHANGED]["paths"] == ("rank1.pth", "rank2.pth", "rank3.pth")
        assert facts[syn223.Text.CHECKSUMS]["names"] == ("fc.weight", "a")


class TestNonfinite:
    """SYN222."""

    def test_the_suspects_hold_more_of_them(self) -> None:
        """NaNs make their rank the suspect, whatever else differs; other tensors are left to other rules."""
        odd = single(max_abs=None, nonfinite={0: 0, 1: 0, 2: 0, 3: 1})
        fitted = found(four(odd, diff("a", "parameter", THREE_AND_ONE)))
        assert set(fitted) == {"SYN222"}
        assert (fitted["SYN222"].ranks, fitted["SYN222"].tensors) == ((3,), ("fc.weight",))
        assert fitted["SYN222"].facts == (
            syn222.Text.MORE_NONFINITE(ranks=(3,), tensors=1),
            syn222.Text.ELEMENTS(name="fc.weight", most=1, numel=32, ranks=(3,), least=0),
            Common.AGREE(ranks=(0, 1, 2)),
            Common.DIFFERS(ranks=(3,)),
        )

    def test_one_of_two_ranks_is_suspect(self) -> None:
        """Two ranks have no majority, but only one of them has the NaN."""
        odd = single(clusters=((0,), (1,)), nonfinite={0: 3, 1: 2})
        assert found(group(odd))["SYN222"].ranks == (0,)
        assert facts_of(found(group(odd))["SYN222"])[syn222.Text.ELEMENTS]["least"] == 2

    def test_equal_numbers_do_not_match(self) -> None:
        """Infinities on all ranks, such as masks, do not match, and neither do tensors without counts."""
        assert "SYN222" not in found(four(run(nonfinite=dict.fromkeys(range(4), 2))))
        assert "SYN222" not in found(four(by_digest()))

    def test_digests_with_counts(self) -> None:
        """Fingerprints contain the number of such elements, which identifies the rank."""
        assert found(four(by_digest(nonfinite={0: 0, 1: 0, 2: 0, 3: 2})))["SYN222"].ranks == (3,)

    def test_different_shards_are_not_compared(self) -> None:
        """Only ranks with the same shard are compared, because other shards may hold other numbers."""
        sharded = run(clusters=((0,), (2,)), replica_groups=((0, 2), (1, 3)), nonfinite={0: 0, 1: 5, 2: 0, 3: 5})
        assert "SYN222" not in found(four(sharded))
        one = replace(sharded, nonfinite={0: 0, 1: 5, 2: 1, 3: 5})
        assert found(four(one))["SYN222"].ranks == (2,)

    def test_a_rank_without_finite_parameters(self) -> None:
        """If most parameters of a rank have no finite element, the evidence says that gradients are not averaged."""
        odd = [diff(f"p{i}", "parameter", THREE_AND_ONE, nonfinite={0: 0, 1: 0, 2: 0, 3: 4}) for i in range(6)]
        assert facts_of(found(four(*odd))["SYN222"])[syn222.Text.NOTHING_ELSE] == {"count": 6}
        assert syn222.Text.NOTHING_ELSE not in facts_of(found(four(*odd[:5]))["SYN222"])


class TestBitFlip:
    """SYN220."""

    def test_one_bit_proves_it(self) -> None:
        """The evidence of a single bit contains rank, values and the part of the number."""
        fitted = found(four(single()))
        assert set(fitted) == {"SYN220"}
        assert (fitted["SYN220"].ranks, fitted["SYN220"].tensors) == ((3,), ("fc.weight",))
        assert fitted["SYN220"].facts == (
            syn220.Text.FLIPPED(element="fc.weight[2, 1]", bit=syn220.Text.BIT(bit=29, part="exponent")),
            syn220.Text.VALUES(values={0: 0.25, 1: 0.25, 2: 0.25, 3: 1e-20}),
            syn220.Text.REST_OF_TENSOR(others=31),
            Localized.REST_AGREES(parameters=10, states=20),
            Common.AGREE(ranks=(0, 1, 2)),
            Common.DIFFERS(ranks=(3,)),
        )
        assert found(group(single(clusters=((0,), (1,)))))["SYN220"].ranks == (0, 1)

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
    def test_the_part_of_the_number(self, dtype: str, bit: int, part: str | None) -> None:
        """Each dtype has its own positions of sign, exponent and mantissa; an integer has no such parts."""
        made = single(dtype=dtype, evidence=Evidence(flipped_bits=1, bit=bit))
        expected = syn220.Text.BIT(bit=bit, part=part) if part else syn220.Text.INTEGER_BIT(bit=bit)
        assert facts_of(found(four(made))["SYN220"])[syn220.Text.FLIPPED]["bit"] == expected

    def test_more_bits_are_consistent_with_one(self) -> None:
        """After later updates several bits differ, and the evidence is only consistent with a flip."""
        fitted = found(four(single(evidence=Evidence(values={0: 0.25, 3: 0.5}, flipped_bits=9))))
        facts = facts_of(fitted["SYN220"])
        assert fitted["SYN220"].facts[0] == syn220.Text.ONE_ELEMENT(element="fc.weight[2, 1]")
        assert (facts[syn220.Text.BITS], facts[syn220.Text.CONSISTENT]) == ({"bits": 9}, {})
        assert syn220.Text.CONSISTENT in facts_of(found(four(single(evidence=None)))["SYN220"])

    def test_an_earlier_step_may_prove_it(self) -> None:
        """If several bits differ now, a single bit of the moment at an earlier step proves the flip."""
        later = four(single(evidence=Evidence(flipped_bits=9)), step=20)
        names = {"optimizer.fc.weight.exp_avg": "optimizer"}
        earlier = four(single("optimizer.fc.weight.exp_avg", "optimizer"), step=10, names=names)
        assert facts_of(found(later, earlier)["SYN220"])[syn220.Text.FLIPPED_EARLIER] == {
            "step": 10,
            "element": "optimizer.fc.weight.exp_avg[2, 1]",
            "bit": syn220.Text.BIT(bit=29, part="exponent"),
        }
        elsewhere = replace(earlier, tensors=(replace(earlier.tensors[0], index=(0, 0)),))
        assert syn220.Text.CONSISTENT in facts_of(found(later, elsewhere)["SYN220"])

    def test_the_optimizer_follows(self) -> None:
        """The same element of the weight's moments and of its averaged copy has the same cause."""
        moment, copy = single("optimizer.fc.weight.exp_avg", "optimizer"), single("ema.fc.weight", "ema")
        fitted = found(four(single(), moment, copy))
        assert set(fitted) == {"SYN220"}
        assert len(fitted["SYN220"].tensors) == 3
        followers = ("optimizer.fc.weight.exp_avg", "ema.fc.weight")
        assert facts_of(fitted["SYN220"])[Localized.FOLLOWERS] == {"tensors": followers}
        assert set(found(four(single(), replace(moment, index=(2, 2))))) == set()
        alone = found(four(moment))["SYN220"]
        assert alone.facts[0].parameters["element"] == "optimizer.fc.weight.exp_avg[2, 1]"

    def test_local_statistics_are_ignored(self) -> None:
        """Local running statistics do not hide a flip, and the flip does not explain them."""
        fitted = found(four(single(), MEAN))
        assert fitted["SYN220"].tensors == ("fc.weight",)
        alone = single("bn.running_mean", "bn_mean")
        assert "SYN220" in found(four(alone))
        assert "SYN220" not in found(four(replace(alone, evidence=Evidence(flipped_bits=9))))
        assert "SYN220" not in found(four(alone, single("bn.running_var", "bn_var")))
        assert "SYN220" not in found(four(alone, diff("bn.running_var", "bn_var")))

    @pytest.mark.parametrize(
        "other",
        [
            diff("a", "parameter", THREE_AND_ONE),
            diff("optimizer.fc.weight.exp_avg", "optimizer", THREE_AND_ONE),
            by_digest("a"),
            STEP,
        ],
        ids=["parameter", "moment", "digest", "counter"],
    )
    def test_it_needs_agreement_elsewhere(self, other: TensorDiff) -> None:
        """A single element does not match if other tensors differ: its gradient may be zero elsewhere."""
        assert "SYN220" not in found(four(single(), other, stores_progress=True))

    def test_tensors_of_one_element_do_not_match(self) -> None:
        """A tensor of one element differs as a whole, which is no evidence of a flip."""
        scale = single("logit_scale", shape=(), numel=1, index=(), extent="all")
        assert set(found(four(scale))) == set()
        assert "SYN220" not in found(four(by_digest()))

    def test_at_most_four_tensors(self) -> None:
        """Flips in up to four tensors match; more do not, because memory rarely fails in so many places."""
        many = [single(f"p{i}") for i in range(5)]
        assert set(found(four(*many[:4]))) == {"SYN220"}
        assert set(found(four(*many))) == set()

    def test_several_replica_groups(self) -> None:
        """If several replica groups differ, the numbers describe only one of them, so the rule does not match."""
        both = single(clusters=((0,), (2,), (1,), (3,)), replica_groups=((0, 2), (1, 3)))
        assert "SYN220" not in found(four(both))
        assert "SYN220" in found(four(replace(both, clusters=((0,), (2,)))))


class TestContiguous:
    """SYN221."""

    def test_a_run_of_elements(self) -> None:
        """The evidence of adjacent elements contains rank, tensor, length and position."""
        fitted = found(four(run()))
        assert set(fitted) == {"SYN221"}
        assert (fitted["SYN221"].ranks, fitted["SYN221"].tensors) == ((3,), ("fc.weight",))
        assert fitted["SYN221"].facts == (
            syn221.Text.RUN(length=10, name="fc.weight", numel=32),
            syn221.Text.POSITION(first=6, last=15),
            Common.LARGEST(difference=0.5, element="fc.weight[2, 1]"),
            Localized.REST_AGREES(parameters=10, states=20),
            Common.AGREE(ranks=(0, 1, 2)),
            Common.DIFFERS(ranks=(3,)),
        )
        assert found(group(run(clusters=((0,), (1,)))))["SYN221"].ranks == (0, 1)

    def test_whole_rows_may_have_another_cause(self) -> None:
        """A run of whole rows is also consistent with rows that each rank filled on its own."""
        rows = run(mismatched=8, index=(1, 2), evidence=Evidence(first=4))
        assert facts_of(found(four(rows))["SYN221"])[syn221.Text.ROWS] == {"first": 1, "last": 2}
        one_row = replace(rows, mismatched=4, index=(1, 2))
        assert facts_of(found(four(one_row))["SYN221"])[syn221.Text.ONE_ROW] == {"first": 1}
        assert syn221.Text.ROWS not in facts_of(found(four(replace(rows, evidence=None)))["SYN221"])
        bias = run(shape=(32,), index=(8,), evidence=Evidence(first=4))
        assert syn221.Text.ROWS not in facts_of(found(four(bias))["SYN221"])

    def test_the_optimizer_follows(self) -> None:
        """The moments of the weight may differ in elements of the run, but not elsewhere."""
        moment = run("optimizer.fc.weight.momentum_buffer", "optimizer", mismatched=7, extent="scattered")
        assert set(found(four(run(), moment))) == {"SYN221"}
        assert set(found(four(run(), replace(moment, index=(7, 3))))) == set()
        assert set(found(four(run(), replace(moment, shape=(32,), index=(9,))))) == set()

    def test_two_tensors_of_one_bucket(self) -> None:
        """A run that includes one element of the next tensor is one corruption."""
        fitted = found(four(run(), single("fc.bias")))
        assert set(fitted) == {"SYN221"}
        assert facts_of(fitted["SYN221"])[Localized.ONE_ELEMENT] == {"element": "fc.bias[2, 1]", "numel": 32}

    @pytest.mark.parametrize(
        "near",
        [
            run(mismatched=17),
            run(extent="scattered"),
            run(mismatched=32, extent="all"),
            run(shape=(2,), numel=2, mismatched=2, extent="all", index=(0,)),
            by_digest(),
        ],
        ids=["most of it", "scattered", "all", "both of two", "digest"],
    )
    def test_other_extents(self, near: TensorDiff) -> None:
        """Most elements, all elements and scattered elements do not match."""
        assert "SYN221" not in found(four(near))

    def test_it_needs_agreement_elsewhere(self) -> None:
        """A run does not match if other tensors differ too."""
        assert "SYN221" not in found(four(run(), diff("a", "parameter", THREE_AND_ONE)))
        assert "SYN221" not in found(four(run(), STEP, stores_progress=True))
        assert "SYN221" not in found(four(single()))
