"""Ranks that skipped a step or lost state: SYN106, SYN214 and SYN215, and how they are distinguished."""

from __future__ import annotations

from typing import Any

import pytest
from groups import facts_of
from progress_cases import STATE, counter, diff, found, group, missing, only, statistics, trained

from syncheck.diagnose import syn106_different_progress
from syncheck.diagnose import syn214_step_skipped as syn214
from syncheck.diagnose import syn215_optimizer_state_not_restored as syn215
from syncheck.diagnose.case import Common
from syncheck.diagnose.origin import Origin
from syncheck.records import ValueDiff
from syncheck.snapshots import Metadata


@pytest.mark.parametrize(
    ("counts", "suspects"),
    [
        ({0: 100, 1: 99}, (1,)),
        ({0: 98, 1: 100}, (0,)),
        ({0: 2000, 1: 1901}, (1,)),
        ({0: 100, 1: 100, 2: 100, 3: 99}, (3,)),
        ({0: 99, 1: 99, 2: 99, 3: 100}, (3,)),
        ({0: 100, 1: 99, 2: 100, 3: 99}, (1, 3)),
        ({0: 100, 1: 99, 2: 98, 3: 97}, (1, 2, 3)),
    ],
)
def test_214(counts: dict[int, float], suspects: tuple[int, ...]) -> None:
    """Counters with a lag of up to two steps or under 5 % are SYN214; suspects are the odd ranks or those behind."""
    finding = only(group(*trained(counts), *statistics({rank: rank for rank in counts}), ranks=len(counts)))
    assert (finding.code, finding.ranks) == ("SYN214", suspects)
    highest = max(counts.values())
    summary = finding.facts[0]
    lags = {highest - count for count in counts.values()} - {0}
    assert summary.code is (syn214.Text.SKIPPED if len(lags) == 1 else syn214.Text.SKIPPED_UP_TO)
    assert summary.parameters["lag"] == max(lags)
    assert summary.parameters["ranks"] == tuple(rank for rank, count in counts.items() if count < highest)
    facts = facts_of(finding)
    assert facts[Origin.COUNTERS] == {"counters": 2, "lag": max(lags), "steps": counts}
    assert facts[Common.PARAMETERS]["count"] == 2
    assert syn214.Text.FORWARD_RAN in facts


def test_214_mentions_lost_state() -> None:
    """In a short run, or with a lag of more than two steps, lost optimizer state looks the same."""
    for counts, doubtful in (({0: 4, 1: 3}, True), ({0: 2000, 1: 1980}, True), ({0: 12, 1: 11}, False)):
        finding = only(group(*trained(counts)))
        assert finding.code == "SYN214"
        assert (syn214.Text.LOST_STATE in facts_of(finding)) is doubtful


def test_214_with_a_growing_lag() -> None:
    """A lag that was smaller at an earlier step means that steps were skipped repeatedly."""
    now = group(*trained({0: 100, 1: 98}))
    growing = only(now, group(*trained({0: 50, 1: 49}), step=50))
    assert facts_of(growing)[syn214.Text.REPEATED] == {"step": 50, "lag": 1}
    constant = only(now, group(*trained({0: 50, 1: 48}), step=50))
    assert syn214.Text.REPEATED not in facts_of(constant)


@pytest.mark.parametrize(
    ("counts", "suspects"),
    [
        ({0: 100, 1: 50}, (1,)),
        ({0: 7, 1: 12}, (0,)),
        ({0: 100, 1: 20, 2: 20, 3: 20}, (0,)),
        ({0: 100, 1: 100, 2: 100, 3: 20}, (3,)),
        ({0: 100, 1: 100, 2: 1, 3: 1}, (2, 3)),
    ],
)
def test_215(counts: dict[int, float], suspects: tuple[int, ...]) -> None:
    """Counters that are far apart are SYN215 on the ranks outside the majority, else on the ranks behind."""
    finding = only(group(*trained(counts), *statistics({rank: rank for rank in counts}), ranks=len(counts)))
    assert (finding.code, finding.ranks) == ("SYN215", suspects)
    assert finding.facts[0] == syn215.Text.ON_SOME_RANKS(ranks=suspects)
    assert facts_of(finding)[Origin.COUNTERS]["steps"] == counts
    assert facts_of(finding)[syn215.Text.STATE_DIFFERS] == {"count": 4}


