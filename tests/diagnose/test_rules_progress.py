"""SYN106, SYN214 and SYN215: ranks with different progress, a skipped step or lost state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.cases import DIGEST, diagnose_case, diagnose_single
from support.groups import facts_of
from support.listings import find_all
from support.progress_cases import STATE, batches, diff, group, missing, statistics, trained

import syncheck
from syncheck.diagnose import syn106_different_progress
from syncheck.diagnose import syn214_step_skipped as syn214
from syncheck.diagnose import syn215_optimizer_state_not_restored as syn215
from syncheck.diagnose.counters import Origin
from syncheck.diagnose.statements import Common
from syncheck.records import ValueDiff
from syncheck.snapshots import Metadata

if TYPE_CHECKING:
    from pathlib import Path

OWN = statistics({0: 1, 1: 2})
FROZEN = diff("stem.weight", "parameter", {0: 1, 1: 2})


@pytest.mark.parametrize(
    ("counts", "code", "suspects"),
    [
        # A lag of up to two steps or under 5 %.
        ({0: 100, 1: 99}, "SYN214", (1,)),
        ({0: 98, 1: 100}, "SYN214", (0,)),
        ({0: 2000, 1: 1901}, "SYN214", (1,)),
        ({0: 100, 1: 100, 2: 100, 3: 99}, "SYN214", (3,)),
        # The stored step, 100, shows that the majority skipped a step.
        ({0: 99, 1: 99, 2: 99, 3: 100}, "SYN214", (0, 1, 2)),
        ({0: 100, 1: 99, 2: 100, 3: 99}, "SYN214", (1, 3)),
        ({0: 100, 1: 99, 2: 98, 3: 97}, "SYN214", (1, 2, 3)),
        # A larger lag.
        ({0: 100, 1: 50}, "SYN215", (1,)),
        ({0: 7, 1: 12}, "SYN215", (0,)),
        ({0: 100, 1: 20, 2: 20, 3: 20}, "SYN215", (0,)),
        ({0: 100, 1: 100, 2: 100, 3: 20}, "SYN215", (3,)),
        ({0: 100, 1: 100, 2: 1, 3: 1}, "SYN215", (2, 3)),
    ],
)
def test_lag_of_step_counters(counts: dict[int, float], code: str, suspects: tuple[int, ...]) -> None:
    """A small lag is SYN214 and a large lag SYN215, on the odd ranks or on the ranks behind."""
    finding = diagnose_single(group(*trained(counts), *statistics({rank: rank for rank in counts}), ranks=len(counts)))
    assert (finding.code, finding.ranks) == (code, suspects)
    facts, highest = facts_of(finding), max(counts.values())
    lags = {highest - count for count in counts.values()} - {0}
    assert facts[Origin.COUNTERS]["steps"] == counts
    if code == "SYN215":
        assert finding.facts[0] == syn215.Text.ON_SOME_RANKS(ranks=suspects)
        assert facts[syn215.Text.STATE_DIFFERS] == {"count": 4}
        return
    summary = finding.facts[0]
    assert summary.code is (syn214.Text.COUNTED_SKIPPED if len(lags) == 1 else syn214.Text.COUNTED_SKIPPED_UP_TO)
    behind = tuple(rank for rank, count in counts.items() if count < highest)
    assert (summary.parameters["lag"], summary.parameters["ranks"]) == (max(lags), behind)
    assert facts[Origin.COUNTERS] == {"counters": 2, "lag": max(lags), "steps": counts}
    assert facts[Common.PARAMETERS]["count"] == 2
    assert syn214.Text.FORWARD_RAN in facts


@pytest.mark.parametrize(
    ("counts", "doubtful"), [({0: 4, 1: 3}, True), ({0: 2000, 1: 1980}, True), ({0: 12, 1: 11}, False)]
)
def test_214_mentions_lost_state(counts: dict[int, float], doubtful: bool) -> None:
    """SYN214 mentions lost optimizer state in a short run or for a lag of more than two steps."""
    finding = diagnose_single(group(*trained(counts)))
    assert finding.code == "SYN214"
    assert (syn214.Text.LOST_STATE in facts_of(finding)) is doubtful


def test_214_with_a_growing_lag() -> None:
    """If the lag was smaller at an earlier step, SYN214 reports repeated skips."""
    now = group(*trained({0: 100, 1: 98}))
    growing = facts_of(diagnose_single(now, group(*trained({0: 50, 1: 49}), step=50)))
    constant = facts_of(diagnose_single(now, group(*trained({0: 50, 1: 48}), step=50)))
    assert growing[syn214.Text.REPEATED] == {"step": 50, "lag": 1}
    assert syn214.Text.REPEATED not in constant


def test_215_right_after_loading() -> None:
    """If parameters are still equal, SYN215 reports no step since the loading."""
    finding = diagnose_single(group(*(diff for diff in trained({0: 100, 1: 1}) if diff.kind != "parameter")))
    assert (finding.code, finding.ranks) == ("SYN215", (1,))
    assert syn215.Text.NO_STEP_SINCE in facts_of(finding)


@pytest.mark.parametrize(
    ("counts", "stored", "suspects"),
    [
        # A trainer that counts from 0 stores 5 after 6 steps.
        ({0: 5, 1: 6}, 5, (0, 1)),
        ({0: 6, 1: 5}, 5, (0, 1)),
        ({0: 5, 1: 6}, None, (0, 1)),
        ({0: 5, 1: 6}, 6, (0,)),
        ({0: 5, 1: 7}, 5, (1,)),
        ({0: 7, 1: 5}, 5, (0,)),
        ({0: 5, 1: 5, 2: 6}, None, (2,)),
        ({0: 200, 1: 100}, 100, (0,)),
        ({0: 200, 1: 100}, None, (1,)),
    ],
)
def test_215_without_a_majority(
    tmp_path: Path, counts: dict[int, int], stored: int | None, suspects: tuple[int, ...]
) -> None:
    """All parameters agree: the stored step shows which rank loaded other optimizer state, else no rank is named."""
    torch = pytest.importorskip("torch")
    model = {"weight": torch.ones(4, 4), "bias": torch.ones(4)}
    group_of_parameters = {"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}
    for rank, count in counts.items():
        moment = {"exp_avg": torch.full((4, 4), float(count)), "step": torch.tensor(float(count))}
        states = {0: moment, 1: moment | {"exp_avg": torch.full((4,), float(count))}}
        tree: dict[str, Any] = {"model": model, "optimizer": {"state": states, "param_groups": [group_of_parameters]}}
        torch.save(tree if stored is None else tree | {"step": stored}, tmp_path / f"rank{rank}.pt")
    (finding,) = syncheck.compare(tmp_path).groups[0].findings
    assert (finding.code, finding.certainty, finding.ranks) == ("SYN215", "proved", suspects)


@pytest.mark.parametrize(("holders", "ranks", "suspect"), [((0,), 2, 1), ((0,), 4, 0), ((0, 1, 3), 4, 2)])
def test_215_with_an_empty_optimizer(holders: tuple[int, ...], ranks: int, suspect: int) -> None:
    """An optimizer with parameter groups but no state is SYN215 on the smaller set of ranks or on the empty rank."""
    finding = diagnose_single(
        group(*missing(holders, *STATE), ranks=ranks, hyperparameters={"lr": 0.1}, stores_progress=False)
    )
    assert (finding.code, finding.ranks) == ("SYN215", (suspect,))
    empty = tuple(sorted({*range(ranks)} - {*holders}))
    assert finding.facts[0] == syn215.Text.EMPTY(ranks=empty, others=holders, tensors=6)


LOST = ValueDiff("optimizer.param_groups.0.lr", {0: 0.1, 1: None}, counts=True, kind="setting", lost=(1,))


@pytest.mark.parametrize(
    ("tensors", "fields"),
    [
        (missing((0,), *STATE), {"values": (LOST,)}),  # no optimizer at all
        (missing((0,), *STATE), {"hyperparameters": {}}),
        (missing((0,), *STATE[:3]), {}),  # a part of the state
        ((*missing((0,), *STATE[:3]), *missing((1,), *STATE[3:])), {}),
        (missing((0,), *STATE), {"metadata": Metadata(optimizer_sharded=True)}),  # ZeRO
    ],
)
def test_101_of_optimizer_state(tensors: Any, fields: dict[str, Any]) -> None:
    """Without parameter groups, with a part of the state, or with sharded state, missing tensors are SYN101."""
    assert set(diagnose_case(group(*tensors, **{"hyperparameters": {"lr": 0.1}} | fields))) == {"SYN101"}


@pytest.mark.parametrize(("lag", "code"), [(1, "SYN214"), (50, "SYN215")])
@pytest.mark.parametrize("name", ["optimizer.state.0.step", "optimizer.param_groups.0.step"])
def test_counters_as_python_numbers(lag: int, code: str, name: str) -> None:
    """Counters stored as Python numbers lead to the same findings, which cover all trained tensors."""
    value = ValueDiff(name, {0: 100, 1: 100 - lag}, counts=True, kind="counter")
    finding = diagnose_single(group(*trained({0: 1, 1: 2}, counts=False), values=(value,)))
    assert (finding.code, finding.ranks, finding.values) == (code, (1,), (name,))


def test_only_parameters_with_lagging_counters_are_covered() -> None:
    """SYN214 covers only parameters with a small lag: no frozen parameters or large lags (SYN215).

    If only some counters differ, their parameters were not updated (SYN225).
    """
    close_case, distant_case = trained({0: 100, 1: 99}), trained({0: 100, 1: 9})
    bias = {d.name for d in close_case if "bias" in d.name}
    fitted = diagnose_case(
        group(*(d for d in close_case if d.name in bias), diff("fc.weight", "parameter", {0: 1, 1: 2}))
    )
    assert set(fitted["SYN225"].tensors) == bias
    assert not {"SYN214", "SYN215"} & set(fitted)
    assert FROZEN.name not in diagnose_case(group(*close_case, FROZEN))["SYN214"].tensors
    value = ValueDiff("optimizer.state.0.step", {0: 100, 1: 99}, counts=True, kind="counter")
    fields: dict[str, Any] = {"values": (value,), "metadata": Metadata(frozen=(FROZEN.name,))}
    fitted = diagnose_case(group(*trained({0: 1, 1: 2}, counts=False), FROZEN, **fields))
    assert FROZEN.name not in fitted["SYN214"].tensors
    both = diagnose_case(
        group(*(d if d.name in bias else second for d, second in zip(close_case, distant_case, strict=True)))
    )
    assert set(both) == {"SYN214", "SYN215"}
    assert set(both["SYN214"].tensors) == bias


@pytest.mark.parametrize("lag", [1, 99])
def test_counters_that_differ_alone(lag: int) -> None:
    """Differences in step counters alone are neither SYN214 nor SYN215."""
    alone = find_all(trained({0: 100, 1: 100 - lag}), kind="optimizer_step")
    assert not {"SYN214", "SYN215"} & set(diagnose_case(group(*alone)))


def test_digests_show_no_lag() -> None:
    """Digests of counters are never SYN214 or SYN215, and SYN106 only if all differ and no step is stored."""
    tensors = [diff(d.name, d.kind, {0: 1, 1: 2}, **DIGEST) for d in trained({0: 1, 1: 2})]
    assert not {"SYN106", "SYN214", "SYN215"} & set(diagnose_case(group(*tensors)))
    finding = diagnose_single(group(*tensors, stores_progress=False))
    assert (finding.code, finding.ranks) == ("SYN106", (0, 1))
    step = diff("optimizer.fc.bias.step", "optimizer_step", {0: 1, 1: 2}, mismatched=None, reason="digest")
    assert "SYN106" not in diagnose_case(group(step, stores_progress=False))


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("counts", [{0: 100, 1: 80}, {0: 400, 1: 320}])
def test_106_if_batchnorm_lags_too(counts: dict[int, float], stored: bool) -> None:
    """If BatchNorm's counts lag with all step counters, by a whole number per step, the finding is SYN106."""
    finding = diagnose_single(group(*trained({0: 100, 1: 80}), batches(counts), *OWN, stores_progress=stored))
    assert (finding.code, finding.ranks) == ("SYN106", (1,))
    text = syn106_different_progress.Text
    lag = text.FORWARDS_LAG_DESPITE_STEP() if stored else text.FORWARDS_LAG()
    assert finding.facts == (text.STEP_COUNTERS(counters=2, lag=20, counts={0: 100, 1: 80}), lag)


@pytest.mark.parametrize("counts", [{0: 80, 1: 100}, {0: 100, 1: 93}])
def test_not_106_if_batchnorm_lags_otherwise(counts: dict[int, float]) -> None:
    """If BatchNorm's counts lag on the other rank or by a fraction per step, the findings are SYN215 and SYN203."""
    assert set(diagnose_case(group(*trained({0: 100, 1: 80}), batches(counts)))) == {"SYN215", "SYN203"}


def test_skipped_forward_pass_and_step() -> None:
    """If BatchNorm's counts lag by the skipped step, SYN214 covers the counts; without a stored step, SYN106 does."""
    case = (*trained({0: 100, 1: 99}), batches({0: 100, 1: 99}), *OWN)
    finding = diagnose_single(group(*case))
    assert finding.code == "SYN214"
    assert syn214.Text.FORWARD_MISSING in facts_of(finding)
    assert diagnose_single(group(*case, stores_progress=False)).code == "SYN106"
    step = ValueDiff("step", {0: 100, 1: 99}, counts=True, kind="progress")
    assert diagnose_single(group(*trained({0: 100, 1: 99}), values=(step,))).code == "SYN106"
