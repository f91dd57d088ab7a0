"""Ranks at an earlier step, loss scalers apart, and local SGD: SYN217, SYN216, SYN241 and their neighbours."""

from __future__ import annotations

from typing import Any

import pytest
from progress_cases import counter, diff, found, group, only, scaler, statistics, trained

from syncheck.records import Group, ValueDiff
from syncheck.snapshots import Metadata

AVERAGING = {"period": 4, "warmup_steps": 4, "last_step": 8}


def behind(ranks: int = 2, *, step: int = 100, counts: bool = True, forwards: bool = False, **fields: Any) -> Group:
    """Return a group whose last rank is where the others were one step ago. forwards: it has counted the batches."""
    by_rank = {rank: step - (rank == ranks - 1) for rank in range(ranks)}
    bn = () if forwards else (counter("bn.num_batches_tracked", "bn_count", by_rank),)
    own = statistics({rank: rank for rank in by_rank})
    fields = {"stale": {ranks - 1: step - 1}} | fields
    return group(*trained(by_rank, counts=counts), *bn, *own, ranks=ranks, step=step, **fields)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("counts", [True, False], ids=["adamw", "sgd"])
def test_217(ranks: int, counts: bool) -> None:
    """A rank at the others' earlier step is SYN217, and BatchNorm's counts and statistics are covered with it."""
    finding = only(behind(ranks, counts=counts))
    assert (finding.code, finding.ranks) == ("SYN217", (ranks - 1,))
    assert f"rank {ranks - 1} is at step 99, this is step 100: 2 parameters and " in finding.evidence
    assert "3 tensors of BatchNorm differ with it" in finding.evidence


def test_217_before_106() -> None:
    """A rank whose file names an earlier step, and is to the byte the others' of then, is SYN217 and not SYN106."""
    value = ValueDiff("step", {0: 100, 1: 99}, counts=True, kind="progress")
    finding = only(behind(values=(value,)))
    assert finding.code == "SYN217"
    assert "the file of rank 1 names another step as well" in finding.evidence
    assert only(behind(values=(value,), stale={})).code == "SYN106"


def test_217_leaves_what_the_others_disagree_on() -> None:
    """A parameter in which the ranks that are not stale differ too has another cause beside."""
    stale = behind(4)
    other = diff("stem.weight", "parameter", {0: 1, 1: 2, 2: 1, 3: 3})
    case = group(*stale.tensors, other, ranks=4, stale={3: 99})
    fitted = found(case)
    assert "stem.weight" not in fitted["SYN217"].tensors
    assert set(fitted["SYN217"].tensors) == {d.name for d in stale.tensors}


@pytest.mark.parametrize("counts", [True, False], ids=["adamw", "sgd"])
def test_214_where_the_forward_was_counted(counts: bool) -> None:
    """Old parameters and old state beside BatchNorm's new counts are a skipped step, with SGD too."""
    finding = only(behind(4, forwards=True, counts=counts))
    assert (finding.code, finding.ranks) == ("SYN214", (3,))
    assert "at step 100 rank 3 was, to the byte, where the others were at step 99" in finding.evidence


def test_217_where_only_parameters_are_old() -> None:
    """Old parameters beside the optimizer's new state came from a gather: SYN217, whatever BatchNorm counted."""
    by_rank = {0: 100, 1: 99}
    parameters = [d for d in trained(by_rank) if d.kind == "parameter"]
    assert only(group(*parameters, stale={1: 99})).code == "SYN217"


def test_a_rank_many_steps_behind_did_not_lose_its_state() -> None:
    """A rank that is where the others were ten steps ago is no SYN215, though the counters are far apart."""
    by_rank = {0: 20, 1: 10}
    count = counter("bn.num_batches_tracked", "bn_count", by_rank)
    assert only(group(*trained(by_rank), count, stale={1: 10}, step=20)).code == "SYN217"
    assert only(group(*trained(by_rank), stale={1: 10}, step=20)).code == "SYN214"