def test_215_at_the_moment_of_the_resume() -> None:
    """Right after loading, parameters still agree, and the evidence says so."""
    lost = [found for found in trained({0: 100, 1: 1}) if found.kind != "parameter"]
    finding = only(group(*lost))
    assert (finding.code, finding.ranks) == ("SYN215", (1,))
    assert syn215.Text.NO_STEP_SINCE in facts_of(finding)


def test_215_with_an_empty_optimizer() -> None:
    """An optimizer with parameter groups but no state is SYN215 on the smaller set of ranks, or on the empty ranks."""
    saved = {"hyperparameters": {"lr": 0.1}, "stores_progress": False}
    finding = only(group(*missing((0,), *STATE), **saved))
    assert (finding.code, finding.ranks) == ("SYN215", (1,))
    assert finding.facts[0] == syn215.Text.EMPTY(ranks=(1,), others=(0,), tensors=6)
    assert only(group(*missing((0,), *STATE), ranks=4, **saved)).ranks == (0,)
    assert only(group(*missing((0, 1, 3), *STATE), ranks=4, **saved)).ranks == (2,)


def test_101_where_the_optimizer_itself_is_missing() -> None:
    """A file without any optimizer, one that lacks a part of its state, and ZeRO's parts are SYN101 as before."""
    name = "optimizer.param_groups.0.lr"
    no_groups = (ValueDiff(name, {0: 0.1, 1: None}, counts=True, kind="setting", lost=(1,)),)
    zero = Metadata(optimizer_sharded=True)
    for case in (
        group(*missing((0,), *STATE), hyperparameters={"lr": 0.1}, values=no_groups),
        group(*missing((0,), *STATE)),
        group(*missing((0,), *STATE[:3]), hyperparameters={"lr": 0.1}),
        group(*missing((0,), *STATE[:3]), *missing((1,), *STATE[3:]), hyperparameters={"lr": 0.1}),
        group(*missing((0,), *STATE), hyperparameters={"lr": 0.1}, metadata=zero),
    ):
        assert set(found(case)) == {"SYN101"}


@pytest.mark.parametrize(("counts", "code"), [({0: 100, 1: 99}, "SYN214"), ({0: 100, 1: 50}, "SYN215")])
def test_counters_that_are_python_numbers(counts: dict[int, float], code: str) -> None:
    """A counter that no tensor holds tells the same, and is covered with all that is trained."""
    for name in ("optimizer.state.0.step", "optimizer.param_groups.0.step"):
        value = ValueDiff(name, counts, counts=True, kind="counter")
        finding = only(group(*trained(counts, counts=False), values=(value,)))
        assert (finding.code, finding.ranks, finding.values) == (code, (1,), (name,))


def test_only_what_is_counted_apart_is_covered() -> None:
    """Where one parameter's counter lags, another parameter that differs has another cause; so has a frozen one."""
    lagging = [d for d in trained({0: 100, 1: 99}) if "bias" in d.name]
    fitted = found(group(*lagging, diff("fc.weight", "parameter", {0: 1, 1: 2})))
    assert set(fitted["SYN214"].tensors) == {d.name for d in lagging}
    assert not any("fc.weight" in fitted[code].tensors for code in ("SYN214", "SYN215") if code in fitted)
    frozen = diff("stem.weight", "parameter", {0: 1, 1: 2})
    assert "stem.weight" not in found(group(*trained({0: 100, 1: 99}), frozen))["SYN214"].tensors
    value = ValueDiff("optimizer.state.0.step", {0: 100, 1: 99}, counts=True, kind="counter")
    case = group(
        *trained({0: 1, 1: 2}, counts=False), frozen, values=(value,), metadata=Metadata(frozen=("stem.weight",))
    )
    assert "stem.weight" not in found(case)["SYN214"].tensors


