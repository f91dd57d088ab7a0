"""Parameters that only the definition or only the program trains, or trains as two: findings, and no errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.parity_cases import ManualCase, TokenCase, codes, find, refusal
from torch import nn

from syncheck.parity.check import check_parity

pytestmark = pytest.mark.syncheck(ranks=2)


class Trained(ManualCase):
    """Definition or program freezes parameters.

    defined, program: names that begin so are frozen by `build`, and by the program on `ranks`.
    late: freeze in `backward`, before the forward pass.
    """

    defined: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (0, 1)
    late = False

    def build(self) -> Any:
        return self.freeze(super().build(), self.defined)

    def freeze(self, model: Any, prefixes: tuple[str, ...]) -> Any:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(prefixes))
        return model

    def freeze_program(self, model: Any) -> Any:
        return self.freeze(model, self.program if dist.get_rank() in self.ranks else self.defined)

    def parallelize(self, model: Any, mesh: Any) -> Any:
        return model if self.late else self.freeze_program(model)

    def backward(self, model: Any, batch: Any, mesh: Any) -> None:
        if self.late:
            self.freeze_program(model)
        super().backward(model, batch, mesh)

    def reduce(self, model: Any) -> None:
        for parameter in model.parameters():
            total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(total)


@pytest.mark.parametrize(
    ("changes", "fact", "ranks"),
    [
        ({"program": ("up.weight",)}, "FROZEN", (0, 1)),
        ({"program": ("up.weight",), "ranks": (1,)}, "FROZEN", (1,)),
        ({"program": ("up.weight",), "ranks": (1,), "late": True}, "FROZEN", (1,)),
        ({"defined": ("up.weight",)}, "EXTRA", (0, 1)),
        ({"defined": ("up.weight",), "ranks": (0,)}, "EXTRA", (0,)),
    ],
)
def test_other_parameters_are_trained(changes: dict[str, Any], fact: str, ranks: tuple[int, ...]) -> None:
    """A parameter that only the program or only the definition trains is a finding with the ranks, and no error."""
    report = check_parity(type("Case", (Trained,), changes)())
    [finding] = report.findings
    assert (finding.code, finding.ranks, finding.tensors) == ("SYN444", ranks, ("up.weight",))
    assert (find(report, fact)["ranks"], report.exit_code) == (ranks, 1)


def test_equal_parameters_are_trained() -> None:
    """Near misses: both freeze one parameter; the program freezes one after its gradient, which has a factor."""
    both = {"defined": ("up.weight",), "program": ("up.weight",)}
    assert codes(check_parity(type("Both", (Trained,), both)())) == []

    class Later(Trained):
        def factor(self, targets: torch.Tensor, all_targets: torch.Tensor) -> float:
            return 0.5 * super().factor(targets, all_targets)

        def reduce(self, model: Any) -> None:
            super().reduce(model)
            self.freeze(model, ("up",))

    assert codes(check_parity(Later())) == ["SYN441"]


def test_a_parameter_that_is_trained_too_late() -> None:
    """A parameter that both freeze until the backward pass of the program has no compared values, and is named."""

    class Late(Trained):
        defined = ("up.weight",)
        program = ("up.weight",)

        def backward(self, model: Any, batch: Any, mesh: Any) -> None:
            self.freeze(model, ())
            super().backward(model, batch, mesh)

    assert "up.weight is trained only since this method" in refusal(Late())


class Untied(TokenCase):
    """`build` ties embedding and head; the program copies the weight of the head, and wraps the model with DDP."""

    frozen = ""

    def build(self) -> Any:
        model = super().build()
        model.head.weight = model.embed.weight
        return model

    def parallelize(self, model: Any, mesh: Any) -> Any:
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name != self.frozen)
        return super().parallelize(model, mesh)


@pytest.mark.parametrize("frozen", ["", "embed.weight", "head.weight"])
def test_the_program_unties_weights(frozen: str) -> None:
    """Tied weights that the program trains apart, or of which it trains one, are named; all other tensors are right."""
    report = check_parity(type("Case", (Untied,), {"frozen": frozen})())
    [finding] = report.findings
    assert (finding.code, finding.tensors, finding.certainty) == ("SYN445", ("embed.weight",), "proved")
    assert find(report, "UNTIED")["names"] == ("embed.weight", "head.weight")


class Tied(TokenCase):
    """The program ties embedding and head, and `build` has two parameters.

    first, second: one of which becomes the other, on `ranks`.
    """

    first, second = "embed", "head"
    ranks: tuple[int, ...] = (0, 1)
    equal = True

    def build(self) -> Any:
        model = super().build()
        if self.equal:
            model.head.weight.data.copy_(model.embed.weight.data)
        return model

    def parallelize(self, model: Any, mesh: Any) -> Any:
        if dist.get_rank() in self.ranks:
            getattr(model, self.second).weight = getattr(model, self.first).weight
        return self.wrap(model)

    def wrap(self, model: Any) -> Any:
        return super().parallelize(model, None)


class TiedByHand(Tied, ManualCase):
    """One rank ties, and the ranks add their gradients under the names of `build`."""

    ranks = (1,)

    def wrap(self, model: Any) -> Any:
        return model

    def reduce(self, model: Any) -> None:
        for name in dict(self.build().named_parameters()):
            dist.all_reduce(model.get_parameter(name).grad)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Tied, {}),
        (Tied, {"equal": False}),
        # The embedding has the values of the head.
        (Tied, {"equal": False, "first": "head", "second": "embed"}),
        (TiedByHand, {}),
    ],
    ids=["equal", "other-values", "reverse", "one-rank"],
)
def test_the_program_ties_weights(kind: Any, changes: dict[str, Any]) -> None:
    """Weights that only the program ties are the only finding, with both names and the ranks, and no error."""
    case = type("Case", (kind,), changes)()
    report = check_parity(case)
    [finding] = report.findings
    assert (finding.code, finding.tensors, finding.ranks) == ("SYN445", ("embed.weight", "head.weight"), case.ranks)
    assert (finding.cause.code.name, report.exit_code) == ("CAUSE_TIED", 1)
    assert find(report, "TIED") == {"name": "head.weight", "first": "embed.weight", "ranks": case.ranks}


def test_an_allowed_tie_hides_no_other_fault() -> None:
    """With SYN445 allowed, all wrong gradients are explained, and fail."""
    report = check_parity(type("Case", (Tied,), {"equal": False})(), allow="SYN445")
    assert ({*codes(report)}, report.exit_code) == ({"SYN445", "SYN449"}, 1)


def test_a_parameter_with_a_second_name_in_the_program() -> None:
    """Near miss: a module that the program holds twice under names of its own is no tie of parameters of `build`."""

    class Twice(TokenCase):
        def parallelize(self, model: Any, mesh: Any) -> Any:
            model.output = model.head
            return super().parallelize(model, mesh)

    assert codes(check_parity(Twice())) == []
