"""What memory, disks and arithmetic do: each rule fires on its own signature and is silent on its neighbours'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_rules import diff, group
from test_rules import found as all_found

from syncheck.records import Evidence, Finding, Group, TensorDiff

OURS = {"SYN220", "SYN221", "SYN222", "SYN223", "SYN240"}
THREE_AND_ONE = ((0, 1, 2), (3,))
MEAN = diff("bn.running_mean", "bn_mean")
STEP = diff("optimizer.fc.weight.step", "optimizer_step", numel=1, mismatched=1)


def found(case: Group, *earlier: Group) -> dict[str, Finding]:
    """Diagnose, and return those findings by code that this file is about."""
    return {code: finding for code, finding in all_found(case, *earlier).items() if code in OURS}


def single(
    name: str = "fc.weight", kind: str = "parameter", clusters: Any = THREE_AND_ONE, **changes: Any
) -> TensorDiff:
    """Return a tensor of 8 x 4 of which one element differs, in bit 29."""
    fields = {"shape": (8, 4), "numel": 32, "mismatched": 1, "extent": "one", "index": (2, 1), "max_abs": 0.25}
    fields |= {"evidence": Evidence(values={0: 0.25, 1: 0.25, 2: 0.25, 3: 1e-20}, flipped_bits=1, bit=29)}
    return replace(diff(name, kind, clusters), **fields | changes)


def run(name: str = "fc.weight", kind: str = "parameter", clusters: Any = THREE_AND_ONE, **changes: Any) -> TensorDiff:
    """Return a tensor of 8 x 4 of which 10 adjacent elements differ, the 7th to the 16th."""
    fields = {"shape": (8, 4), "numel": 32, "mismatched": 10, "extent": "contiguous", "index": (2, 1)}
    return replace(diff(name, kind, clusters), **fields | {"evidence": Evidence(first=6)} | changes)


def by_digest(name: str = "fc.weight", kind: str = "parameter", **changes: Any) -> TensorDiff:
    """Return a tensor of which only digests tell that it differs."""
    fields = {"mismatched": None, "max_abs": None, "index": None, "extent": None, "reason": "digest"}
    return replace(diff(name, kind, THREE_AND_ONE), **fields | changes)


def four(*tensors: TensorDiff, **fields: Any) -> Group:
    """Return a group of four ranks."""
    return group(*tensors, ranks=4, **fields)


class TestDamagedOnDisk:
    """SYN223."""

    def test_the_suspects_are_the_damaged_files(self) -> None:
        """A checksum that does not match names its file, even against a majority, and covers that tensor alone."""
        odd = single(evidence=Evidence(damaged=(1,), flipped_bits=1))
        fitted = all_found(four(odd))
        assert set(fitted) == {"SYN223", "SYN299"}
        assert (fitted["SYN223"].ranks, fitted["SYN223"].tensors) == ((1,), ("fc.weight",))
        assert (fitted["SYN299"].ranks, fitted["SYN299"].tensors) == ((3,), ("fc.weight",))
        assert found(four(odd, MEAN))["SYN223"].tensors == ("fc.weight",)
        assert fitted["SYN223"].evidence == (
            "1 tensor of rank 1 does not match the CRC-32 that torch.save stored: fc.weight, in rank1.pth"
        )

    def test_it_comes_before_all_that_damage_looks_like(self) -> None:
        """Damage that makes NaNs, flips or runs is damage; the same without a wrong checksum is not."""
        for made in (single(), run(), single(nonfinite={0: 0, 1: 0, 2: 0, 3: 1})):
            evidence = replace(made.evidence or Evidence(), damaged=(3,))
            assert set(found(four(replace(made, evidence=evidence)))) == {"SYN223"}
            assert "SYN223" not in found(four(made))
        assert "SYN223" not in found(four(by_digest()))

    def test_several_files(self) -> None:
        """Files damaged in several tensors are all named."""
        first = single(evidence=Evidence(damaged=(1,)))
        fitted = found(four(first, run("a", evidence=Evidence(damaged=(2, 3)))))
        assert set(fitted) == {"SYN223"}
        assert fitted["SYN223"].ranks == (1, 2, 3)
        assert fitted["SYN223"].evidence.endswith("fc.weight, a, in rank1.pth, rank2.pth, rank3.pth")


class TestNonfinite:
    """SYN222."""

    def test_the_suspects_hold_more_of_them(self) -> None:
        """NaNs on one rank are its, whatever else differs; the rest is left to other rules."""
        odd = single(max_abs=None, nonfinite={0: 0, 1: 0, 2: 0, 3: 1})
        fitted = found(four(odd, diff("a", "parameter", THREE_AND_ONE)))
        assert set(fitted) == {"SYN222"}
        assert (fitted["SYN222"].ranks, fitted["SYN222"].tensors) == ((3,), ("fc.weight",))
        assert fitted["SYN222"].evidence == (
            "1 tensor holds more NaNs and infinities on rank 3: 1 of 32 elements of fc.weight on rank 3, none "
            "elsewhere; ranks 0, 1, 2 agree; rank 3 apart"
        )

    def test_of_two_ranks_one_is_named(self) -> None:
        """Two ranks have no majority, but only one of them has the NaN."""
        odd = single(clusters=((0,), (1,)), nonfinite={0: 3, 1: 2})
        assert found(group(odd))["SYN222"].ranks == (0,)
        assert "2 elsewhere" in found(group(odd))["SYN222"].evidence

    def test_equal_numbers_of_them_are_no_sign(self) -> None:
        """Infinities that all ranks hold, as masks do, do not make it; without counts nothing is claimed."""
        assert "SYN222" not in found(four(run(nonfinite=dict.fromkeys(range(4), 2))))
        assert "SYN222" not in found(four(by_digest()))

    def test_digests_that_count_them_tell(self) -> None:
        """Fingerprints keep how many there are: enough to name the rank."""
        assert found(four(by_digest(nonfinite={0: 0, 1: 0, 2: 0, 3: 2})))["SYN222"].ranks == (3,)

    def test_shards_are_not_held_against_each_other(self) -> None:
        """Of a sharded tensor only ranks with the same part are compared: other parts may hold other numbers."""
        sharded = run(clusters=((0,), (2,)), replica_groups=((0, 2), (1, 3)), nonfinite={0: 0, 1: 5, 2: 0, 3: 5})
        assert "SYN222" not in found(four(sharded))
        one = replace(sharded, nonfinite={0: 0, 1: 5, 2: 1, 3: 5})
        assert found(four(one))["SYN222"].ranks == (2,)

    def test_a_rank_that_is_all_nan_was_not_averaged(self) -> None:
        """Where most parameters of a rank hold nothing else, the evidence says what follows from it."""
        odd = [diff(f"p{i}", "parameter", THREE_AND_ONE, nonfinite={0: 0, 1: 0, 2: 0, 3: 4}) for i in range(6)]
        assert "gradients have not been averaged since" in found(four(*odd))["SYN222"].evidence
        assert "averaged" not in found(four(*odd[:5]))["SYN222"].evidence


class TestBitFlip:
    """SYN220."""

    def test_one_bit_proves_it(self) -> None:
        """One bit of one element names rank, values, and the part of the number that the bit belongs to."""
        fitted = found(four(single()))
        assert set(fitted) == {"SYN220"}
        assert (fitted["SYN220"].ranks, fitted["SYN220"].tensors) == ((3,), ("fc.weight",))
        assert fitted["SYN220"].evidence == (
            "one element of 32 differs in fc.weight[2, 1], 0.25 on ranks 0, 1, 2 and 1e-20 on rank 3: in one bit, "
            "bit 29 (exponent); all else of 10 parameters and 20 optimizer tensors agrees; "
            "ranks 0, 1, 2 agree; rank 3 apart"
        )
        assert found(group(single(clusters=((0,), (1,)))))["SYN220"].ranks == (0, 1)

    @pytest.mark.parametrize(
        ("dtype", "bit", "part"),
        [
            ("float32", 22, "bit 22 (mantissa)"),
            ("float32", 31, "bit 31 (sign)"),
            ("bfloat16", 7, "bit 7 (exponent)"),
            ("float16", 15, "bit 15 (sign)"),
            ("float8_e8m0fnu", 7, "bit 7 (exponent)"),
            ("int64", 3, "bit 3"),
        ],
    )
    def test_the_part_of_the_number(self, dtype: str, bit: int, part: str) -> None:
        """Sign, exponent and mantissa lie elsewhere in each dtype; an integer has no such parts."""
        made = single(dtype=dtype, evidence=Evidence(flipped_bits=1, bit=bit))
        assert f"in one bit, {part};" in found(four(made))["SYN220"].evidence

    def test_values_are_told_apart(self) -> None:
        """As many digits are shown as the values need; integers have them all."""
        near = Evidence(values={0: 0.1, 1: 0.1, 2: 0.1, 3: 0.10000001}, flipped_bits=1, bit=0)
        assert "0.1 on ranks 0, 1, 2 and 0.10000001 on rank 3" in found(four(single(evidence=near)))["SYN220"].evidence
        whole = Evidence(values={0: 2**62, 3: 2**62 + 1}, flipped_bits=1, bit=0)
        assert (
            f", {2**62} on rank 0 and {2**62 + 1} on rank 3:" in found(four(single(evidence=whole)))["SYN220"].evidence
        )

    def test_more_bits_are_consistent_with_one(self) -> None:
        """After later updates the bits are no proof any more: the evidence claims no more than it can."""
        fitted = found(four(single(evidence=Evidence(values={0: 0.25, 3: 0.5}, flipped_bits=9))))
        assert "in 9 bits, which is consistent with a flip before a later update" in fitted["SYN220"].evidence
        assert "consistent with" in found(four(single(evidence=None)))["SYN220"].evidence

    def test_an_earlier_step_may_prove_it(self) -> None:
        """What is many bits now and was one bit of the moment at an earlier step is told so."""
        later = four(single(evidence=Evidence(flipped_bits=9)), step=20)
        names = {"optimizer.fc.weight.exp_avg": "optimizer"}
        earlier = four(single("optimizer.fc.weight.exp_avg", "optimizer"), step=10, names=names)
        text = found(later, earlier)["SYN220"].evidence
        assert "at step 10 optimizer.fc.weight.exp_avg[2, 1] differed in one bit, bit 29 (exponent)" in text
        elsewhere = replace(earlier, tensors=(replace(earlier.tensors[0], index=(0, 0)),))
        assert "consistent with" in found(later, elsewhere)["SYN220"].evidence

    def test_the_optimizer_follows(self) -> None:
        """The same element of the weight's own moments, and of its averaged copy, is the same cause."""
        moment, copy = single("optimizer.fc.weight.exp_avg", "optimizer"), single("ema.fc.weight", "ema")
        fitted = found(four(single(), moment, copy))
        assert set(fitted) == {"SYN220"}
        assert len(fitted["SYN220"].tensors) == 3
        assert ", and so do its exp_avg and ema.fc.weight there;" in fitted["SYN220"].evidence
        assert set(found(four(single(), replace(moment, index=(2, 2))))) == set()
        alone = found(four(moment))["SYN220"]
        assert "differs in optimizer.fc.weight.exp_avg[2, 1]" in alone.evidence

    def test_drifting_statistics_are_another_matter(self) -> None:
        """Running statistics of each rank's own do not hide a flip, and are not explained by it."""
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
    def test_where_more_differs_it_is_no_flip(self, other: TensorDiff) -> None:
        """One element among much that differs is chance: a unit whose gradient was zero everywhere else."""
        assert "SYN220" not in found(four(single(), other, stores_progress=True))

    def test_single_numbers_are_no_flip(self) -> None:
        """A counter, a temperature or a tensor of one element is wholly apart, and no flip by that alone."""
        scale = single("logit_scale", shape=(), numel=1, index=(), extent="all")
        assert set(found(four(scale))) == set()
        assert "SYN220" not in found(four(by_digest()))

    def test_a_few_places_and_many(self) -> None:
        """Flips in up to four tensors are told together; more are not, for memory seldom fails so finely."""
        many = [single(f"p{i}") for i in range(5)]
        assert set(found(four(*many[:4]))) == {"SYN220"}
        assert set(found(four(*many))) == set()

    def test_several_replica_groups(self) -> None:
        """Of several parts that differ only the worst is described: nothing is claimed of the others."""
        both = single(clusters=((0,), (2,), (1,), (3,)), replica_groups=((0, 2), (1, 3)))
        assert "SYN220" not in found(four(both))
        assert "SYN220" in found(four(replace(both, clusters=((0,), (2,)))))