def test_far_and_near_counters_are_told_apart() -> None:
    """Of one optimizer some counters may be far apart and others near: each rule covers its own."""
    near = [d for d in trained({0: 100, 1: 99}) if "bias" in d.name]
    far = [d for d in trained({0: 100, 1: 9}) if "weight" in d.name]
    fitted = found(group(*near, *far))
    assert set(fitted) == {"SYN214", "SYN215"}
    assert set(fitted["SYN215"].tensors) == {d.name for d in far}


def test_counters_alone_are_no_lost_step() -> None:
    """Counters that differ while nothing else does were set by somebody: neither a skipped step nor a lost state."""
    for counts in ({0: 100, 1: 99}, {0: 100, 1: 1}):
        alone = [d for d in trained(counts) if d.kind == "optimizer_step"]
        assert not {"SYN214", "SYN215"} & set(found(group(*alone)))


def test_digests_tell_no_lag() -> None:
    """Counters of which only digests are known make neither SYN214 nor SYN215, with and without a stored step."""
    unknown: dict[str, Any] = {"mismatched": None, "max_abs": None, "extent": None, "reason": "digest", "index": None}
    names = [(d.name, d.kind) for d in trained({0: 1, 1: 2})]
    tensors = [diff(name, kind, {0: 1, 1: 2}, **unknown) for name, kind in names]
    assert not {"SYN106", "SYN214", "SYN215"} & set(found(group(*tensors)))
    finding = only(group(*tensors, stores_progress=False))
    assert (finding.code, finding.ranks) == ("SYN106", (0, 1))


@pytest.mark.parametrize("batches", [{0: 100, 1: 80}, {0: 400, 1: 320}])
def test_106_where_batchnorm_lags_as_well(batches: dict[int, float]) -> None:
    """BatchNorm's counts that lag with all counters, one or several a step, are files of different moments."""
    count = counter("bn.num_batches_tracked", "bn_count", batches)
    for stored in (True, False):
        finding = only(group(*trained({0: 100, 1: 80}), count, *statistics({0: 1, 1: 2}), stores_progress=stored))
        assert (finding.code, finding.ranks) == ("SYN106", (1,))
        text = syn106_different_progress.Text
        lag = text.FORWARDS_LAG_DESPITE_STEP() if stored else text.FORWARDS_LAG()
        assert finding.facts == (text.STEP_COUNTERS(counters=2, lag=20, counts={0: 100, 1: 80}), lag)


def test_a_lag_of_other_ranks_is_no_other_moment() -> None:
    """Counts that lag on the other rank, or by no whole number of batches a step, leave SYN215 and SYN203."""
    for batches in ({0: 80, 1: 100}, {0: 100, 1: 93}):
        count = counter("bn.num_batches_tracked", "bn_count", batches)
        assert set(found(group(*trained({0: 100, 1: 80}), count))) == {"SYN215", "SYN203"}


def test_a_whole_step_that_was_missed() -> None:
    """Where BatchNorm's counts lag by the skipped step, SYN214 covers them; without a stored step it is SYN106."""
    count = counter("bn.num_batches_tracked", "bn_count", {0: 100, 1: 99})
    case = (*trained({0: 100, 1: 99}), count, *statistics({0: 1, 1: 2}))
    finding = only(group(*case))
    assert finding.code == "SYN214"
    assert syn214.Text.FORWARD_MISSING in facts_of(finding)
    assert only(group(*case, stores_progress=False)).code == "SYN106"


def test_a_differing_step_comes_first() -> None:
    """A differing top-level step is SYN106, whatever the counters say."""
    value = ValueDiff("step", {0: 100, 1: 99}, counts=True, kind="progress")
    assert only(group(*trained({0: 100, 1: 99}), values=(value,))).code == "SYN106"


def test_some_counters_are_no_other_moment() -> None:
    """Without a stored step, digests of a few counters that differ do not make files of different moments."""
    step = diff("optimizer.fc.bias.step", "optimizer_step", {0: 1, 1: 2}, mismatched=None, reason="digest")
    assert "SYN106" not in found(group(step, stores_progress=False))
