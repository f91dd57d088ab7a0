"""Combinations of faults, different shapes, extreme values and very many tensors."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from support import cases, progress_cases, small_model
from support.groups import facts_of
from support.listings import join_fields, list_codes, list_names, map_fields

from syncheck.api import compare
from syncheck.comparison import histograms
from syncheck.diagnose.statements import Common
from syncheck.records import TensorDiff, ValueDiff
from syncheck.tensors.blocks import Files

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Group

MANY = 4_000


def test_lost_state_beside_nan() -> None:
    """Optimizer state that one rank lacks is SYN215, even if SYN222 covers one of the tensors."""
    lost = progress_cases.missing((0, 1), *progress_cases.STATE)
    name, remaining = lost[0].name, lost[1:]
    nan = progress_cases.diff(name, "optimizer", {0: 1.0, 1: 2.0}, reason="missing", nonfinite={0: 1, 1: 0})
    findings = cases.diagnose_case(progress_cases.group(nan, *remaining, ranks=3, hyperparameters={"lr": 0.1}))
    assert set(findings) == {"SYN222", "SYN215"}
    assert findings["SYN215"].tensors == tuple(list_names(remaining))
    assert findings["SYN215"].ranks == (2,)


@pytest.mark.parametrize(("channels", "scale"), [(3, 1.0), (4, 1e200)], ids=["other shapes", "squares overflow"])
def test_extreme_statistics_at_one_step(tmp_path: Path, channels: int, scale: float) -> None:
    """Running statistics of another shape, or too large to be squared, do not stop the diagnosis."""
    for step in (1, 2, 3):
        for rank in (0, 1):
            torch.manual_seed(step * 8 + rank)
            is_odd = (step, rank) == (1, 1)
            size, factor = (channels, scale) if is_odd else (4, 1.0)
            model = {
                "bn.weight": torch.ones(4),
                "bn.running_mean": torch.randn(size).double() * factor,
                "bn.running_var": (torch.rand(size).double() + 0.5) * factor,
                "bn.num_batches_tracked": torch.tensor(step),
            }
            torch.save({"model": model}, tmp_path / f"run_step{step}_rank{rank}.pth")
    first, *_, last = compare(str(tmp_path)).groups
    assert channels == 4 or list_codes(first.findings) == ["SYN102"]
    assert last.findings[0].code in ("SYN201", "SYN202")


def make_large(count: int, kind: str) -> Group:
    """Return a group with many layers, every second of which differs, or with many different settings."""
    if kind == "values":
        names = (f"optimizer.l{i}.beta" for i in range(count))
        values = tuple(ValueDiff(name, {0: 1, 1: 2}, counts=True, kind="setting") for name in names)
        return small_model.group(small_model.make_diff("fc.weight"), values=values)
    layers = {f"{'ema.' * (kind == 'ema')}l{i}.weight": kind for i in range(count)}
    settings = {"mismatched": 2, "extent": "scattered", "cosine": 0.5, "norms": {0: 1.0, 1: 1.3}}
    outlier = (
        small_model.make_diff(name, kind, odd=(), replica_groups=((0, 1),), **settings) for name in list(layers)[::2]
    )
    return small_model.group(*outlier, more=layers)


@pytest.mark.parametrize("kind", ["parameter", "ema", "values"])
def test_time_is_proportional_to_differences(kind: str) -> None:
    """The time of a diagnosis is proportional to the number of differences, not to its square."""

    def measure(count: int) -> float:
        case = make_large(count, kind)
        start = time.process_time()
        findings = cases.diagnose_case(case)
        took = time.process_time() - start
        names = set(join_fields(findings.values(), "tensors"))
        assert names == set(list_names(case.tensors))
        return took

    large = min(measure(MANY) for _ in range(3))
    small = min(measure(MANY // 8) for _ in range(3))
    assert large < 32 * small


def test_cause_on_one_rank_hides_no_other_difference() -> None:
    """A tensor that also differs among the ranks outside the suspects has a second finding."""
    tensors = small_model.scaled(0.1, ranks=4)
    (finding,) = cases.diagnose_case(small_model.group(*tensors, ranks=4)).values()
    assert finding.code == "SYN213"
    assert finding.ranks == (3,)
    hit = replace(tensors[0], clusters=((0, 2), (1,), (3,)), minority=(1, 3))
    finding, other_finding = cases.diagnose_case(small_model.group(hit, *tensors[1:], ranks=4)).values()
    assert (finding.code, finding.ranks) == ("SYN213", (3,))
    assert (other_finding.code, other_finding.ranks, other_finding.tensors) == ("SYN299", (1,), (hit.name,))


def test_chance_agreement_is_no_majority() -> None:
    """If two of four ranks agree in only one tensor, no majority exists, and all ranks are suspects."""
    tensors = small_model.unreduced(ranks=4)
    chance = replace(tensors[2], clusters=((0, 1), (2,), (3,)), minority=(2, 3))
    finding = cases.diagnose_single(small_model.group(*tensors[:2], chance, *tensors[3:], ranks=4))
    assert (finding.code, finding.ranks) == ("SYN211", (0, 1, 2, 3))
    assert Common.NO_TWO_AGREE in facts_of(finding)


def test_skipped_step_on_a_rank_with_an_equal_scale() -> None:
    """A rank behind is SYN214 if the odd loss scale, a separate SYN216, is on another rank."""
    steps = {0: 12, 1: 11, 2: 12, 3: 12}
    scales = progress_cases.scaler(dict.fromkeys(steps, 65536.0) | {3: 16384.0})
    case = progress_cases.group(*progress_cases.trained(steps), ranks=4, values=scales)
    findings = cases.diagnose_case(case)
    assert map_fields(findings, "ranks") == {"SYN214": (1,), "SYN216": (3,)}
    assert findings["SYN216"].values == ("scaler.scale",)


def test_histograms_skip_unknown_dtypes() -> None:
    """Histograms skip tensors of unknown dtype."""
    lost = TensorDiff("weight", "parameter", "unknown", (4,), "not_compared", reason="missing", numel=4)
    with Files() as files:
        assert histograms.compute_histograms([lost], {"weight": {}}, files, lambda diff: True) == {}


def test_rmsprop_momentum_is_no_first_moment() -> None:
    """RMSprop's momentum proves neither clipped gradients (SYN213) nor unreduced gradients (SYN211)."""
    rmsprop = ("momentum_buffer", "square_avg", "step")
    for tensors in (
        small_model.scaled(0.5, state="momentum_buffer"),
        small_model.unreduced(state="momentum_buffer", cosine=0.91),
    ):
        assert cases.diagnose_single(small_model.group(*tensors, optimizer=rmsprop)).code == "SYN299"
        assert cases.diagnose_single(small_model.group(*tensors, optimizer=rmsprop[::2])).code in ("SYN211", "SYN213")
