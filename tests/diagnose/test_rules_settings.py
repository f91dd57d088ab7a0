"""Settings that differ (SYN107) explain only tensors that differ between ranks with different settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import found, only
from small_model import ADAM, HALF, MODEL, SGD, apart, group, model, moments

from syncheck.diagnose.syn107_settings_differ import Text
from syncheck.records import ValueDiff

THREE = replace(HALF, by_rank={0: 0.1, 1: 0.1, 2: 0.05})
BEST = ValueDiff("scheduler.best", {0: 0.7, 1: 0.8, 2: 0.9}, counts=True, kind="setting")


def three(*values: Any, **fields: Any) -> Any:
    """Return a group of three ranks whose parameters differ on the last rank."""
    return group(*model(ranks=3), ranks=3, values=values, **fields)


def test_107() -> None:
    """A learning rate that differs is reported with its values and ranks, and covers everything that is trained."""
    fitted = only(three(THREE, optimizer=()))
    assert (fitted.code, fitted.ranks, fitted.values, set(fitted.tensors)) == ("SYN107", (2,), (THREE.name,), {*MODEL})
    assert fitted.facts[0] == Text.SETTINGS(setting=Text.VALUE(name=THREE.name, values=THREE.by_rank))
    assert fitted.facts[1].code is Text.PARAMETERS
    assert (fitted.facts[1].parameters["count"], fitted.facts[1].parameters["total"]) == (5, 5)
    assert Text.GRADIENTS_UNKNOWN() in fitted.facts
    assert Text.GRADIENTS_UNKNOWN() not in only(three(THREE)).facts
    # The learning rate of one parameter group.
    head = [apart("fc.weight", ranks=3), apart("fc.bias", ranks=3)]
    assert only(group(*head, ranks=3, values=(THREE,))).code == "SYN107"


@pytest.mark.parametrize("optimizer", [ADAM, SGD, ()])
@pytest.mark.parametrize("odd", [None, (1, 2, 3)])
def test_107_before_the_rules_on_parameters(optimizer: tuple[str, ...], odd: Any) -> None:
    """Parameters that differ with the settings are neither SYN210 nor SYN211, SYN212, SYN213, SYN218 or SYN230."""
    halves = replace(HALF, by_rank={0: 0.1, 1: 0.1, 2: 0.1, 3: 0.05} if odd is None else dict(enumerate("abcd")))
    assert only(group(*model(ranks=4, odd=odd), ranks=4, values=(halves,), optimizer=optimizer)).code == "SYN107"


def test_107_with_other_moments() -> None:
    """Unreduced gradients are SYN211 beside settings that differ; other betas explain different moments."""
    fitted = found(group(*model(cosine=0.5), *moments(cosine=0.3), values=(HALF,)))
    assert set(fitted) == {"SYN107", "SYN211"}
    assert fitted["SYN107"].tensors == ()
    betas = replace(HALF, name="optimizer.param_groups.0.betas", by_rank={0: "(0.9, 0.99)", 1: "(0.5, 0.99)"})
    assert only(group(*model(), *moments(cosine=0.3), values=(betas,))).code == "SYN107"


def test_107_covers_no_difference_between_equal_settings() -> None:
    """A tensor that differs between ranks with equal settings has another cause; so has one beside other values."""
    tensors = apart("conv.weight", ranks=3, odd=(1,)), apart("fc.weight", ranks=3)
    fitted = found(group(*tensors, ranks=3, values=(THREE,)))
    assert fitted["SYN107"].tensors == ("fc.weight",)
    assert any("conv.weight" in finding.tensors for code, finding in fitted.items() if code != "SYN107")
    for kind in ("progress", "scaler", "counter", "other"):
        assert "SYN107" not in found(three(replace(THREE, kind=kind)))


def test_107_of_a_scheduler() -> None:
    """A scheduler's state alone is SYN107 and explains no parameters; a learning rate beside it shows the odd rank."""
    fitted = only(group(ranks=3, values=(BEST,)))
    assert (fitted.code, fitted.ranks, fitted.tensors) == ("SYN107", (0, 1, 2), ())
    both = found(three(BEST))
    assert both["SYN107"].tensors == ()
    assert len(both) > 1
    assert only(three(BEST, THREE)).ranks == (2,)


def test_107_lists_settings() -> None:
    """The finding lists three settings; of parameter groups it names members that some ranks lack, or the order."""
    members = replace(HALF, name="optimizer.param_groups.0.params")
    names = ("fc.bias", "fc.weight")
    for by_rank, setting in (
        ({0: "bn.bias, fc.bias", 1: "bn.bias, fc.weight"}, Text.MEMBERS(name=members.name, names=names)),
        ({0: "fc.bias, fc.weight", 1: "fc.weight, fc.bias"}, Text.ORDER(name=members.name)),
    ):
        assert only(group(values=(replace(members, by_rank=by_rank),))).facts == (Text.SETTINGS(setting=setting),)
    values = tuple(replace(HALF, name=f"optimizer.param_groups.{i}.lr") for i in range(5))
    facts = only(group(values=values)).facts
    assert [fact.code for fact in facts] == [Text.SETTINGS, Text.VALUE, Text.VALUE, Text.MORE]
    assert facts[-1].parameters == {"count": 2}
