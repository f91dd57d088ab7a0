"""Initialization, averaged copies and unexplained differences (SYN210, SYN218, SYN219, SYN299)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.cases import diagnose_case, diagnose_single
from support.groups import facts_of
from support.listings import list_names
from support.small_model import DECAY, HALF, SGD, by_digest, group, make_diff, model, moment, moments, start, unreduced

from syncheck.diagnose import syn210_init_not_broadcast as syn210
from syncheck.diagnose import syn218_frozen_not_broadcast as syn218
from syncheck.diagnose import syn219_averaged_copy_stale as syn219
from syncheck.diagnose import syn299_unexplained_difference as syn299
from syncheck.diagnose.statements import Common, Course
from syncheck.snapshots import Metadata

if TYPE_CHECKING:
    from syncheck.records import Group, TensorDiff

SUSPECTS = pytest.mark.parametrize(("ranks", "suspects"), [(2, (0, 1)), (4, (3,))])
NEAR, HEAD, COPY = start(cosine=0.99), make_diff("fc.weight", cosine=0.03), make_diff("ema.fc.weight", "ema")
STEM, TABLE = make_diff("stem.weight", cosine=0.1), make_diff("rope.inv_freq", "buffer")
UNTRAINED = {"stem.weight": "parameter"}
BUFFER = {"rope.inv_freq": "buffer"}
AVERAGED = {"ema.fc.weight": "ema", "ema.bn.running_mean": "ema", "n_averaged": "ema"}


def decayed(size: float) -> list[TensorDiff]:
    """Return parameters with initial differences of 0.5, and momenta with differences of `size`."""
    momenta = [moment(diff.name, "momentum_buffer", max_abs=size, cosine=0.9999) for diff in start()]
    return [*start(), *momenta]


@SUSPECTS
def test_210(ranks: int, suspects: tuple[int, ...]) -> None:
    """Parameters of different directions beside equal optimizer state are SYN210, on the odd rank or on both ranks."""
    statistic = make_diff("bn.running_mean", "bn_mean", ranks)
    fitted = diagnose_single(group(*start(ranks), statistic, ranks=ranks, more={statistic.name: "bn_mean"}))
    assert (fitted.code, fitted.ranks) == ("SYN210", suspects)
    summary = syn210.Text.DIFFERENT_STARTS() if ranks == 2 else syn210.Text.OTHER_START(ranks=suspects)
    assert fitted.facts[0] == summary
    facts = facts_of(fitted)
    assert (facts[Common.PARAMETERS]["count"], facts[Common.PARAMETERS]["total"]) == (3, 5)
    assert facts[syn210.Text.COSINE] == {"cosine": pytest.approx(0.03)}
    assert facts[syn210.Text.AGREEING] == {"count": 2, "names": ("bn.bias", "bn.weight")}
    assert facts[syn210.Text.OPTIMIZER_AGREES] == {"tensors": 10}
    assert facts[Course.STATISTICS_TOO] == {"count": 1}


SGD_DECAY: dict[str, Any] = {"optimizer": SGD, "hyperparameters": DECAY}


@pytest.mark.parametrize(
    ("cases", "fact"),
    [
        # A difference of the momentum by weight decay alone.
        ([group(*decayed(0.005 * 0.5 * 1.04), **SGD_DECAY)], syn210.Text.ONLY_DECAY(share=pytest.approx(0.005))),
        ([group(*decayed(0.005 * 0.5 * 6), **SGD_DECAY)], None),
        ([group(*decayed(0.0001), optimizer=SGD, hyperparameters=DECAY | {"weight_decay": 0.0})], None),
        ([group(*decayed(0.0001), optimizer=SGD)], None),
        # A different learning rate, also inferred from equal directions.
        ([group(*start(cosine=0.9999))], None),
        ([group(*start(), values=(HALF,))], None),
        # Nearly equal directions, or a single tensor, require a constant difference from the first step on.
        ([group(*NEAR), group(*NEAR, step=5)], Course.UNCHANGED(step=5)),
        ([group(*NEAR), group(*start(cosine=0.99, max_abs=0.1), step=5)], None),
        ([group(*NEAR), group(step=4), group(*NEAR, step=5)], None),
        ([group(HEAD), group(HEAD, step=5)], Course.UNCHANGED(step=5)),
        ([group(HEAD)], None),
        # Groups without a step show no trend.
        ([group(*NEAR), replace(group(*NEAR), step=None)], None),
        ([group(*NEAR), replace(group(), step=None), group(*NEAR, step=5)], Course.UNCHANGED(step=5)),
        # Few differing elements are damage.
        ([group(*start(mismatched=2))], None),
        # Without optimizer state the cosine must be lower, and even lower if all parameters differ.
        ([group(*start(cosine=0.4), optimizer=())], syn210.Text.COSINE(cosine=pytest.approx(0.4))),
        ([group(*start(cosine=0.6), optimizer=())], None),
        ([group(*model(cosine=0.1), optimizer=())], syn210.Text.CONSISTENT()),
        ([group(*model(cosine=0.3), optimizer=())], None),
        # Digests suffice if the optimizer and some parameters agree.
        ([group(*map(by_digest, start(4)), ranks=4)], syn210.Text.DIGESTS()),
        ([group(*map(by_digest, model()))], None),
        ([group(by_digest(HEAD))], None),
    ],
)
def test_evidence_of_210(cases: list[Group], fact: Any) -> None:
    """Directions, optimizer state and earlier steps decide on SYN210, and each matching case has a specific fact."""
    finding = diagnose_case(*cases).get("SYN210")
    assert (finding is not None) is (fact is not None)
    if finding:
        assert fact in finding.facts
        assert set(diagnose_single(*cases).tensors) == set(list_names(cases[0].tensors))


def test_210_of_a_part_without_state() -> None:
    """Without optimizer state, parameters beside equal parameters may also be a layer that was added after wrapping."""
    late_head = start()[1:]
    finding = diagnose_single(group(*late_head, optimizer=()))
    assert (finding.code, finding.certainty) == ("SYN210", "consistent")
    assert finding.alternatives == ("SYN212", "SYN218")
    # So does one odd rank of three, because ranks outside of an average never agree.
    assert diagnose_single(group(*start(3)[1:], ranks=3, optimizer=())).alternatives == ("SYN218",)
    # Equal optimizer state shows averaged gradients.
    assert "SYN212" not in diagnose_single(group(*late_head)).alternatives
    # No broadcast at all: every parameter differs.
    assert not diagnose_single(group(*model(cosine=0.1), optimizer=())).alternatives


@SUSPECTS
@pytest.mark.parametrize("metadata", [Metadata(frozen=("stem.weight",)), Metadata()])
def test_218(ranks: int, suspects: tuple[int, ...], metadata: Metadata) -> None:
    """A difference in only a parameter that is frozen by the metadata or has no optimizer state is SYN218."""
    stem = make_diff("stem.weight", ranks=ranks, cosine=0.1)
    fitted = diagnose_single(group(stem, ranks=ranks, more=UNTRAINED, metadata=metadata))
    assert (fitted.code, fitted.ranks) == ("SYN218", suspects)
    first, second, *_ = fitted.facts
    assert first.code is syn218.Text.FROZEN
    assert (first.parameters["count"], first.parameters["names"]) == (1, ("stem.weight",))
    assert second.code is (syn218.Text.FROZEN_BY_METADATA if metadata.frozen else syn218.Text.NO_STATE)
    assert diagnose_single(group(by_digest(stem), ranks=ranks, more=UNTRAINED)).code == "SYN218"


def test_218_with_unnamed_optimizer_ids() -> None:
    """If states have ids only, SYN218 requires one parameter without state for each differing parameter."""
    states = {f"optimizer.{i}.exp_avg": "optimizer" for i in range(4)}
    frozen = make_diff("conv.weight", cosine=0.1)
    fitted = diagnose_single(group(frozen, optimizer=(), more=states))
    assert fitted.code == "SYN218"
    assert facts_of(fitted)[syn218.Text.IDS_ONLY] == {"states": 4, "total": 5}
    assert diagnose_single(group(frozen, make_diff("fc.bias", cosine=0.1), optimizer=(), more=states)).code == "SYN210"


@pytest.mark.parametrize(
    "case",
    [
        group(STEM, make_diff("fc.weight", cosine=0.1), more=UNTRAINED),
        group(STEM, moment("fc.weight", cosine=0.5), more=UNTRAINED),
        group(STEM, more=UNTRAINED, metadata=Metadata(optimizer_sharded=True)),
        group(STEM, more=UNTRAINED, optimizer=()),
        group(replace(STEM, mismatched=1, extent="one"), more=UNTRAINED),
    ],
)
def test_not_218(case: Group) -> None:
    """A trained parameter, different state, sharded state, no state, or a single element excludes SYN218."""
    assert "SYN218" not in diagnose_case(case)


def test_218_of_buffers() -> None:
    """A difference in plain buffers alone is SYN218, unless the difference changes over the steps."""
    earlier = group(TABLE, more=BUFFER, step=5)
    fitted = diagnose_single(group(TABLE, more=BUFFER))
    assert fitted.code == "SYN218"
    assert (fitted.facts[0].code, fitted.facts[2].code) == (syn218.Text.BUFFERS, syn218.Text.ONE_STEP)
    constant = facts_of(diagnose_single(group(TABLE, more=BUFFER), earlier))
    assert constant[Course.UNCHANGED] == {"step": 5}
    assert syn218.Text.ONE_STEP not in constant
    assert diagnose_single(group(replace(TABLE, max_abs=0.8), more=BUFFER), earlier).code == "SYN205"


@SUSPECTS
def test_219(ranks: int, suspects: tuple[int, ...]) -> None:
    """A difference in an averaged copy alone is SYN219, with the number of updates on each rank."""
    counts = dict.fromkeys(range(ranks), 12) | {ranks - 1: 7}
    number = make_diff("n_averaged", "ema", ranks, values=counts, numel=1, shape=(), mismatched=1, extent="one")
    copy = make_diff("ema.fc.weight", "ema", ranks)
    fitted = diagnose_single(group(copy, number, ranks=ranks, more=AVERAGED))
    assert (fitted.code, fitted.ranks) == ("SYN219", suspects)
    assert fitted.facts[0].code is syn219.Text.COPY_DIFFERS
    assert facts_of(fitted)[syn219.Text.MODEL_AGREES] == {"count": 5}
    assert facts_of(fitted)[syn219.Text.UPDATES] == {"name": "n_averaged", "values": counts}
    assert diagnose_single(group(by_digest(copy), ranks=ranks, more=AVERAGED)).code == "SYN219"


def test_not_219() -> None:
    """A copy of differing parameters and a single element are not SYN219. Statistics alone depend on batches too."""
    assert set(diagnose_case(group(COPY, *unreduced(), more=AVERAGED))) == {"SYN211"}
    assert "SYN219" not in diagnose_case(group(replace(COPY, mismatched=1, extent="one"), more=AVERAGED))
    finding = diagnose_single(group(make_diff("ema.bn.running_mean", "ema"), more=AVERAGED))
    assert (finding.code, finding.certainty, finding.alternatives) == ("SYN219", "consistent", ("SYN201", "SYN205"))


def test_cause_of_299() -> None:
    """The cause of SYN299 depends on the kinds of the differing tensors."""
    momenta = moments("momentum_buffer", cosine=0.98)
    event = diagnose_single(group(*model(), optimizer=SGD))
    averaged = diagnose_single(group(*model(), *momenta, optimizer=SGD))
    state = diagnose_single(group(*momenta, optimizer=SGD))
    assert diagnose_single(group(*model())).cause.code is event.cause.code is syn299.Text.CAUSE_EVENT
    assert (averaged.cause.code, state.cause.code) == (syn299.Text.CAUSE_UNCOUNTED, syn299.Text.CAUSE_STATE)
    assert averaged.alternatives == ("SYN214", "SYN215", "SYN213")
    assert facts_of(averaged)[syn299.Text.MOMENTS] == {"cosine": pytest.approx(0.98)}
