"""Differences that a witness explained before a comparison: on the same ranks and tensors, and on no other ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support import small_model
from support.cases import diff, group

from syncheck.diagnose import syn299_unexplained_difference as syn299
from syncheck.diagnose.rules import diagnose
from syncheck.live.witnesses.rules import Seen, make_finding
from syncheck.records import ValueDiff

if TYPE_CHECKING:
    from syncheck.records import Finding

THREE = ((0, 2), (1,))


def witness(code: str, ranks: tuple[int, ...], *names: str) -> Finding:
    """Return the finding of a witness that explains parameters."""
    return make_finding(code, ranks, (Seen.PLACE(unit="reduction", number=5),), names=names)


def list_tensors(case: Any, *witnessed: Finding) -> dict[tuple[str, tuple[int, ...]], tuple[str, ...]]:
    """Return the tensors of each finding by its code and ranks."""
    findings = diagnose(case, (), frozenset(), witnessed)
    return {(finding.code, finding.ranks): finding.tensors for finding in findings}


def test_a_witness_explains_a_parameter_and_its_optimizer_state() -> None:
    """The parameter, its moments and its averaged copy have the code of the witness; no rule states another cause."""
    names = ("fc.weight", "optimizer.fc.weight.exp_avg", "optimizer.1.fc.weight.exp_avg", "ema.module.fc.weight")
    kinds = ("parameter", "optimizer", "optimizer", "ema")
    case = group(*[diff(name, kind, THREE) for name, kind in zip(names, kinds, strict=True)], ranks=3)
    assert list_tensors(case, witness("SYN410", (1,), "fc.weight")) == {("SYN410", (1,)): names}


@pytest.mark.parametrize(
    "other",
    [
        diff("fc.bias", "parameter", THREE),
        diff("fc.weight", "parameter", ((0, 1), (2,))),
        diff("weight", "parameter", THREE),
        diff("optimizer.conv.weight.exp_avg", "optimizer", THREE),
        diff("bn.running_mean", "bn_mean", THREE),
    ],
    ids=["another parameter", "another rank", "the end of a name", "another moment", "a buffer"],
)
def test_a_witness_explains_nothing_else(other: Any) -> None:
    """Other tensors, and other ranks of the same tensor, keep the cause that a rule states."""
    explained = list_tensors(group(other, ranks=3), witness("SYN410", (1,), "fc.weight"))
    assert explained == list_tensors(group(other, ranks=3))


def test_what_another_rank_differs_by_remains() -> None:
    """Of a tensor that differs on two ranks, the witness of one explains that rank; a rule explains the other one."""
    case = group(diff("fc.weight", "parameter", ((0, 3), (1,), (2,))), ranks=4)
    explained = list_tensors(case, witness("SYN410", (1,), "fc.weight"))
    assert explained.pop(("SYN410", (1,))) == ("fc.weight",)
    assert [ranks for _, ranks in explained] == [(2,)]


def test_the_first_of_two_witnesses_explains() -> None:
    """A scaler that diverged makes gradients differ at the next step: the first finding is the cause."""
    case = group(diff("fc.weight", "parameter", THREE), ranks=3)
    witnessed = [witness(code, (1,), "fc.weight") for code in ("SYN216", "SYN410")]
    assert list(list_tensors(case, *witnessed)) == [("SYN216", (1,))]


def test_a_rule_of_the_same_code_joins_the_witness() -> None:
    """A rule that finds the same fault on the same ranks adds its evidence, and the finding is proved once."""
    case = group(
        *[diff(f"optimizer.fc.{name}.step", "optimizer_step", THREE, max_abs=1) for name in ("weight", "bias")],
        *[diff(f"fc.{name}", "parameter", THREE) for name in ("weight", "bias")],
        ranks=3,
    )
    (finding,) = diagnose(case, (), frozenset(), [witness("SYN214", (1,), "fc.weight", "fc.bias")])
    assert (finding.code, finding.ranks, finding.certainty, len(finding.tensors)) == ("SYN214", (1,), "proved", 4)


def test_a_setting_that_is_a_tensor_is_the_setting_of_the_witness() -> None:
    """A learning rate may be a tensor: SYN107 names it, and no other finding does."""
    case = group(
        diff("fc.weight", "parameter", THREE),
        *[diff(f"{name}.param_groups.0.lr", "optimizer", THREE) for name in ("optimizer", "optimizer.1")],
        ranks=3,
    )
    assert list(list_tensors(case, witness("SYN107", (1,), "fc.weight"))) == [("SYN107", (1,))]
    assert ("SYN299", (1,)) in list_tensors(case, witness("SYN214", (1,), "fc.weight"))


@pytest.mark.parametrize("code", ["SYN107", "SYN214"])
def test_settings_change_no_number_of_steps(code: str) -> None:
    """With other numbers of steps beside other settings, one rank has loaded its state; a skipped step explains it."""
    state = ("optimizer.fc.weight.exp_avg", "optimizer.fc.weight.step")
    case = group(
        diff("fc.weight", "parameter", THREE),
        diff(state[0], "optimizer", THREE),
        diff(state[1], "optimizer_step", THREE, max_abs=8),
        ranks=3,
    )
    tensors = list_tensors(case, witness(code, (1,), "fc.weight"))[code, (1,)]
    assert tensors == ("fc.weight", *(state if code == "SYN214" else ()))


@pytest.mark.parametrize(
    ("impossible", "is_outside"), [((), False), (("SYN214",), False), (("SYN211", "SYN213", "SYN214"), True)]
)
def test_a_watched_run_without_a_fault_of_steps(impossible: tuple[str, ...], is_outside: bool) -> None:
    """If the witnesses saw equal gradients and steps, something other than the optimizer changed the parameters."""
    case = group(diff("fc.weight", "parameter", THREE), diff("fc.bias", "parameter", ()), ranks=3)
    (finding,) = diagnose(case, (), frozenset(), (), frozenset(impossible))
    assert finding.code == "SYN299"
    assert (finding.cause.code is syn299.Text.CAUSE_WATCHED) is is_outside


@pytest.mark.parametrize("impossible", [(), ("SYN211", "SYN213", "SYN214")])
def test_equal_gradients_of_a_watched_run_exclude_causes_by_unequal_ones(impossible: tuple[str, ...]) -> None:
    """The states are those of unreduced gradients; if all gradients were equal, something else changed the states."""
    case = small_model.group(*small_model.unreduced())
    (finding,) = diagnose(case, (), frozenset(), (), frozenset(impossible))
    assert finding.code == ("SYN299" if impossible else "SYN211")


@pytest.mark.parametrize(
    ("code", "counts", "expected"),
    [
        ("SYN214", {0: 15, 1: 14, 2: 15}, {("SYN214", (1,))}),
        ("SYN214", {0: 15, 1: 14, 2: 13}, {("SYN214", (1,)), ("SYN106", (1, 2))}),
        ("SYN107", {0: 15, 1: 14, 2: 15}, {("SYN107", (1,)), ("SYN106", (1,))}),
    ],
    ids=["skipped", "another rank", "settings"],
)
def test_a_counter_that_is_a_number_follows_a_skipped_step(
    code: str, counts: dict[int, int], expected: set[tuple[str, tuple[int, ...]]]
) -> None:
    """SparseAdam counts steps with a number. A skipped step explains it, unless further ranks differ."""
    counter = ValueDiff("optimizer.0.emb.weight.step", counts, counts=True, kind="counter")
    case = group(diff("emb.weight", "parameter", THREE), ranks=3, values=(counter,))
    assert set(list_tensors(case, witness(code, (1,), "emb.weight"))) == expected
