"""Findings on initialization, averaged copies and unexplained differences: matching cases and near misses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from groups import facts_of
from small_model import DECAY, HALF, MODEL, SGD, apart, by_digest, decayed, found, group, moment, only, start, unreduced

from syncheck.diagnose import syn210_init_not_broadcast as syn210
from syncheck.diagnose import syn218_frozen_not_broadcast as syn218
from syncheck.diagnose import syn219_averaged_copy_stale as syn219
from syncheck.diagnose import syn299_unexplained_difference as syn299
from syncheck.diagnose.case import Common
from syncheck.diagnose.gradients import Course
from syncheck.snapshots import Metadata


@pytest.mark.parametrize(("ranks", "suspects"), [(2, (0, 1)), (4, (3,))])
def test_210(ranks: int, suspects: tuple[int, ...]) -> None:
    """Parameters with different directions, while the optimizer agrees, are SYN210 on the odd rank, if there is one."""
    fitted = only(group(*start(ranks), ranks=ranks))
    assert (fitted.code, fitted.ranks) == ("SYN210", suspects)
    summary = syn210.Text.DIFFERENT_STARTS() if ranks == 2 else syn210.Text.OTHER_START(ranks=suspects)
    assert fitted.facts[0] == summary
    facts = facts_of(fitted)
    assert (facts[Common.PARAMETERS]["count"], facts[Common.PARAMETERS]["total"]) == (3, 5)
    assert facts[syn210.Text.COSINE] == {"cosine": pytest.approx(0.03)}
    assert facts[syn210.Text.AGREEING] == {"count": 2, "names": ("bn.bias", "bn.weight")}
    assert facts[syn210.Text.OPTIMIZER_AGREES] == {"tensors": 10}


def test_210_covers_running_statistics() -> None:
    """Running statistics behind different parameters are part of SYN210, and not unexplained."""
    statistic = apart("bn.running_mean", "bn_mean")
    fitted = only(group(*start(), statistic, more={"bn.running_mean": "bn_mean"}))
    assert fitted.code == "SYN210"
    assert facts_of(fitted)[Course.STATISTICS_TOO] == {"count": 1}


def test_210_with_sgd() -> None:
    """A momentum that differs by weight decay alone does not exclude SYN210; a larger difference does."""
    fitted = only(group(*start(), *decayed(0.005 * 0.5 * 1.04), optimizer=SGD, hyperparameters=DECAY))
    assert fitted.code == "SYN210"
    assert facts_of(fitted)[syn210.Text.ONLY_DECAY] == {"share": pytest.approx(0.005)}
    for case in (
        group(*start(), *decayed(0.005 * 0.5 * 6), optimizer=SGD, hyperparameters=DECAY),
        group(*start(), *decayed(0.0001), optimizer=SGD, hyperparameters=DECAY | {"weight_decay": 0.0}),
        group(*start(), *decayed(0.0001), optimizer=SGD),
    ):
        assert "SYN210" not in found(case)


def test_210_is_not_another_learning_rate() -> None:
    """Parameters with equal direction, or different optimizer settings, do not match SYN210."""
    assert "SYN210" not in found(group(*start(cosine=0.9999)))
    assert "SYN210" not in found(group(*start(), values=(HALF,)))


def test_210_by_a_constant_difference() -> None:
    """Parameters with nearly equal direction are SYN210 if the difference is constant from the first step on."""
    near = start(cosine=0.99)
    fitted = only(group(*near), group(*near, step=5))
    assert fitted.code == "SYN210"
    assert fitted.facts[-1] == Course.UNCHANGED(step=5)
    smaller = group(*start(cosine=0.99, max_abs=0.1), step=5)
    assert "SYN210" not in found(group(*near), smaller)
    # A parameter that agreed at an earlier step did not start unequal.
    assert "SYN210" not in found(group(*near), group(step=4), group(*near, step=5))


def test_210_needs_whole_tensors() -> None:
    """A tensor with few differing elements is damaged, and did not start unequal."""
    assert "SYN210" not in found(group(*start(mismatched=2)))


def test_210_is_not_an_overwritten_tensor() -> None:
    """A single tensor with another direction is SYN210 only if its difference is constant from the first step on."""
    head = apart("fc.weight", cosine=0.03)
    assert "SYN210" not in found(group(head))
    assert only(group(head), group(head, step=5)).code == "SYN210"


def test_210_without_an_optimizer() -> None:
    """Without optimizer state the cosine must be lower, and even lower if all parameters differ."""
    assert only(group(*start(cosine=0.4), optimizer=())).code == "SYN210"
    assert "SYN210" not in found(group(*start(cosine=0.6), optimizer=()))
    everything = [apart(name, cosine=0.1) for name in MODEL]
    assert only(group(*everything, optimizer=())).facts[0] == syn210.Text.CONSISTENT()
    assert "SYN210" not in found(group(*(apart(name, cosine=0.3) for name in MODEL), optimizer=()))


def test_210_by_digests() -> None:
    """Digests suffice if the optimizer and some parameters agree, and the finding is then "consistent with"."""
    case = group(*map(by_digest, start(4)), ranks=4)
    fitted = only(case)
    assert (fitted.code, fitted.ranks) == ("SYN210", (3,))
    assert fitted.facts[0] == syn210.Text.CONSISTENT_DIGESTS()
    assert "SYN210" not in found(group(*(by_digest(apart(name)) for name in MODEL)))
    assert "SYN210" not in found(group(by_digest(apart("fc.weight"))))


@pytest.mark.parametrize(("ranks", "suspects"), [(2, (0, 1)), (4, (3,))])
@pytest.mark.parametrize("metadata", [Metadata(frozen=("stem.weight",)), None])
def test_218(ranks: int, suspects: tuple[int, ...], metadata: Metadata | None) -> None:
    """If only a parameter differs that is frozen by the metadata or has no optimizer state, it is SYN218."""
    stem = apart("stem.weight", ranks=ranks, cosine=0.1)
    fitted = only(group(stem, ranks=ranks, more={"stem.weight": "parameter"}, metadata=metadata))
    assert (fitted.code, fitted.ranks) == ("SYN218", suspects)
    assert fitted.facts[0].code is syn218.Text.FROZEN
    assert (fitted.facts[0].parameters["count"], fitted.facts[0].parameters["names"]) == (1, ("stem.weight",))
    assert fitted.facts[1].code is (syn218.Text.FROZEN_BY_METADATA if metadata else syn218.Text.NO_STATE)
    assert only(group(by_digest(stem), ranks=ranks, more={"stem.weight": "parameter"})).code == "SYN218"


def test_218_with_unnamed_optimizer_ids() -> None:
    """If states have ids only, differing parameters and states may not outnumber all parameters."""
    states = {f"optimizer.{i}.exp_avg": "optimizer" for i in range(4)}
    frozen = apart("conv.weight", cosine=0.1)
    fitted = only(group(frozen, optimizer=(), more=states))
    assert fitted.code == "SYN218"
    assert facts_of(fitted)[syn218.Text.IDS_ONLY] == {"states": 4, "total": 5}
    assert only(group(frozen, apart("fc.bias", cosine=0.1), optimizer=(), more=states)).code == "SYN210"


def test_218_is_not_a_trained_parameter() -> None:
    """A differing trained parameter, any differing state, and partitioned state each exclude SYN218."""
    stem, more = apart("stem.weight", cosine=0.1), {"stem.weight": "parameter"}
    assert "SYN218" not in found(group(stem, apart("fc.weight", cosine=0.1), more=more))
    assert "SYN218" not in found(group(stem, moment("fc.weight", cosine=0.5), more=more))
    assert "SYN218" not in found(group(stem, more=more, metadata=Metadata(optimizer_sharded=True)))
    assert "SYN218" not in found(group(stem, more=more, optimizer=()))
    assert "SYN218" not in found(group(replace(stem, mismatched=1, extent="one"), more=more))


def test_218_buffers() -> None:
    """Plain buffers that differ alone are SYN218, unless the difference changes over the steps."""
    table, more = apart("rope.inv_freq", "buffer"), {"rope.inv_freq": "buffer"}
    fitted = only(group(table, more=more))
    assert fitted.code == "SYN218"
    assert (fitted.facts[0].code, fitted.facts[2].code) == (syn218.Text.BUFFERS, syn218.Text.ONE_STEP)
    constant = facts_of(only(group(table, more=more), group(table, more=more, step=5)))
    assert constant[Course.UNCHANGED] == {"step": 5}
    assert syn218.Text.ONE_STEP not in constant
    moving = replace(table, max_abs=0.8)
    fitted = only(group(moving, more=more), group(table, more=more, step=5))
    assert fitted.code == "SYN205"


@pytest.mark.parametrize(("ranks", "suspects"), [(2, (0, 1)), (4, (3,))])
def test_219(ranks: int, suspects: tuple[int, ...]) -> None:
    """An averaged copy that differs alone is SYN219, with the number of updates on each rank."""
    counts = dict.fromkeys(range(ranks), 12) | {ranks - 1: 7}
    number = apart("n_averaged", "ema", ranks, values=counts)
    number = replace(number, numel=1, shape=(), mismatched=1, extent="one")
    more = {"ema.fc.weight": "ema", "n_averaged": "ema"}
    fitted = only(group(apart("ema.fc.weight", "ema", ranks), number, ranks=ranks, more=more))
    assert (fitted.code, fitted.ranks) == ("SYN219", suspects)
    assert fitted.facts[0].code is syn219.Text.COPY_DIFFERS
    assert facts_of(fitted)[syn219.Text.MODEL_AGREES] == {"count": 5}
    assert facts_of(fitted)[syn219.Text.UPDATES] == {"name": "n_averaged", "values": counts}
    digests = group(by_digest(apart("ema.fc.weight", "ema", ranks)), ranks=ranks, more=more)
    assert only(digests).code == "SYN219"


def test_219_is_not_a_follower_of_the_model() -> None:
    """A copy of differing parameters, its running statistics alone, and a single element do not match SYN219."""
    copy, more = apart("ema.fc.weight", "ema"), {"ema.fc.weight": "ema", "ema.bn.running_mean": "ema"}
    assert set(found(group(copy, *unreduced(), more=more))) == {"SYN211"}
    assert "SYN219" not in found(group(apart("ema.bn.running_mean", "ema"), more=more))
    assert "SYN219" not in found(group(replace(copy, mismatched=1, extent="one"), more=more))


def test_299_diagnoses_the_remainder() -> None:
    """Cause and fix of SYN299 depend on the kinds of tensors that differ."""
    near = [apart(name, cosine=0.9999) for name in MODEL]
    assert only(group(*near)).cause.code is syn299.Text.CAUSE_EVENT
    momenta = [moment(name, "momentum_buffer", cosine=0.98) for name in MODEL]
    fitted = only(group(*near, *momenta, optimizer=SGD))
    assert fitted.cause.code is syn299.Text.CAUSE_AVERAGED
    assert facts_of(fitted)[syn299.Text.MOMENTS] == {"cosine": pytest.approx(0.98)}
    assert only(group(*momenta, optimizer=SGD)).cause.code is syn299.Text.CAUSE_STATE


def test_files_without_a_step_show_no_trend() -> None:
    """A group of unknown step is neither the start of a constant difference nor a step in sync."""
    near = start(cosine=0.99)
    unknown = group(*near)
    assert "SYN210" not in found(group(*near, step=10), replace(unknown, step=None))
    fitted = only(group(*near), replace(group(), step=None), group(*near, step=5))
    assert fitted.facts[-1] == Course.UNCHANGED(step=5)
