"""Cases that no trainer plans: state that is missing beside what else is wrong, unlike shapes, very many tensors."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import progress_cases
import pytest
import small_model
import torch
from groups import facts_of

from syncheck.api import compare
from syncheck.diagnose.case import Common
from syncheck.evidence import histograms
from syncheck.kernel.blocks import Files
from syncheck.records import Evidence, TensorDiff, ValueDiff

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Group

MANY = 8_000


def test_lost_state_beside_nan_is_still_lost_state() -> None:
    """State that one rank lacks is SYN215 also where some of it is explained by NaNs already, and nothing breaks."""
    lost = progress_cases.missing((0, 1), *progress_cases.STATE)
    name, others = lost[0].name, lost[1:]
    nan = progress_cases.diff(name, "optimizer", {0: 1.0, 1: 2.0}, reason="missing", nonfinite={0: 1, 1: 0})
    found = progress_cases.found(progress_cases.group(nan, *others, ranks=3, hyperparameters={"lr": 0.1}))
    assert set(found) == {"SYN222", "SYN215"}
    assert found["SYN215"].tensors == tuple(diff.name for diff in others)
    assert found["SYN215"].ranks == (2,)


def save(folder: Path, rank: int, step: int, channels: int) -> None:
    """Write a model with BatchNorm of so many channels."""
    torch.manual_seed(step * 8 + rank)
    model = {
        "bn.weight": torch.ones(4),
        "bn.running_mean": torch.randn(channels),
        "bn.running_var": torch.rand(channels) + 0.5,
        "bn.num_batches_tracked": torch.tensor(step),
    }
    torch.save({"model": model}, folder / f"run_step{step}_rank{rank}.pth")


def test_statistics_of_unlike_shapes_at_an_earlier_step(tmp_path: Path) -> None:
    """A run whose ranks had statistics of unlike shapes at an earlier step is judged, not broken off."""
    for step in (1, 2, 3):
        for rank in (0, 1):
            save(tmp_path, rank, step, 3 if (step, rank) == (1, 1) else 4)
    first, *_, last = compare(str(tmp_path)).groups
    assert [finding.code for finding in first.findings] == ["SYN102"]
    assert last.findings[0].code in ("SYN201", "SYN202")


def every_other_layer(count: int, kind: str, prefix: str = "") -> Group:
    """Return a model of many layers, every other of which differs here and there."""
    names = {f"{prefix}l{i}.weight": kind for i in range(count)}
    apart = tuple(
        TensorDiff(
            name, kind, "float32", (8,), "different", replica_groups=((0, 1),), clusters=((0,), (1,)), mismatched=2,
            numel=8, max_abs=0.5, extent="scattered", evidence=Evidence(norms={0: 1.0, 1: 1.3}, cosine=0.5),
        )
        for name in list(names)[::2]
    )  # fmt: skip
    return small_model.group(*apart, more=names)


def settings(count: int) -> Group:
    """Return a model of which very many Python values differ, and one tensor."""
    values = tuple(ValueDiff(f"optimizer.l{i}.beta", {0: 1, 1: 2}, counts=True, kind="setting") for i in range(count))
    return small_model.group(small_model.apart("fc.weight"), values=values)


@pytest.mark.parametrize("kind", ["parameter", "ema", "values"])
def test_very_many_differences_take_time_in_proportion(kind: str) -> None:
    """Eight times as many differences take about eight times as long to diagnose, and not their square, 64 times."""

    def diagnosed(count: int) -> float:
        case = settings(count) if kind == "values" else every_other_layer(count, kind, "ema." * (kind == "ema"))
        start = time.process_time()
        found = small_model.found(case)
        took = time.process_time() - start
        names = {name for finding in found.values() for name in finding.tensors}
        assert names == {diff.name for diff in case.tensors}
        return took

    large, small = (min(diagnosed(count) for _ in range(3)) for count in (MANY, MANY // 8))
    assert large < 32 * small


def test_a_cause_on_one_rank_hides_no_difference_of_another() -> None:
    """Tensors that also differ among the other ranks get a finding of their own; tensors equal among them get none."""
    tensors = small_model.scaled(0.1, ranks=4)
    (finding,) = small_model.found(small_model.group(*tensors, ranks=4)).values()
    assert finding.code == "SYN213"
    assert finding.ranks == (3,)
    hit = replace(tensors[0], clusters=((0, 2), (1,), (3,)), minority=(1, 3))
    finding, other = small_model.found(small_model.group(hit, *tensors[1:], ranks=4)).values()
    assert (finding.code, finding.ranks) == ("SYN213", (3,))
    assert (other.code, other.ranks, other.tensors) == ("SYN299", (1,), (hit.name,))


def test_two_ranks_that_agree_by_chance_are_no_majority() -> None:
    """One tensor of many in which two ranks hold the same bytes leaves no majority, and all ranks are suspects."""
    tensors = small_model.unreduced(ranks=4)
    chance = replace(tensors[2], clusters=((0, 1), (2,), (3,)), minority=(2, 3))
    finding = small_model.only(small_model.group(*tensors[:2], chance, *tensors[3:], ranks=4))
    assert (finding.code, finding.ranks) == ("SYN211", (0, 1, 2, 3))
    assert Common.NO_TWO_AGREE in facts_of(finding)


def test_a_step_left_out_on_a_rank_whose_scale_agrees_is_not_the_scalers() -> None:
    """A rank behind is SYN214 where another rank has the odd loss scale, which is a SYN216 of its own."""
    steps = {0: 12, 1: 11, 2: 12, 3: 12}
    scales = progress_cases.scaler(dict.fromkeys(steps, 65536.0) | {3: 16384.0})
    case = progress_cases.group(*progress_cases.trained(steps), ranks=4, values=scales)
    found = progress_cases.found(case)
    assert {code: finding.ranks for code, finding in found.items()} == {"SYN214": (1,), "SYN216": (3,)}
    assert found["SYN216"].values == ("scaler.scale",)


def test_histograms_beside_a_tensor_of_unknown_dtype() -> None:
    """A page's histograms pass over a tensor of which the reader could not tell the dtype."""
    lost = TensorDiff("weight", "parameter", "unknown", (4,), "not_compared", reason="missing", numel=4)
    with Files() as files:
        assert histograms.add_histograms([lost], {"weight": {}}, files, lambda diff: True) == (lost,)


