"""Different settings (SYN107), which explain only differences between ranks with different settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.cases import diagnose_case, diagnose_single
from support.listings import list_codes
from support.small_model import ADAM, HALF, MODEL, SGD, group, make_diff, model, moments, unreduced

from syncheck.diagnose.syn107_settings_differ import Text
from syncheck.records import ValueDiff

THREE = replace(HALF, by_rank={0: 0.1, 1: 0.1, 2: 0.05})
BEST = ValueDiff("scheduler.best", {0: 0.7, 1: 0.8, 2: 0.9}, counts=True, kind="setting")


def three(*values: Any, **fields: Any) -> Any:
    """Return a group of three ranks whose parameters differ on the last rank."""
    return group(*model(ranks=3), ranks=3, values=values, **fields)


def test_107() -> None:
    """A different learning rate is reported with its values and ranks, and covers all trained tensors."""
    fitted = diagnose_single(three(THREE, optimizer=()))
    assert (fitted.code, fitted.ranks, fitted.values, set(fitted.tensors)) == ("SYN107", (2,), (THREE.name,), {*MODEL})
    assert fitted.facts[0] == Text.SETTINGS(setting=Text.VALUE(name=THREE.name, values=THREE.by_rank))
    assert fitted.facts[1].code is Text.PARAMETERS
    assert (fitted.facts[1].parameters["count"], fitted.facts[1].parameters["total"]) == (5, 5)
    assert Text.GRADIENTS_UNKNOWN() in fitted.facts
    assert Text.GRADIENTS_UNKNOWN() not in diagnose_single(three(THREE)).facts
    # The learning rate of one parameter group.
    head = [make_diff("fc.weight", ranks=3), make_diff("fc.bias", ranks=3)]
    assert diagnose_single(group(*head, ranks=3, values=(THREE,))).code == "SYN107"


@pytest.mark.parametrize("optimizer", [ADAM, SGD, ()])
@pytest.mark.parametrize("odd", [None, (1, 2, 3)])
def test_107_before_the_rules_on_parameters(optimizer: tuple[str, ...], odd: Any) -> None:
    """Differences in parameters beside different settings are SYN107, and match no rule on parameters."""
    halves = replace(HALF, by_rank={0: 0.1, 1: 0.1, 2: 0.1, 3: 0.05} if odd is None else dict(enumerate("abcd")))
    assert (
        diagnose_single(group(*model(ranks=4, odd=odd), ranks=4, values=(halves,), optimizer=optimizer)).code
        == "SYN107"
    )


def test_107_with_other_moments() -> None:
    """Unreduced gradients are SYN211 beside different settings; different betas explain different moments."""
    fitted = diagnose_case(group(*unreduced(cosine=0.3), values=(HALF,)))
    assert set(fitted) == {"SYN107", "SYN211"}
    assert fitted["SYN107"].tensors == ()
    betas = replace(HALF, name="optimizer.param_groups.0.betas", by_rank={0: "(0.9, 0.99)", 1: "(0.5, 0.99)"})
    assert diagnose_single(group(*model(), *moments(cosine=0.3), values=(betas,))).code == "SYN107"


def test_107_covers_no_difference_between_equal_settings() -> None:
    """SYN107 covers no differences between ranks with equal settings, and ignores values of other kinds."""
    tensors = make_diff("conv.weight", ranks=3, odd=(1,)), make_diff("fc.weight", ranks=3)
    fitted = diagnose_case(group(*tensors, ranks=3, values=(THREE,)))
    assert fitted["SYN107"].tensors == ("fc.weight",)
    assert any("conv.weight" in finding.tensors for code, finding in fitted.items() if code != "SYN107")
    for kind in ("progress", "scaler", "counter", "other"):
        assert "SYN107" not in diagnose_case(three(replace(THREE, kind=kind)))


def test_107_of_a_scheduler() -> None:
    """Different scheduler state is SYN107 without tensors; a different learning rate identifies the odd rank."""
    fitted = diagnose_single(group(ranks=3, values=(BEST,)))
    assert (fitted.code, fitted.ranks, fitted.tensors) == ("SYN107", (0, 1, 2), ())
    both = diagnose_case(three(BEST))
    assert both["SYN107"].tensors == ()
    assert len(both) > 1
    assert diagnose_single(three(BEST, THREE)).ranks == (2,)


def test_107_lists_settings() -> None:
    """SYN107 lists up to three settings, and for parameter groups the missing members or the different order."""
    members = replace(HALF, name="optimizer.param_groups.0.params")
    names = ("fc.bias", "fc.weight")
    for by_rank, setting in (
        ({0: "bn.bias, fc.bias", 1: "bn.bias, fc.weight"}, Text.MEMBERS(name=members.name, names=names)),
        ({0: "fc.bias, fc.weight", 1: "fc.weight, fc.bias"}, Text.ORDER(name=members.name)),
    ):
        assert diagnose_single(group(values=(replace(members, by_rank=by_rank),))).facts == (
            Text.SETTINGS(setting=setting),
        )
    values = tuple(replace(HALF, name=f"optimizer.param_groups.{i}.lr") for i in range(5))
    facts = diagnose_single(group(values=values)).facts
    assert list_codes(facts) == [Text.SETTINGS, Text.VALUE, Text.VALUE, Text.MORE]
    assert facts[-1].parameters == {"count": 2}


def test_107_of_a_key_that_no_optimizer_reads() -> None:
    """A key of the script is a warning if all trained tensors agree."""
    tag = replace(HALF, name="optimizer.param_groups.0.tag", by_rank={0: "worker-0", 1: "worker-1"})
    finding = diagnose_single(group(values=(tag,)))
    assert (finding.code, finding.certainty, finding.counts) == ("SYN107", "consistent", False)
    assert finding.cause.code is Text.CAUSE_UNREAD
    assert diagnose_single(group(values=(tag, HALF))).certainty == "proved"
    assert diagnose_single(group(*model(), values=(tag,))).counts


def test_107_of_another_class() -> None:
    """Options of another class are one statement, and its states are neither missing nor lost."""
    betas = replace(HALF, name="optimizer.param_groups.0.betas", by_rank={0: "(0.9, 0.999)", 1: None})
    momentum = replace(HALF, name="optimizer.param_groups.0.momentum", by_rank={0: None, 1: 0.0})
    states = [replace(diff, reason="missing", status="not_compared", clusters=((0,),)) for diff in moments()]
    fitted = diagnose_case(group(*model(), *states, values=(betas, momentum)))
    assert set(fitted) == {"SYN107"}
    assert {diff.name for diff in states} <= set(fitted["SYN107"].tensors)
    assert fitted["SYN107"].facts[0] == Text.SETTINGS(setting=Text.CLASSES(names=("betas", "momentum")))
