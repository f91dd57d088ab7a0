"""Stale ranks (SYN217), diverged loss scalers (SYN216) and local SGD (SYN241): matching cases and near misses."""

from __future__ import annotations

from typing import Any

import pytest
from support.cases import DIGEST, diagnose_case, diagnose_single
from support.groups import facts_of
from support.listings import find_all, list_names
from support.progress_cases import batches, counter, diff, group, scaler, statistics, trained

from syncheck.diagnose import syn214_step_skipped as syn214
from syncheck.diagnose import syn215_optimizer_state_not_restored as syn215
from syncheck.diagnose import syn216_grad_scaler_diverged as syn216
from syncheck.diagnose import syn217_stale_replica as syn217
from syncheck.diagnose import syn241_periodic_averaging as syn241
from syncheck.diagnose.counters import Origin
from syncheck.diagnose.statements import Common
from syncheck.records import Group, ValueDiff
from syncheck.snapshots import Metadata

BOTH = {0: 1, 1: 2}
UNCOUNTED = trained(BOTH, counts=False)
FROZEN = diff("stem.weight", "parameter", BOTH)
OPTIMIZERS = pytest.mark.parametrize("counts", [True, False], ids=["adamw", "sgd"])


def make_stale(ranks: int = 2, *, counts: bool = True, forwards: bool = False, **fields: Any) -> Group:
    """Return a group whose last rank is one step behind. forwards: the last rank counted the batches of the step."""
    by_rank = {rank: 100 - (rank == ranks - 1) for rank in range(ranks)}
    own_values = statistics({rank: rank for rank in by_rank})
    bn = () if forwards else (batches(by_rank),)
    return group(*trained(by_rank, counts=counts), *bn, *own_values, ranks=ranks, **{"stale": {ranks - 1: 99}} | fields)


@pytest.mark.parametrize("ranks", [2, 4])
@OPTIMIZERS
def test_217(ranks: int, counts: bool) -> None:
    """A rank with the other ranks' earlier state is SYN217, which covers BatchNorm's counts and statistics."""
    finding = diagnose_single(make_stale(ranks, counts=counts))
    assert (finding.code, finding.ranks) == ("SYN217", (ranks - 1,))
    assert finding.facts[0] == syn217.Text.STALE(rank=ranks - 1, earlier=99, step=100)
    equal = {"parameters": 2, "states": 6 if counts else 4, "earlier": 99}
    assert facts_of(finding)[syn217.Text.TENSORS_EQUAL] == equal
    assert facts_of(finding)[syn217.Text.BATCHNORM_DIFFERS] == {"count": 3}


def test_217_before_106() -> None:
    """A stale rank whose file stores the earlier step is SYN217 and not SYN106."""
    value = ValueDiff("step", {0: 100, 1: 99}, counts=True, kind="progress")
    finding = diagnose_single(make_stale(values=(value,)))
    assert finding.code == "SYN217"
    assert facts_of(finding)[syn217.Text.STORED_STEP_DIFFERS] == {"ranks": (1,)}
    assert diagnose_single(make_stale(values=(value,), stale={})).code == "SYN106"


@pytest.mark.parametrize(("rates", "code"), [({0: 0.1, 1: 0.0}, "SYN107"), ({0: 0.1, 1: 0.2}, "SYN217")])
def test_107_if_the_stale_rank_has_a_learning_rate_of_0(rates: dict[int, float], code: str) -> None:
    """No step changes the parameters of such a rank, so that no old file remained."""
    rate = ValueDiff("optimizer.param_groups.0.lr", rates, counts=True, kind="setting")
    stale = [tensor for tensor in make_stale().tensors if tensor.kind == "parameter"]
    fitted = diagnose_case(group(*stale, values=(rate,), stale={1: 99}))
    assert next(iter(fitted)) == code