def test_the_momentum_of_rmsprop_is_no_first_moment() -> None:
    """RMSprop's momentum tells neither whose gradients are clipped (SYN213) nor that they are unreduced (SYN211)."""
    rmsprop = ("momentum_buffer", "square_avg", "step")
    for tensors in (
        small_model.scaled(0.5, state="momentum_buffer"),
        small_model.unreduced(state="momentum_buffer", cosine=0.91),
    ):
        assert small_model.only(small_model.group(*tensors, optimizer=rmsprop)).code == "SYN299"
        assert small_model.only(small_model.group(*tensors, optimizer=rmsprop[::2])).code in ("SYN211", "SYN213")


def test_statistics_whose_squares_overflow(tmp_path: Path) -> None:
    """A run of float64 statistics that are too large to be squared at one step is judged, not broken off."""
    for step in (1, 2, 3):
        for rank in (0, 1):
            save(tmp_path, rank, step, 4)
            path = tmp_path / f"run_step{step}_rank{rank}.pth"
            model = {name: tensor.double() for name, tensor in torch.load(path)["model"].items()}
            model["bn.num_batches_tracked"] = torch.tensor(step)
            for name in ("bn.running_mean", "bn.running_var"):
                model[name] *= 1e200 if (step, rank) == (1, 1) else 1.0
            torch.save({"model": model}, path)
    assert compare(str(tmp_path)).groups[-1].findings[0].code in ("SYN201", "SYN202")