def later(**fields: Any) -> Group:
    """Return the group of a later step: BatchNorm's counts were broadcast, SGD counts no steps."""
    return group(*trained({0: 1, 1: 2}, counts=False), *statistics({0: 1, 1: 2}), step=110, **fields)


def test_a_series_shows_how_it_began() -> None:
    """What has differed ever since a rank left out a step is SYN214, ever since it was stale SYN217, with SGD too."""
    skipped = only(later(), behind(forwards=True, counts=False))
    assert (skipped.code, skipped.ranks) == ("SYN214", (1,))
    assert "at step 100 rank 1 was, to the byte, where the others were at step 99" in skipped.evidence
    set_back = only(later(), behind(counts=False))
    assert (set_back.code, set_back.ranks) == ("SYN217", (1,))
    assert "trained on from there" in set_back.evidence


def test_a_series_that_was_in_sync_in_between_shows_nothing() -> None:
    """After a step at which parameters agreed an earlier stale file explains nothing."""
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
    """Scales that differ are SYN216, cover what is trained, and name the odd rank or, if that shows, who backed off."""
    finding = only(
        group(*trained(scales, counts=False), *statistics(scales), values=scaler(scales, good), ranks=len(scales))
    )
    assert (finding.code, finding.ranks) == ("SYN216", suspects)
    assert "apart by a factor of 2" in finding.evidence
    assert "2 of 2 parameters differ" in finding.evidence


@pytest.mark.parametrize("ranks", [2, 4])
def test_216_explains_the_steps_it_left_out(ranks: int) -> None:
    """Counters that lag by the overflows of a rank with a lower scale are SYN216 and not SYN214 or SYN215 beside it."""
    for lag in (1, 8):
        by_rank = {rank: 100 - lag * (rank == ranks - 1) for rank in range(ranks)}
        scales = {rank: 65536.0 / 2 ** (100 - count) for rank, count in by_rank.items()}
        finding = only(group(*trained(by_rank), values=scaler(scales), ranks=ranks))
        assert (finding.code, finding.ranks) == ("SYN216", (ranks - 1,))
        assert "an overflow leaves its step out" in finding.evidence


def test_215_takes_the_scaler_that_was_not_restored() -> None:
    """A lag that halved scales cannot explain is a lost state, the scaler's with it."""
    for scales in ({0: 65536.0, 1: 32768.0}, {0: 1024.0, 1: 65536.0}):
        finding = only(group(*trained({0: 100, 1: 50}), values=scaler(scales, {0: 100, 1: 50})))
        assert (finding.code, finding.ranks) == ("SYN215", (1,))
        assert "the loss scaler's state differs with it" in finding.evidence


def test_a_count_of_good_steps_follows_a_skipped_step() -> None:
    """With equal scales the scaler's count of steps that lags with the optimizer's is a part of SYN214."""
    finding = only(group(*trained({0: 100, 1: 99}), values=scaler({0: 8.0, 1: 8.0}, {0: 100, 1: 99})))
    assert (finding.code, finding.values) == ("SYN214", ("scaler._growth_tracker",))


def test_216_with_equal_scales_explains_nothing_else() -> None:
    """A count of good steps that differs alone is SYN216, and parameters that differ are left to other rules."""
    values = scaler({0: 8.0, 1: 8.0}, {0: 100, 1: 7})
    fitted = found(group(*trained({0: 1, 1: 2}, counts=False), values=values))
    assert (fitted["SYN216"].tensors, fitted["SYN216"].values) == ((), ("scaler._growth_tracker",))
    assert len(fitted) > 1


def test_216_leaves_a_few_parameters() -> None:
    """Unlike scales pull all parameters apart; one of several that differs has another cause."""
    one = diff("fc.weight", "parameter", {0: 1, 1: 2})
    parameters = dict.fromkeys(("a", "b", "c"), "parameter")
    case = group(one, diff("d", "buffer", {0: 1, 1: 2}), values=scaler({0: 8.0, 1: 4.0}), extra=parameters)
    assert found(case)["SYN216"].tensors == ()