def test_217_covers_no_difference_between_other_ranks() -> None:
    """SYN217 does not cover a parameter that also differs among the up-to-date ranks."""
    stale = make_stale(4)
    second = diff("stem.weight", "parameter", {0: 1, 1: 2, 2: 1, 3: 3})
    fitted = diagnose_case(group(*stale.tensors, second, ranks=4, stale={3: 99}))
    assert set(fitted["SYN217"].tensors) == set(list_names(stale.tensors))


@OPTIMIZERS
def test_214_if_the_forward_pass_was_counted(counts: bool) -> None:
    """Old parameters and old state beside new BatchNorm counts are SYN214, also with SGD."""
    finding = diagnose_single(make_stale(4, forwards=True, counts=counts))
    assert (finding.code, finding.ranks) == ("SYN214", (3,))
    assert finding.facts[0].code is (syn214.Text.SKIPPED if counts else syn214.Text.SKIPPED_AFTER_FORWARD)
    assert facts_of(finding)[Origin.STALE] == {"step": 100, "ranks": (3,), "earlier": 99}
    assert syn214.Text.BATCHES_COUNTED in facts_of(finding)


TEN = trained({0: 20, 1: 10})


@pytest.mark.parametrize(
    ("tensors", "stale", "code"),
    [
        # Old parameters beside new optimizer state came from a gather, whatever BatchNorm counted.
        (find_all(trained({0: 100, 1: 99}), kind="parameter"), {1: 99}, "SYN217"),
        # A rank ten steps behind is not SYN215, despite the large lag of its counters.
        ([*TEN, batches({0: 20, 1: 10})], {1: 10}, "SYN217"),
        (TEN, {1: 10}, "SYN214"),
    ],
)
def test_code_of_a_stale_rank(tensors: Any, stale: dict[int, int], code: str) -> None:
    """A rank with old parameters and old state is SYN214 if BatchNorm counted the batches since, otherwise SYN217."""
    assert diagnose_single(group(*tensors, stale=stale, step=20 if stale == {1: 10} else 100)).code == code


# A later step: BatchNorm's counts were broadcast, and SGD counts no steps.
LATER = group(*UNCOUNTED, *statistics(BOTH), step=110)


def test_later_differences_have_the_first_cause() -> None:
    """A difference since a skipped step is SYN214, and a difference since a stale rank is SYN217, also with SGD."""
    skipped = diagnose_single(LATER, make_stale(forwards=True, counts=False))
    assert (skipped.code, skipped.ranks) == ("SYN214", (1,))
    assert skipped.facts[0] == syn214.Text.SKIPPED_AFTER_FORWARD(ranks=(1,))
    assert facts_of(skipped)[Origin.STALE] == {"step": 100, "ranks": (1,), "earlier": 99}
    set_back = diagnose_single(LATER, make_stale(counts=False))
    assert (set_back.code, set_back.ranks) == ("SYN217", (1,))
    assert set_back.facts[0] == syn217.Text.SET_BACK(ranks=(1,))
    # An earlier stale file explains no difference if parameters agreed at a step in between.
    for earlier in ([make_stale(counts=False), group(step=105)], [make_stale(counts=False, stale={})]):
        assert not {"SYN214", "SYN217"} & set(diagnose_case(LATER, *earlier))


