"""Stale ranks (SYN217), diverged loss scalers (SYN216) and local SGD (SYN241): matching cases and near misses."""

from __future__ import annotations

from typing import Any

import pytest
from groups import facts_of
from progress_cases import counter, diff, found, group, only, scaler, statistics, trained

from syncheck.diagnose import syn214_step_skipped as syn214
from syncheck.diagnose import syn215_optimizer_state_not_restored as syn215
from syncheck.diagnose import syn216_grad_scaler_diverged as syn216
from syncheck.diagnose import syn217_stale_replica as syn217
from syncheck.diagnose import syn241_periodic_averaging as syn241
from syncheck.diagnose.case import Common
from syncheck.diagnose.origin import Origin
from syncheck.records import Group, ValueDiff
from syncheck.snapshots import Metadata

AVERAGING = {"period": 4, "warmup_steps": 4, "last_step": 8}


def behind(ranks: int = 2, *, step: int = 100, counts: bool = True, forwards: bool = False, **fields: Any) -> Group:
    """Return a group whose last rank is one step behind. forwards: it has counted the batches of the step."""
    by_rank = {rank: step - (rank == ranks - 1) for rank in range(ranks)}
    bn = () if forwards else (counter("bn.num_batches_tracked", "bn_count", by_rank),)
    own = statistics({rank: rank for rank in by_rank})
    fields = {"stale": {ranks - 1: step - 1}} | fields
    return group(*trained(by_rank, counts=counts), *bn, *own, ranks=ranks, step=step, **fields)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("counts", [True, False], ids=["adamw", "sgd"])
def test_217(ranks: int, counts: bool) -> None:
    """A rank at an earlier step of the other ranks is SYN217, which covers BatchNorm's counts and statistics."""
    finding = only(behind(ranks, counts=counts))
    assert (finding.code, finding.ranks) == ("SYN217", (ranks - 1,))
    assert finding.facts[0] == syn217.Text.STALE(rank=ranks - 1, earlier=99, step=100)
    assert facts_of(finding)[syn217.Text.TENSORS_EQUAL] == {
        "parameters": 2,
        "states": 6 if counts else 4,
        "earlier": 99,
    }
    assert facts_of(finding)[syn217.Text.BATCHNORM_DIFFERS] == {"count": 3}


def test_217_before_106() -> None:
    """A stale rank whose file stores the earlier step is SYN217 and not SYN106."""
    value = ValueDiff("step", {0: 100, 1: 99}, counts=True, kind="progress")
    finding = only(behind(values=(value,)))
    assert finding.code == "SYN217"
    assert facts_of(finding)[syn217.Text.STORED_STEP_DIFFERS] == {"ranks": (1,)}
    assert only(behind(values=(value,), stale={})).code == "SYN106"


def test_217_leaves_differences_between_the_other_ranks() -> None:
    """A parameter that also differs between the ranks that are not stale has another cause."""
    stale = behind(4)
    other = diff("stem.weight", "parameter", {0: 1, 1: 2, 2: 1, 3: 3})
    case = group(*stale.tensors, other, ranks=4, stale={3: 99})
    fitted = found(case)
    assert "stem.weight" not in fitted["SYN217"].tensors
    assert set(fitted["SYN217"].tensors) == {d.name for d in stale.tensors}


@pytest.mark.parametrize("counts", [True, False], ids=["adamw", "sgd"])
def test_214_if_the_forward_pass_was_counted(counts: bool) -> None:
    """Old parameters and old state beside BatchNorm's new counts are a skipped step, also with SGD."""
    finding = only(behind(4, forwards=True, counts=counts))
    assert (finding.code, finding.ranks) == ("SYN214", (3,))
    assert finding.facts[0].code is (syn214.Text.SKIPPED if counts else syn214.Text.SKIPPED_AFTER_FORWARD)
    facts = facts_of(finding)
    assert facts[Origin.STALE] == {"step": 100, "ranks": (3,), "earlier": 99}
    assert syn214.Text.BATCHES_COUNTED in facts


def test_217_if_only_parameters_are_old() -> None:
    """Old parameters beside new optimizer state came from a gather: SYN217, whatever BatchNorm counted."""
    by_rank = {0: 100, 1: 99}
    parameters = [d for d in trained(by_rank) if d.kind == "parameter"]
    assert only(group(*parameters, stale={1: 99})).code == "SYN217"


def test_217_of_a_rank_many_steps_behind() -> None:
    """A rank that is stale by ten steps is not SYN215, although the counters are far apart."""
    by_rank = {0: 20, 1: 10}
    count = counter("bn.num_batches_tracked", "bn_count", by_rank)
    assert only(group(*trained(by_rank), count, stale={1: 10}, step=20)).code == "SYN217"
    assert only(group(*trained(by_rank), stale={1: 10}, step=20)).code == "SYN214"


