"""Findings on unequal starts and copies, and what is left: each fires on its signature, and is silent beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_model import DECAY, HALF, MODEL, SGD, apart, by_digest, decayed, found, group, moment, only, start, unreduced

from syncheck.snapshots import Metadata


@pytest.mark.parametrize(("ranks", "suspects"), [(2, (0, 1)), (4, (3,))])
def test_210(ranks: int, suspects: tuple[int, ...]) -> None:
    """Parameters of unlike direction beside an optimizer that agrees are SYN210, on the odd rank where one is."""
    fitted = only(group(*start(ranks), ranks=ranks))
    assert (fitted.code, fitted.ranks) == ("SYN210", suspects)
    assert "3 of 5 parameters differ" in fitted.evidence
    assert "median cosine 0.03; 2 agree (bn.bias, bn.weight); all 10 tensors of the optimizer agree" in fitted.evidence


def test_210_covers_what_follows() -> None:
    """Running statistics behind unequal parameters are part of SYN210, and not unexplained."""
    statistic = apart("bn.running_mean", "bn_mean")
    fitted = only(group(*start(), statistic, more={"bn.running_mean": "bn_mean"}))
    assert fitted.code == "SYN210"
    assert "; 1 running statistic differs too" in fitted.evidence


def test_210_with_sgd() -> None:
    """A momentum apart by the weight decay of the gap is no unequal gradient; one that is apart by more is."""
    fitted = only(group(*start(), *decayed(0.005 * 0.5 * 1.04), optimizer=SGD, hyperparameters=DECAY))
    assert fitted.code == "SYN210"
    assert "no more than the weight decay of the parameters' gap explains" in fitted.evidence
    for case in (
        group(*start(), *decayed(0.005 * 0.5 * 6), optimizer=SGD, hyperparameters=DECAY),
        group(*start(), *decayed(0.0001), optimizer=SGD, hyperparameters=DECAY | {"weight_decay": 0.0}),
        group(*start(), *decayed(0.0001), optimizer=SGD),
    ):
        assert "SYN210" not in found(case)


def test_210_is_not_another_learning_rate() -> None:
    """Parameters of one direction, and settings of the optimizer that differ, do not tell of the start."""
    assert "SYN210" not in found(group(*start(cosine=0.9999)))
    assert "SYN210" not in found(group(*start(), values=(HALF,)))


def test_210_by_a_constant_gap() -> None:
    """Parameters of nearly one direction are SYN210 where the gap stays from the first step on, and not if it grows."""
    near = start(cosine=0.99)
    fitted = only(group(*near), group(*near, step=5))
    assert fitted.code == "SYN210"
    assert fitted.evidence.endswith("; the gap has not changed since step 5")
    smaller = group(*start(cosine=0.99, max_abs=0.1), step=5)
    assert "SYN210" not in found(group(*near), smaller)
    # What agreed at first did not start unequal.
    assert "SYN210" not in found(group(*near), group(step=4), group(*near, step=5))


def test_210_needs_whole_tensors() -> None:
    """A tensor of which few elements differ is damage, not another start."""
    assert "SYN210" not in found(group(*start(mismatched=2)))


def test_210_is_not_an_overwritten_tensor() -> None:
    """One tensor in another direction is SYN210 only where its gap is there, and the same, from the first step on."""
    head = apart("fc.weight", cosine=0.03)
    assert "SYN210" not in found(group(head))
    assert only(group(head), group(head, step=5)).code == "SYN210"


def test_210_without_an_optimizer() -> None:
    """Of files without optimizer state the cosine must be lower, and lower still where all parameters differ."""
    assert only(group(*start(cosine=0.4), optimizer=())).code == "SYN210"
    assert "SYN210" not in found(group(*start(cosine=0.6), optimizer=()))
    everything = [apart(name, cosine=0.1) for name in MODEL]
    assert "consistent with" in only(group(*everything, optimizer=())).evidence
    assert "SYN210" not in found(group(*(apart(name, cosine=0.3) for name in MODEL), optimizer=()))


def test_210_by_digests() -> None:
    """Digests are enough where the optimizer and some parameters agree, and the finding then claims less."""
    case = group(*map(by_digest, start(4)), ranks=4)
    fitted = only(case)
    assert (fitted.code, fitted.ranks) == ("SYN210", (3,))
    assert "by digests alone" in fitted.evidence
    assert "SYN210" not in found(group(*(by_digest(apart(name)) for name in MODEL)))
    assert "SYN210" not in found(group(by_digest(apart("fc.weight"))))


@pytest.mark.parametrize(("ranks", "suspects"), [(2, (0, 1)), (4, (3,))])
@pytest.mark.parametrize("metadata", [Metadata(frozen=("stem.weight",)), None])
def test_218(ranks: int, suspects: tuple[int, ...], metadata: Metadata | None) -> None:
    """A parameter that the metadata calls frozen, or that has no optimizer state, and differs alone, is SYN218."""
    stem = apart("stem.weight", ranks=ranks, cosine=0.1)
    fitted = only(group(stem, ranks=ranks, more={"stem.weight": "parameter"}, metadata=metadata))
    assert (fitted.code, fitted.ranks) == ("SYN218", suspects)
    assert "1 frozen parameter differs (stem.weight)" in fitted.evidence
    assert only(group(by_digest(stem), ranks=ranks, more={"stem.weight": "parameter"})).code == "SYN218"


def test_218_where_ids_have_no_names() -> None:
    """Where states are numbered, there must be room for parameters without: those that differ, if they are so few."""
    states = {f"optimizer.{i}.exp_avg": "optimizer" for i in range(4)}
    frozen = apart("conv.weight", cosine=0.1)
    fitted = only(group(frozen, optimizer=(), more=states))
    assert fitted.code == "SYN218"
    assert "consistent with frozen ones or buffers" in fitted.evidence
    assert only(group(frozen, apart("fc.bias", cosine=0.1), optimizer=(), more=states)).code == "SYN210"


def test_218_is_not_what_is_trained() -> None:
    """A trained parameter, or any state, that differs rules it out; so does state of which each rank has a part."""
    stem, more = apart("stem.weight", cosine=0.1), {"stem.weight": "parameter"}
    assert "SYN218" not in found(group(stem, apart("fc.weight", cosine=0.1), more=more))
    assert "SYN218" not in found(group(stem, moment("fc.weight", cosine=0.5), more=more))
    assert "SYN218" not in found(group(stem, more=more, metadata=Metadata(optimizer_sharded=True)))
    assert "SYN218" not in found(group(stem, more=more, optimizer=()))
    assert "SYN218" not in found(group(replace(stem, mismatched=1, extent="one"), more=more))


def test_218_buffers() -> None:
    """Plain buffers that differ alone are SYN218; those that change over the steps are updated, and are not."""
    table, more = apart("rope.inv_freq", "buffer"), {"rope.inv_freq": "buffer"}
    fitted = only(group(table, more=more))
    assert fitted.code == "SYN218"
    assert "files of one step do not tell" in fitted.evidence
    assert "has not changed since step 5" in only(group(table, more=more), group(table, more=more, step=5)).evidence
    moving = replace(table, max_abs=0.8)
    fitted = only(group(moving, more=more), group(table, more=more, step=5))
    assert fitted.code == "SYN205"


@pytest.mark.parametrize(("ranks", "suspects"), [(2, (0, 1)), (4, (3,))])
def test_219(ranks: int, suspects: tuple[int, ...]) -> None:
    """An averaged copy that differs alone is SYN219, and tells how often each rank has updated it."""
    counts = dict.fromkeys(range(ranks), 12) | {ranks - 1: 7}
    number = apart("n_averaged", "ema", ranks, values=counts)
    number = replace(number, numel=1, shape=(), mismatched=1, extent="one")
    more = {"ema.fc.weight": "ema", "n_averaged": "ema"}
    fitted = only(group(apart("ema.fc.weight", "ema", ranks), number, ranks=ranks, more=more))
    assert (fitted.code, fitted.ranks) == ("SYN219", suspects)
    assert "all 5 parameters that it averages agree; n_averaged is 12 on rank 0" in fitted.evidence
    digests = group(by_digest(apart("ema.fc.weight", "ema", ranks)), ranks=ranks, more=more)
    assert only(digests).code == "SYN219"


def test_219_is_not_what_follows_the_model() -> None:
    """Beside parameters that differ the copy follows them; its running statistics follow batches; a bit is damage."""
    copy, more = apart("ema.fc.weight", "ema"), {"ema.fc.weight": "ema", "ema.bn.running_mean": "ema"}
    assert set(found(group(copy, *unreduced(), more=more))) == {"SYN211"}
    assert "SYN219" not in found(group(apart("ema.bn.running_mean", "ema"), more=more))
    assert "SYN219" not in found(group(replace(copy, mismatched=1, extent="one"), more=more))


def test_299_tells_of_events() -> None:
    """What agrees besides the parameters, or nearly does, is in cause and fix."""
    near = [apart(name, cosine=0.9999) for name in MODEL]
    assert str(only(group(*near)).cause).startswith("The gradients are equal by now")
    momenta = [moment(name, "momentum_buffer", cosine=0.98) for name in MODEL]
    fitted = only(group(*near, *momenta, optimizer=SGD))
    assert str(fitted.cause).startswith("The first moments are nearly alike")
    assert "median cosine of the first moments 0.980" in fitted.evidence
    assert str(only(group(*momenta, optimizer=SGD)).cause).startswith("Only the optimizer's state differs")


def test_files_without_a_step_tell_nothing_of_the_course() -> None:
    """What was saved at an unknown step is not the start of a gap that stays, nor a step at which all agreed."""
    near = start(cosine=0.99)
    unknown = group(*near)
    assert "SYN210" not in found(group(*near, step=10), replace(unknown, step=None))
    fitted = only(group(*near), replace(group(), step=None), group(*near, step=5))
    assert fitted.evidence.endswith("; the gap has not changed since step 5")