@pytest.mark.parametrize(
    ("scales", "good", "suspects"),
    [
        ({0: 65536.0, 1: 32768.0}, {0: 100, 1: 7}, (1,)),
        ({0: 32768.0, 1: 65536.0}, {0: 0, 1: 100}, (0,)),
        ({0: 65536.0, 1: 32768.0}, None, (0, 1)),
        ({0: 4.0, 1: 4.0, 2: 8.0, 3: 4.0}, None, (2,)),
        ({0: 65536.0, 1: 65536.0, 2: 65536.0, 3: 32768.0}, {0: 9, 1: 9, 2: 9, 3: 3}, (3,)),
    ],
)
def test_216(scales: dict[int, float], good: dict[int, int] | None, suspects: tuple[int, ...]) -> None:
    """Different scales are SYN216 on the odd rank, on the rank with the latest overflow, or on both ranks."""
    tensors = *trained(scales, counts=False), *statistics(scales)
    finding = diagnose_single(group(*tensors, values=scaler(scales, good), ranks=len(scales)))
    assert (finding.code, finding.ranks) == ("SYN216", suspects)
    assert finding.facts[:2] == (
        syn216.Text.SCALES_DIFFER(ratio=2),
        syn216.Text.VALUE(name="scaler.scale", values=scales),
    )
    assert facts_of(finding)[Common.PARAMETERS]["count"] == 2


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("lag", [1, 8])
def test_216_explains_skipped_steps(ranks: int, lag: int) -> None:
    """Counters that lag by the overflows of a rank with a lower scale are SYN216, not SYN214 or SYN215."""
    by_rank = {rank: 100 - lag * (rank == ranks - 1) for rank in range(ranks)}
    scales = {rank: 65536.0 / 2 ** (100 - count) for rank, count in by_rank.items()}
    finding = diagnose_single(group(*trained(by_rank), values=scaler(scales), ranks=ranks))
    assert (finding.code, finding.ranks) == ("SYN216", (ranks - 1,))
    assert facts_of(finding)[syn216.Text.OVERFLOW] == {"steps": by_rank}


@pytest.mark.parametrize("scales", [{0: 65536.0, 1: 32768.0}, {0: 1024.0, 1: 65536.0}])
def test_215_covers_a_scaler_that_was_not_restored(scales: dict[int, float]) -> None:
    """If overflows cannot explain the lag, the finding is SYN215, which covers the scaler's state."""
    finding = diagnose_single(group(*trained({0: 100, 1: 50}), values=scaler(scales, {0: 100, 1: 50})))
    assert (finding.code, finding.ranks) == ("SYN215", (1,))
    assert syn215.Text.SCALER_DIFFERS in facts_of(finding)


def test_scaler_states_beside_other_faults() -> None:
    """SYN216 covers trained tensors only if scales and all parameters differ, also if the scale is a tensor."""
    counted = {0: 100, 1: 99}
    equal = diagnose_single(group(*trained(counted), values=scaler({0: 8.0, 1: 8.0}, counted)))
    assert (equal.code, equal.values) == ("SYN214", ("scaler._growth_tracker",))
    fitted = diagnose_case(group(*UNCOUNTED, values=scaler({0: 8.0, 1: 8.0}, {0: 100, 1: 7})))
    assert (fitted["SYN216"].tensors, fitted["SYN216"].values) == ((), ("scaler._growth_tracker",))
    assert fitted["SYN216"].facts[0] == syn216.Text.STATES_DIFFER()
    assert len(fitted) > 1
    few = diff("fc.weight", "parameter", BOTH), diff("d", "buffer", BOTH)
    case = group(*few, values=scaler({0: 8.0, 1: 4.0}), extra=dict.fromkeys("abc", "parameter"))
    assert diagnose_case(case)["SYN216"].tensors == ()
    tensor = diagnose_single(group(*trained(counted), counter("scaler.scale", "scaler", {0: 8.0, 1: 4.0})))
    assert (tensor.code, tensor.ranks) == ("SYN216", (1,))
    lacking = ValueDiff("scaler.scale", {0: 8.0, 1: None}, counts=True, kind="scaler", lost=(1,))
    assert set(diagnose_case(group(values=(lacking,)))) == {"SYN101"}


@pytest.mark.parametrize("bn", [True, False])
def test_216_before_217(bn: bool) -> None:
    """A rank that skipped its last step because of an overflow is SYN216, with and without BatchNorm."""
    finding = diagnose_single(make_stale(forwards=True, bn=bn, values=scaler({0: 8.0, 1: 4.0}, {0: 9, 1: 0})))
    assert (finding.code, finding.ranks) == ("SYN216", (1,))


