"""Settings that differ explain only tensors that differ between ranks with different settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_model import ADAM, HALF, MODEL, SGD, apart, group, only
from test_rules import found

from syncheck.diagnose.syn107_settings_differ import Text
from syncheck.records import ValueDiff

THREE = replace(HALF, by_rank={0: 0.1, 1: 0.1, 2: 0.05})
BEST = ValueDiff("scheduler.best", {0: 0.7, 1: 0.8, 2: 0.9}, counts=True, kind="setting")


def model(ranks: int = 3, odd: Any = None, cosine: float = 0.9999) -> list[Any]:
    """Return all parameters of the small model, with differences."""
    return [apart(name, ranks=ranks, odd=odd, cosine=cosine) for name in MODEL]


def moments(cosine: float, ranks: int = 3) -> list[Any]:
    """Return the first moments of the parameters, with differences."""
    return [apart(f"optimizer.{name}.exp_avg", "optimizer", ranks, cosine=cosine) for name in MODEL]


def test_107() -> None:
    """A learning rate that differs is reported with its values and ranks, and covers everything that is trained."""
    fitted = only(group(*model(), ranks=3, values=(THREE,), optimizer=()))
    assert (fitted.code, fitted.ranks, fitted.values) == ("SYN107", (2,), (THREE.name,))
    assert set(fitted.tensors) == set(MODEL)
    assert fitted.facts[0] == Text.SETTINGS(setting=Text.VALUE(name=THREE.name, values=THREE.by_rank))
    assert fitted.facts[1].code is Text.PARAMETERS
    assert (fitted.facts[1].parameters["count"], fitted.facts[1].parameters["total"]) == (5, 5)
    assert Text.GRADIENTS_UNKNOWN() in fitted.facts
    assert Text.GRADIENTS_UNKNOWN() not in only(group(*model(), ranks=3, values=(THREE,), optimizer=ADAM)).facts


@pytest.mark.parametrize("optimizer", [ADAM, SGD, ()])
def test_107_before_the_rules_on_parameters(optimizer: tuple[str, ...]) -> None:
    """Parameters that differ with the settings are neither SYN210 nor SYN211, SYN212, SYN213, SYN218 or SYN230."""
    for odd in (None, (1, 2, 3)):
        halves = replace(HALF, by_rank={0: 0.1, 1: 0.1, 2: 0.1, 3: 0.05} if odd is None else dict(enumerate("abcd")))
        fitted = only(group(*model(4, odd), ranks=4, values=(halves,), optimizer=optimizer))
        assert fitted.code == "SYN107"


def test_107_of_a_group_of_parameters() -> None:
    """If the learning rate of one parameter group differs, only its parameters differ."""
    head = [apart("fc.weight", ranks=3), apart("fc.bias", ranks=3)]
    value = replace(THREE, name="optimizer.param_groups.1.lr")
    assert only(group(*head, ranks=3, values=(value,), optimizer=ADAM)).code == "SYN107"


def test_107_with_other_moments() -> None:
    """Unreduced gradients are SYN211 beside settings that differ; other betas explain different moments."""
    fitted = found(group(*model(2, (1,), 0.5), *moments(0.3, 2), values=(HALF,), optimizer=ADAM))
    assert set(fitted) == {"SYN107", "SYN211"}
    assert fitted["SYN107"].tensors == ()
    betas = replace(HALF, name="optimizer.param_groups.0.betas", by_rank={0: "(0.9, 0.99)", 1: "(0.5, 0.99)"})
    assert only(group(*model(2, (1,)), *moments(0.3, 2), values=(betas,), optimizer=ADAM)).code == "SYN107"


def test_107_does_not_cover_differences_between_equal_settings() -> None:
    """A tensor that differs between ranks with equal settings has another cause."""
    fitted = found(
        group(apart("conv.weight", ranks=3, odd=(1,)), apart("fc.weight", ranks=3), ranks=3, values=(THREE,))
    )
    assert fitted["SYN107"].tensors == ("fc.weight",)
    assert any("conv.weight" in finding.tensors for code, finding in fitted.items() if code != "SYN107")


def test_107_of_a_scheduler() -> None:
    """A scheduler's state alone is SYN107 and explains no parameters; a learning rate beside it shows the odd rank."""
    fitted = only(group(ranks=3, values=(BEST,)))
    assert (fitted.code, fitted.ranks, fitted.tensors) == ("SYN107", (0, 1, 2), ())
    fitted = found(group(*model(), ranks=3, values=(BEST,)))
    assert fitted["SYN107"].tensors == ()
    assert len(fitted) > 1
    assert only(group(*model(), ranks=3, values=(BEST, THREE))).ranks == (2,)


def test_107_is_not_another_value() -> None:
    """Notes, progress, counters and the loss scaler have rules of their own."""
    for kind in ("progress", "scaler", "counter", "other"):
        assert "SYN107" not in found(group(*model(), ranks=3, values=(replace(THREE, kind=kind),)))


def test_107_names_the_members_that_differ() -> None:
    """For the members of a parameter group, the finding names those that some ranks lack."""
    members = {0: "bn.bias, fc.bias", 1: "bn.bias, fc.weight"}
    value = replace(HALF, name="optimizer.param_groups.0.params", by_rank=members)
    setting = Text.MEMBERS(name=value.name, names=("fc.bias", "fc.weight"))
    assert only(group(values=(value,))).facts == (Text.SETTINGS(setting=setting),)
    value = replace(value, by_rank={0: "fc.bias, fc.weight", 1: "fc.weight, fc.bias"})
    assert only(group(values=(value,))).facts == (Text.SETTINGS(setting=Text.ORDER(name=value.name)),)


def test_107_lists_three_settings() -> None:
    """Only the first settings are listed; the rest is counted."""
    values = tuple(replace(HALF, name=f"optimizer.param_groups.{i}.lr") for i in range(5))
    facts = only(group(values=values)).facts
    assert [fact.code for fact in facts] == [Text.SETTINGS, Text.VALUE, Text.VALUE, Text.MORE]
    assert facts[-1].parameters == {"count": 2}
