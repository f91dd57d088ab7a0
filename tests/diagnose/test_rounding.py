"""SYN240: differences of the size of rounding, and near misses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from groups import facts_of
from test_corruption import MEAN, THREE_AND_ONE, by_digest, found, four, single
from test_rules import diff, group

from syncheck.diagnose.case import Common
from syncheck.diagnose.syn240_rounding_only import Text
from syncheck.records import MEASURED, Evidence, TensorDiff, ValueDiff


def rounded(
    name: str = "fc.weight", kind: str = "parameter", clusters: Any = THREE_AND_ONE, **changes: Any
) -> TensorDiff:
    """Return a tensor whose elements all differ by one rounding step."""
    fields = {"mismatched": 4, "max_abs": 1e-8, "max_ulp": 1, "max_rel": 1e-7}
    return replace(diff(name, kind, clusters), **fields | changes)


class TestRoundingOnly:
    """SYN240."""

    def test_a_few_steps_everywhere(self) -> None:
        """Differences of up to 4 ULP are rounding, in parameters, moments and statistics."""
        tensors = (
            rounded(),
            rounded("optimizer.fc.weight.exp_avg", "optimizer", max_ulp=4),
            rounded("bn.running_mean", "bn_mean"),
        )
        fitted = found(four(*tensors))
        assert set(fitted) == {"SYN240"}
        assert (fitted["SYN240"].ranks, len(fitted["SYN240"].tensors)) == ((3,), 3)
        assert fitted["SYN240"].severity == "warning"
        assert fitted["SYN240"].facts == (
            Text.ROUNDING_STEPS(ulp=4, elements=12, tensors=3),
            Common.LARGEST(difference=1e-08, element="fc.weight[1]"),
            Common.AGREE(ranks=(0, 1, 2)),
            Common.DIFFERS(ranks=(3,)),
        )
        assert found(group(rounded(clusters=((0,), (1,)))))["SYN240"].ranks == (0, 1)

    def test_statistics_alone(self) -> None:
        """Running statistics that differ by a rounding step are not local; larger differences are."""
        assert set(found(four(rounded("bn.running_mean", "bn_mean")))) == {"SYN240"}
        assert set(found(four(rounded("bn.running_mean", "bn_mean", max_ulp=500)))) == set()
        fitted = found(four(rounded(), replace(MEAN, max_ulp=10**6)))
        assert fitted["SYN240"].tensors == ("fc.weight",)

    def test_near_zero(self) -> None:
        """An old rounding difference is many ULP near zero, so it is measured against the size of the tensor."""
        norms = dict.fromkeys(range(4), 2.0)  # root mean square 1
        fitted = found(four(rounded(max_ulp=5000, max_abs=2.0**-21, evidence=Evidence(norms=norms))))
        facts = facts_of(fitted["SYN240"])[Text.ROUNDING_EPSILONS]
        assert (facts["epsilons"], facts["ulp"]) == (pytest.approx(4), 5000)
        far = rounded(max_ulp=5000, max_abs=2.0**-17, evidence=Evidence(norms=norms))
        assert set(found(four(far))) == set()
        assert set(found(four(replace(far, evidence=None)))) == set()

    def test_norms_of_large_tensors(self) -> None:
        """Norms cover only the first elements of a large tensor, and so does the root mean square."""
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
    def test_limits_by_dtype(self, dtype: str, steps: int | None, fits: bool) -> None:
        """16-bit floats allow one step, because 4 ULP of bfloat16 are 3 %; shorter floats and integers allow none."""
        assert ("SYN240" in found(four(rounded(dtype=dtype, max_ulp=steps)))) is fits

    def test_short_floats_without_moments(self) -> None:
        """Without compared optimizer state, one step of bfloat16 is also consistent with different updates."""
        assert Text.SHORT_FLOATS not in facts_of(found(four(rounded(dtype="bfloat16")))["SYN240"])
        bare = four(rounded(dtype="bfloat16"))
        del bare.kinds["optimizer"]
        assert Text.SHORT_FLOATS in facts_of(found(bare)["SYN240"])

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
    def test_one_larger_difference_excludes_it(self, other: TensorDiff) -> None:
        """Small differences of parameters do not match beside a larger difference of another tensor."""
        assert "SYN240" not in found(four(rounded(), other, stores_progress=True))

    def test_settings_exclude_it(self) -> None:
        """Different settings explain small differences better than rounding."""
        setting = ValueDiff(
            "optimizer.param_groups.0.lr", {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.2}, counts=True, kind="setting"
        )
        assert "SYN240" not in found(four(rounded(), values=(setting,)))

    def test_near_misses(self) -> None:
        """A single element is a bit flip, averaged copies alone may be stale, and a NaN on one rank is SYN222."""
        assert set(found(four(single(max_ulp=1)))) == {"SYN220"}
        assert set(found(four(rounded("tiny", numel=1, mismatched=1)))) == set()
        assert "SYN240" not in found(four(rounded("ema.fc.weight", "ema")))
        assert "SYN240" in found(four(rounded(), rounded("ema.fc.weight", "ema")))
        assert "SYN240" not in found(four(rounded(nonfinite={0: 0, 1: 0, 2: 0, 3: 1})))
