"""SYN240: gaps of the size of rounding, and the near misses of its neighbours."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from test_corruption import MEAN, THREE_AND_ONE, by_digest, found, four, single
from test_rules import diff, group

from syncheck.records import MEASURED, Evidence, TensorDiff, ValueDiff


def rounded(
    name: str = "fc.weight", kind: str = "parameter", clusters: Any = THREE_AND_ONE, **changes: Any
) -> TensorDiff:
    """Return a tensor of which every element differs by one rounding step."""
    fields = {"mismatched": 4, "max_abs": 1e-8, "max_ulp": 1, "max_rel": 1e-7}
    return replace(diff(name, kind, clusters), **fields | changes)


class TestRoundingOnly:
    """SYN240."""

    def test_a_few_steps_everywhere(self) -> None:
        """Gaps of up to 4 ULP in all that differs are rounding, in parameters, moments and statistics."""
        tensors = (
            rounded(),
            rounded("optimizer.fc.weight.exp_avg", "optimizer", max_ulp=4),
            rounded("bn.running_mean", "bn_mean"),
        )
        fitted = found(four(*tensors))
        assert set(fitted) == {"SYN240"}
        assert (fitted["SYN240"].ranks, len(fitted["SYN240"].tensors)) == ((3,), 3)
        assert fitted["SYN240"].severity == "warning"
        assert fitted["SYN240"].evidence == (
            "3 tensors differ in 12 elements, all by at most 4 ULP, largest gap 1e-08 in fc.weight[1]; "
            "ranks 0, 1, 2 agree; rank 3 apart"
        )
        assert found(group(rounded(clusters=((0,), (1,)))))["SYN240"].ranks == (0, 1)

    def test_statistics_alone(self) -> None:
        """Running statistics a rounding step apart are not each rank's own; those further apart are."""
        assert set(found(four(rounded("bn.running_mean", "bn_mean")))) == {"SYN240"}
        assert set(found(four(rounded("bn.running_mean", "bn_mean", max_ulp=500)))) == set()
        fitted = found(four(rounded(), replace(MEAN, max_ulp=10**6)))
        assert fitted["SYN240"].tensors == ("fc.weight",)

    def test_near_zero(self) -> None:
        """An old rounding gap is many ULP of an element near zero: then the tensor's own size is the measure."""
        norms = dict.fromkeys(range(4), 2.0)  # root mean square 1
        fitted = found(four(rounded(max_ulp=5000, max_abs=2.0**-21, evidence=Evidence(norms=norms))))
        assert "all by at most 4 epsilons of the tensor's root mean square (5000 ULP near zero)" in (
            fitted["SYN240"].evidence
        )
        far = rounded(max_ulp=5000, max_abs=2.0**-17, evidence=Evidence(norms=norms))
        assert set(found(four(far))) == set()
        assert set(found(four(replace(far, evidence=None)))) == set()

    def test_the_norm_is_of_a_large_tensors_start(self) -> None:
        """Norms are of so many elements from the first, and so the root mean square is too."""
        norms = dict.fromkeys(range(4), 0.01 * math.sqrt(MEASURED))
        large = rounded(numel=2**24, max_ulp=99, max_abs=30 * 2.0**-23 * 0.01, evidence=Evidence(norms=norms))
        assert set(found(four(large))) == {"SYN240"}

    @pytest.mark.parametrize(
        ("dtype", "steps", "fits"),
        [
            ("float64", 4, True),
            ("float32", 5, False),
            ("complex64", 4, True),
            ("bfloat16", 1, True),
            ("bfloat16", 2, False),
            ("float16", 2, False),
            ("float8_e4m3fn", 1, False),
            ("int64", None, False),
        ],
    )
    def test_what_a_step_means(self, dtype: str, steps: int | None, fits: bool) -> None:
        """4 ULP of bfloat16 are 3 %: of short floats one step is rounding, of the shortest and of integers none."""
        assert ("SYN240" in found(four(rounded(dtype=dtype, max_ulp=steps)))) is fits

    def test_short_floats_without_moments(self) -> None:
        """Where no optimizer's state was compared, one step of bfloat16 may be an update that differs: told so."""
        text = found(four(rounded(dtype="bfloat16")))["SYN240"].evidence
        assert "consistent with" not in text
        bare = four(rounded(dtype="bfloat16"))
        del bare.kinds["optimizer"]
        assert "consistent with unlike updates" in found(bare)["SYN240"].evidence

    @pytest.mark.parametrize(
        "other",
        [
            diff("a", "parameter", THREE_AND_ONE, max_ulp=10**6),
            diff("optimizer.a.exp_avg", "optimizer", THREE_AND_ONE, max_ulp=10**6),
            diff("optimizer.a.step", "optimizer_step", THREE_AND_ONE, max_ulp=10**6),
            rounded("n", "buffer", dtype="int64", max_abs=1, max_ulp=None),
            by_digest("a"),
        ],
        ids=["parameter", "moment", "counter", "integer", "digest"],
    )
    def test_one_larger_gap_rules_it_out(self, other: TensorDiff) -> None:
        """Parameters near each other with moments, counters or integers apart went apart by more than rounding."""
        assert "SYN240" not in found(four(rounded(), other, stores_progress=True))

    def test_values_rule_it_out(self) -> None:
        """Settings that differ explain small gaps better than rounding does."""
        setting = ValueDiff(
            "optimizer.param_groups.0.lr", {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.2}, counts=True, kind="setting"
        )
        assert "SYN240" not in found(four(rounded(), values=(setting,)))

    def test_its_neighbours(self) -> None:
        """One element is a flip; averaged copies alone are stale by as little; a NaN on one side is SYN222."""
        assert set(found(four(single(max_ulp=1)))) == {"SYN220"}
        assert set(found(four(rounded("tiny", numel=1, mismatched=1)))) == set()
        assert "SYN240" not in found(four(rounded("ema.fc.weight", "ema")))
        assert "SYN240" in found(four(rounded(), rounded("ema.fc.weight", "ema")))
        assert "SYN240" not in found(four(rounded(nonfinite={0: 0, 1: 0, 2: 0, 3: 1})))