def later(**fields: Any) -> Group:
    """Return the group of a later step: BatchNorm's counts were broadcast, SGD counts no steps."""
    return group(*trained({0: 1, 1: 2}, counts=False), *statistics({0: 1, 1: 2}), step=110, **fields)


def test_a_series_shows_the_first_cause() -> None:
    """A difference since a skipped step is SYN214, and since a stale rank SYN217, also with SGD."""
    skipped = only(later(), behind(forwards=True, counts=False))
    assert (skipped.code, skipped.ranks) == ("SYN214", (1,))
    assert skipped.facts[0] == syn214.Text.SKIPPED_AFTER_FORWARD(ranks=(1,))
    assert facts_of(skipped)[Origin.STALE] == {"step": 100, "ranks": (1,), "earlier": 99}
    set_back = only(later(), behind(counts=False))
    assert (set_back.code, set_back.ranks) == ("SYN217", (1,))
    assert set_back.facts[0] == syn217.Text.SET_BACK(ranks=(1,))


def test_a_step_in_sync_ends_an_earlier_cause() -> None:
    """After a step at which parameters agreed, an earlier stale file explains no difference."""
    assert not {"SYN214", "SYN217"} & set(found(later(), behind(counts=False), group(step=105)))
    assert not {"SYN214", "SYN217"} & set(found(later(), behind(counts=False, stale={})))


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
    """Different scales are SYN216 on the odd rank, or on the rank that reduced its scale."""
    finding = only(
        group(*trained(scales, counts=False), *statistics(scales), values=scaler(scales, good), ranks=len(scales))
    )
    assert (finding.code, finding.ranks) == ("SYN216", suspects)
    assert finding.facts[0] == syn216.Text.SCALES_DIFFER(ratio=2)
    assert finding.facts[1] == syn216.Text.VALUE(name="scaler.scale", values=scales)
    assert facts_of(finding)[Common.PARAMETERS]["count"] == 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_216_explains_skipped_steps(ranks: int) -> None:
    """Counters that lag by the overflows of a rank with a lower scale are SYN216, not SYN214 or SYN215."""
    for lag in (1, 8):
        by_rank = {rank: 100 - lag * (rank == ranks - 1) for rank in range(ranks)}
        scales = {rank: 65536.0 / 2 ** (100 - count) for rank, count in by_rank.items()}
        finding = only(group(*trained(by_rank), values=scaler(scales), ranks=ranks))
        assert (finding.code, finding.ranks) == ("SYN216", (ranks - 1,))
        assert facts_of(finding)[syn216.Text.OVERFLOW] == {"steps": by_rank}


def test_215_covers_a_scaler_that_was_not_restored() -> None:
    """A lag that halved scales cannot explain is lost state, including the scaler's state."""
    for scales in ({0: 65536.0, 1: 32768.0}, {0: 1024.0, 1: 65536.0}):
        finding = only(group(*trained({0: 100, 1: 50}), values=scaler(scales, {0: 100, 1: 50})))
        assert (finding.code, finding.ranks) == ("SYN215", (1,))
        assert syn215.Text.SCALER_DIFFERS in facts_of(finding)


def test_214_covers_the_scalers_count() -> None:
    """If the scales are equal and the scaler's count lags with the optimizer's, it is part of SYN214."""
    finding = only(group(*trained({0: 100, 1: 99}), values=scaler({0: 8.0, 1: 8.0}, {0: 100, 1: 99})))
    assert (finding.code, finding.values) == ("SYN214", ("scaler._growth_tracker",))


def test_216_with_equal_scales_covers_only_the_scaler() -> None:
    """If only the scaler's count differs, SYN216 leaves differing parameters to other rules."""
    values = scaler({0: 8.0, 1: 8.0}, {0: 100, 1: 7})
    fitted = found(group(*trained({0: 1, 1: 2}, counts=False), values=values))
    assert (fitted["SYN216"].tensors, fitted["SYN216"].values) == ((), ("scaler._growth_tracker",))
    assert fitted["SYN216"].facts[0] == syn216.Text.STATES_DIFFER()
    assert len(fitted) > 1


def test_216_leaves_a_few_parameters() -> None:
    """Different scales affect all parameters, so a single differing parameter has another cause."""
    one = diff("fc.weight", "parameter", {0: 1, 1: 2})
    parameters = dict.fromkeys(("a", "b", "c"), "parameter")
    case = group(one, diff("d", "buffer", {0: 1, 1: 2}), values=scaler({0: 8.0, 1: 4.0}), extra=parameters)
    assert found(case)["SYN216"].tensors == ()


def test_216_if_the_scale_is_a_tensor() -> None:
    """A scale may be saved as a tensor."""
    finding = only(group(*trained({0: 100, 1: 99}), counter("scaler.scale", "scaler", {0: 8.0, 1: 4.0})))
    assert (finding.code, finding.ranks) == ("SYN216", (1,))