def test_216_where_the_scale_is_a_tensor() -> None:
    """A scale that is saved as a tensor tells the same."""
    finding = only(group(*trained({0: 100, 1: 99}), counter("scaler.scale", "scaler", {0: 8.0, 1: 4.0})))
    assert (finding.code, finding.ranks) == ("SYN216", (1,))


def test_a_scaler_that_a_rank_lacks_is_not_216() -> None:
    """A scaler that only some ranks have is in no other state than theirs: it is missing."""
    lacking = (ValueDiff("scaler.scale", {0: 8.0, 1: None}, counts=True, kind="scaler", lost=(1,)),)
    assert set(found(group(values=lacking))) == {"SYN101"}


def test_216_before_217() -> None:
    """A rank that left out its last step for an overflow of its own is SYN216, with BatchNorm and without."""
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
    """Between two averages of local SGD all that is trained differs by design: SYN241, a warning, on all ranks."""
    own = {rank: rank for rank in range(ranks)}
    finding = only(local_sgd(step, *trained(own, counts=False), *statistics(own), ranks=ranks))
    assert (finding.code, finding.severity, finding.ranks) == ("SYN241", "warning", tuple(range(ranks)))
    assert f"step {step}, parameters are averaged every 4 steps" in finding.evidence
    assert f"2 of 2 parameters differ after {step % 4} step" in finding.evidence


def test_241_right_after_an_average() -> None:
    """Right after an average the parameters agree and the momentum does not: SYN241; parameters apart are not."""
    apart = trained({0: 1, 1: 2}, counts=False)
    finding = only(local_sgd(8, *(d for d in apart if d.kind == "optimizer"), *statistics({0: 1, 1: 2})))
    assert finding.code == "SYN241"
    assert "averaged after this one; all parameters agree; 4 tensors of the optimizer differ" in finding.evidence
    assert "SYN241" not in found(local_sgd(8, *apart))


@pytest.mark.parametrize(("step", "averaging"), [(3, {}), (4, {}), (12, {"last_step": 8}), (9, {"last_step": 12})])
def test_241_is_silent_where_the_method_does_not_explain_it(step: int, averaging: dict[str, int]) -> None:
    """In the warm-up, where an average is overdue, and where the metadata contradicts itself, it is not by design."""
    assert "SYN241" not in found(local_sgd(step, *trained({0: 1, 1: 2}, counts=False), **averaging))


def test_241_needs_metadata_and_equal_counters() -> None:
    """Without metadata nothing is by design, and a rank that skipped a step is SYN214 under local SGD too."""
    assert "SYN241" not in found(group(*trained({0: 1, 1: 2}, counts=False)))
    assert "SYN241" not in found(
        group(*trained({0: 1, 1: 2}, counts=False), metadata=Metadata(averaging={"period": 4}))
    )
    assert set(found(local_sgd(10, *trained({0: 10, 1: 9})))) == {"SYN214"}


def test_241_leaves_what_is_not_trained() -> None:
    """A parameter without optimizer state is in no average's way: it differs for another reason."""
    frozen = diff("stem.weight", "parameter", {0: 1, 1: 2})
    assert "stem.weight" not in found(local_sgd(10, *trained({0: 1, 1: 2}, counts=False), frozen))["SYN241"].tensors


def test_241_with_digests_only() -> None:
    """Digests that differ are as much by design as numbers."""
    unknown: dict[str, Any] = {"mismatched": None, "max_abs": None, "extent": None, "reason": "digest", "index": None}
    finding = only(local_sgd(10, diff("fc.weight", "parameter", {0: 1, 1: 2}, **unknown)))
    assert finding.code == "SYN241"
    assert "by how much is not known" in finding.evidence
