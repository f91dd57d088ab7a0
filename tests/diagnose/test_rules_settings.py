"""Settings that differ explain the tensors that differ between ranks of other settings, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_model import ADAM, HALF, MODEL, SGD, apart, group, only
from test_rules import found

from syncheck.records import ValueDiff

THREE = replace(HALF, by_rank={0: 0.1, 1: 0.1, 2: 0.05})
BEST = ValueDiff("scheduler.best", {0: 0.7, 1: 0.8, 2: 0.9}, counts=True, kind="setting")


def model(ranks: int = 3, odd: Any = None, cosine: float = 0.9999) -> list[Any]:
    """Return all parameters of the small model, apart."""
    return [apart(name, ranks=ranks, odd=odd, cosine=cosine) for name in MODEL]


def moments(cosine: float, ranks: int = 3) -> list[Any]:
    """Return the first moments of the parameters, apart."""
    return [apart(f"optimizer.{name}.exp_avg", "optimizer", ranks, cosine=cosine) for name in MODEL]


def test_107() -> None:
    """A learning rate that differs is named with its values and ranks, with all that is trained."""
    fitted = only(group(*model(), ranks=3, values=(THREE,), optimizer=()))
    assert (fitted.code, fitted.ranks, fitted.values) == ("SYN107", (2,), (THREE.name,))
    assert set(fitted.tensors) == set(MODEL)
    assert "0.1 on ranks 0, 1 and 0.05 on rank 2" in fitted.evidence
    assert "no first moments were compared" in fitted.evidence
    assert "no first moments" not in only(group(*model(), ranks=3, values=(THREE,), optimizer=ADAM)).evidence


@pytest.mark.parametrize("optimizer", [ADAM, SGD, ()])
def test_107_before_the_rules_on_parameters(optimizer: tuple[str, ...]) -> None:
    """Parameters that differ with the settings are neither SYN210 nor SYN211, SYN212, SYN213, SYN218 or SYN230."""
    for odd in (None, (1, 2, 3)):
        halves = replace(HALF, by_rank={0: 0.1, 1: 0.1, 2: 0.1, 3: 0.05} if odd is None else dict(enumerate("abcd")))
        fitted = only(group(*model(4, odd), ranks=4, values=(halves,), optimizer=optimizer))
        assert fitted.code == "SYN107"


def test_107_of_a_group_of_parameters() -> None:
    """Where the rate of one parameter group differs, only its parameters do."""
    head = [apart("fc.weight", ranks=3), apart("fc.bias", ranks=3)]
    value = replace(THREE, name="optimizer.param_groups.1.lr")
    assert only(group(*head, ranks=3, values=(value,), optimizer=ADAM)).code == "SYN107"


def test_107_with_other_moments() -> None:
    """Gradients of each rank's own are SYN211 beside settings that differ; other betas turn the moments themselves."""
    fitted = found(group(*model(2, (1,), 0.5), *moments(0.3, 2), values=(HALF,), optimizer=ADAM))
    assert set(fitted) == {"SYN107", "SYN211"}
    assert fitted["SYN107"].tensors == ()
    betas = replace(HALF, name="optimizer.param_groups.0.betas", by_rank={0: "(0.9, 0.99)", 1: "(0.5, 0.99)"})
    assert only(group(*model(2, (1,)), *moments(0.3, 2), values=(betas,), optimizer=ADAM)).code == "SYN107"


def test_107_leaves_what_differs_between_equal_settings() -> None:
    """A tensor that differs between ranks of equal settings has another cause."""
    fitted = found(
        group(apart("conv.weight", ranks=3, odd=(1,)), apart("fc.weight", ranks=3), ranks=3, values=(THREE,))
    )
    assert fitted["SYN107"].tensors == ("fc.weight",)
    assert any("conv.weight" in finding.tensors for code, finding in fitted.items() if code != "SYN107")


def test_107_of_a_scheduler() -> None:
    """A scheduler's state alone is SYN107 and explains no parameters; a learning rate beside it says who is odd."""
    fitted = only(group(ranks=3, values=(BEST,)))
    assert (fitted.code, fitted.ranks, fitted.tensors) == ("SYN107", (0, 1, 2), ())
    fitted = found(group(*model(), ranks=3, values=(BEST,)))
    assert fitted["SYN107"].tensors == ()
    assert len(fitted) > 1
    assert only(group(*model(), ranks=3, values=(BEST, THREE))).ranks == (2,)


def test_107_is_not_another_value() -> None:
    """Notes, progress, counters and the scaler have rules of their own."""
    for kind in ("progress", "scaler", "counter", "other"):
        assert "SYN107" not in found(group(*model(), ranks=3, values=(replace(THREE, kind=kind),)))


def test_107_names_the_members_that_moved() -> None:
    """Of the members of a group, the finding names those that not all ranks list."""
    members = {0: "bn.bias, fc.bias", 1: "bn.bias, fc.weight"}
    value = replace(HALF, name="optimizer.param_groups.0.params", by_rank=members)
    assert "fc.bias, fc.weight on some ranks only" in only(group(values=(value,))).evidence