def test_a_scaler_that_a_rank_lacks_is_not_216() -> None:
    """A scaler that some ranks lack is missing (SYN101), not in another state."""
    lacking = (ValueDiff("scaler.scale", {0: 8.0, 1: None}, counts=True, kind="scaler", lost=(1,)),)
    assert set(found(group(values=lacking))) == {"SYN101"}


def test_216_before_217() -> None:
    """A rank that skipped its last step because of an overflow is SYN216, with and without BatchNorm."""
    for forwards, bn in ((True, True), (True, False)):
        finding = only(behind(forwards=forwards, bn=bn, values=scaler({0: 8.0, 1: 4.0}, {0: 9, 1: 0})))
        assert (finding.code, finding.ranks) == ("SYN216", (1,))


def local_sgd(step: int, *tensors: Any, ranks: int = 2, **averaging: int) -> Group:
    """Return a group of local SGD, which averages after steps 8, 12, ..."""
    last = 0 if step < 8 else step // 4 * 4
    metadata = Metadata(averaging=AVERAGING | {"last_step": last} | averaging, step=step)
    return group(*tensors, step=step, ranks=ranks, metadata=metadata)


@pytest.mark.parametrize("step", [5, 7, 9, 10, 11])
@pytest.mark.parametrize("ranks", [2, 4])
def test_241_between_averages(step: int, ranks: int) -> None:
    """Between two averages of local SGD all trained tensors differ by design: SYN241, a warning, on all ranks."""
    own = {rank: rank for rank in range(ranks)}
    finding = only(local_sgd(step, *trained(own, counts=False), *statistics(own), ranks=ranks))
    assert (finding.code, finding.severity, finding.ranks) == ("SYN241", "warning", tuple(range(ranks)))
    assert finding.facts[0] == syn241.Text.OWN_STEPS(steps=step % 4)
    schedule = finding.facts[1]
    assert schedule.code is (syn241.Text.AVERAGED if step > 8 else syn241.Text.NOT_YET_AVERAGED)
    assert (schedule.parameters["period"], schedule.parameters["step"]) == (4, step)
    assert facts_of(finding)[Common.PARAMETERS]["count"] == 2


def test_241_right_after_an_average() -> None:
    """Right after an average only the momentum may differ; differing parameters are not SYN241."""
    apart = trained({0: 1, 1: 2}, counts=False)
    finding = only(local_sgd(8, *(d for d in apart if d.kind == "optimizer"), *statistics({0: 1, 1: 2})))
    assert finding.code == "SYN241"
    assert finding.facts[:4] == (
        syn241.Text.OWN_STATE(),
        syn241.Text.AVERAGED(period=4, last=8, step=8),
        syn241.Text.PARAMETERS_AGREE(),
        syn241.Text.STATE_DIFFERS(count=4),
    )
    assert "SYN241" not in found(local_sgd(8, *apart))


@pytest.mark.parametrize(("step", "averaging"), [(3, {}), (4, {}), (12, {"last_step": 8}), (9, {"last_step": 12})])
def test_not_241(step: int, averaging: dict[str, int]) -> None:
    """A difference in the warm-up, with an overdue average or with inconsistent metadata is not by design."""
    assert "SYN241" not in found(local_sgd(step, *trained({0: 1, 1: 2}, counts=False), **averaging))


def test_241_needs_metadata_and_equal_counters() -> None:
    """SYN241 needs metadata, and a rank that skipped a step is SYN214 under local SGD too."""
    assert "SYN241" not in found(group(*trained({0: 1, 1: 2}, counts=False)))
    assert "SYN241" not in found(
        group(*trained({0: 1, 1: 2}, counts=False), metadata=Metadata(averaging={"period": 4}))
    )
    assert set(found(local_sgd(10, *trained({0: 10, 1: 9})))) == {"SYN214"}


def test_241_leaves_untrained_parameters() -> None:
    """A parameter without optimizer state is not trained, so it differs for another reason."""
    frozen = diff("stem.weight", "parameter", {0: 1, 1: 2})
    assert "stem.weight" not in found(local_sgd(10, *trained({0: 1, 1: 2}, counts=False), frozen))["SYN241"].tensors


def test_241_with_digests_only() -> None:
    """Different digests match too, and the evidence claims no size."""
    unknown: dict[str, Any] = {"mismatched": None, "max_abs": None, "extent": None, "reason": "digest", "index": None}
    finding = only(local_sgd(10, diff("fc.weight", "parameter", {0: 1, 1: 2}, **unknown)))
    assert finding.code == "SYN241"
    assert facts_of(finding)[Common.PARAMETERS]["size"] == Common.SIZE_UNKNOWN()