def local_sgd(step: int, *tensors: Any, ranks: int = 2, **averaging: int) -> Group:
    """Return a group of local SGD, which averages after steps 8, 12, ..."""
    schedule = {"period": 4, "warmup_steps": 4, "last_step": 0 if step < 8 else step // 4 * 4}
    return group(*tensors, step=step, ranks=ranks, metadata=Metadata(averaging=schedule | averaging, step=step))


@pytest.mark.parametrize("step", [5, 7, 9, 10, 11])
@pytest.mark.parametrize("ranks", [2, 4])
def test_241_between_averages(step: int, ranks: int) -> None:
    """Between two averages of local SGD, differing trained tensors are SYN241, a warning on all ranks."""
    own_values = {rank: rank for rank in range(ranks)}
    finding = diagnose_single(local_sgd(step, *trained(own_values, counts=False), *statistics(own_values), ranks=ranks))
    assert (finding.code, finding.severity, finding.ranks) == ("SYN241", "warning", tuple(range(ranks)))
    assert finding.facts[0] == syn241.Text.OWN_STEPS(steps=step % 4)
    schedule = finding.facts[1]
    assert schedule.code is (syn241.Text.AVERAGED if step > 8 else syn241.Text.NOT_YET_AVERAGED)
    assert (schedule.parameters["period"], schedule.parameters["step"]) == (4, step)
    assert facts_of(finding)[Common.PARAMETERS]["count"] == 2


def test_241_right_after_an_average() -> None:
    """Right after an average, differences in the momentum and in local statistics are SYN241."""
    finding = diagnose_single(local_sgd(8, *find_all(UNCOUNTED, kind="optimizer"), *statistics(BOTH)))
    assert finding.code == "SYN241"
    assert finding.facts[:4] == (
        syn241.Text.OWN_STATE(),
        syn241.Text.AVERAGED(period=4, last=8, step=8),
        syn241.Text.PARAMETERS_AGREE(),
        syn241.Text.STATE_DIFFERS(count=4),
    )
    # The files were saved right after an average, so the fix does not ask for that.
    assert (finding.cause.code, finding.fix.code) == (syn241.Text.CAUSE_STATE, syn241.Text.FIX_STATE)
    between = diagnose_single(local_sgd(9, *UNCOUNTED))
    assert (between.cause.code, between.fix.code) == (syn241.Text.CAUSE, syn241.Text.FIX)


@pytest.mark.parametrize(
    "case",
    [
        local_sgd(3, *UNCOUNTED),  # in the warm-up
        local_sgd(4, *UNCOUNTED),
        local_sgd(8, *UNCOUNTED),  # parameters right after an average
        local_sgd(12, *UNCOUNTED, last_step=8),  # an overdue average
        local_sgd(9, *UNCOUNTED, last_step=12),
        group(*UNCOUNTED),  # no metadata
        group(*UNCOUNTED, metadata=Metadata(averaging={"period": 4})),
    ],
)
def test_not_241(case: Group) -> None:
    """A difference is not SYN241 without complete metadata, or if the averaging schedule does not explain it."""
    assert "SYN241" not in diagnose_case(case)


def test_241_beside_other_faults() -> None:
    """Under local SGD, a skipped step is still SYN214; SYN241 covers no untrained parameters and accepts digests."""
    assert set(diagnose_case(local_sgd(10, *trained({0: 10, 1: 9})))) == {"SYN214"}
    assert FROZEN.name not in diagnose_case(local_sgd(10, *UNCOUNTED, FROZEN))["SYN241"].tensors
    finding = diagnose_single(local_sgd(10, diff("fc.weight", "parameter", BOTH, **DIGEST)))
    assert finding.code == "SYN241"
    assert facts_of(finding)[Common.PARAMETERS]["size"] == Common.SIZE_UNKNOWN()


def test_frozen_tensors_are_not_stale() -> None:
    """A frozen layer that some rank changed has its earlier values on the healthy ranks, which were not set back."""
    assert set(diagnose_case(group(FROZEN, stale={0: 99}))) == {"SYN218"}