class TestContiguous:
    """SYN221."""

    def test_a_run_of_elements(self) -> None:
        """Adjacent elements of one tensor name rank, tensor, length and place."""
        fitted = found(four(run()))
        assert set(fitted) == {"SYN221"}
        assert (fitted["SYN221"].ranks, fitted["SYN221"].tensors) == ((3,), ("fc.weight",))
        assert fitted["SYN221"].evidence == (
            "10 adjacent elements of 32 differ in fc.weight, from 6 to 15 in C order; largest gap 0.5 in "
            "fc.weight[2, 1]; all else of 10 parameters and 20 optimizer tensors agrees; "
            "ranks 0, 1, 2 agree; rank 3 apart"
        )
        assert found(group(run(clusters=((0,), (1,)))))["SYN221"].ranks == (0, 1)

    def test_whole_rows_may_have_another_cause(self) -> None:
        """A run of whole rows is also consistent with rows that each rank filled by itself, and told so."""
        rows = run(mismatched=8, index=(1, 2), evidence=Evidence(first=4))
        assert "(exactly rows 1 to 2, so it is also consistent with" in found(four(rows))["SYN221"].evidence
        assert "rows" not in found(four(replace(rows, evidence=None)))["SYN221"].evidence
        bias = run(shape=(32,), index=(8,), evidence=Evidence(first=4))
        assert "rows" not in found(four(bias))["SYN221"].evidence

    def test_the_optimizer_follows(self) -> None:
        """The moments of the same weight may differ within the run, in gaps too; elsewhere they have another cause."""
        moment = run("optimizer.fc.weight.momentum_buffer", "optimizer", mismatched=7, extent="scattered")
        assert set(found(four(run(), moment))) == {"SYN221"}
        assert set(found(four(run(), replace(moment, index=(7, 3))))) == set()
        assert set(found(four(run(), replace(moment, shape=(32,), index=(9,))))) == set()

    def test_two_tensors_of_one_bucket(self) -> None:
        """A run that reaches into the next tensor by one element is one corruption."""
        fitted = found(four(run(), single("fc.bias")))
        assert set(fitted) == {"SYN221"}
        assert "one element of 32 differs in fc.bias[2, 1]" in fitted["SYN221"].evidence

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
        """Most of a tensor, all of it, or elements here and there are no run."""
        assert "SYN221" not in found(four(near))

    def test_where_more_differs_it_is_no_corruption(self) -> None:
        """Rows of an embedding that were trained by themselves differ with all else: not a bad copy."""
        assert "SYN221" not in found(four(run(), diff("a", "parameter", THREE_AND_ONE)))
        assert "SYN221" not in found(four(run(), STEP, stores_progress=True))
        assert "SYN221" not in found(four(single()))
