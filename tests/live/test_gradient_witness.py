"""The witness of gradients: which differences it sees, and what it says of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncheck.live.witnesses.gradients import Details, Disagreement, GradientWitness, compare_details


def make_parameters(*gradients: Any) -> list[torch.nn.Parameter]:
    """Return parameters with the given gradients, None for no gradient."""
    parameters = []
    for gradient in gradients:
        shape = (6, 3) if gradient is None else gradient.shape
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32 if gradient is None else gradient.dtype))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def make_layout(gradients: list[Any], *, reduces: bool = True) -> Any:
    """Return what steps. reduces: a wrapper reduces the gradients."""
    return SimpleNamespace(
        key="clock/0",
        clock=SimpleNamespace(reduces=reduces, keeps_gradients_local=bool),
        is_reduced=reduces,
        parameters=make_parameters(*gradients),
        names=[f"layer{number}" for number in range(len(gradients))],
    )


def judge(*gradients_of_ranks: list[Any]) -> Disagreement | None:
    """Return how the gradients of ranks differ, None if their digests agree."""
    digests = []
    details = {}
    for rank, gradients in enumerate(gradients_of_ranks):
        witness = GradientWitness()
        digests.append(witness.observe("step", make_layout(gradients)))
        told = witness.tell("step")
        assert told is not None
        details[rank] = Details(*told)
    if all(digest == digests[0] for digest in digests):
        return None
    return compare_details(details)


GRADIENTS = [torch.arange(1.0, 7.0).reshape(2, 3) * (number + 1) for number in range(6)]


def scaled(factor: float, *numbers: int) -> list[torch.Tensor]:
    """Return the gradients, some of them times a factor."""
    return [gradient * (factor if number in numbers else 1) for number, gradient in enumerate(GRADIENTS)]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (scaled(0.25, *range(6)), Disagreement((1,), tuple(range(6)), (), 0.25, is_local=False)),
        (scaled(2.0, 1), Disagreement((1,), (1,), (), 2.0, is_local=False)),
        (scaled(2.0, 5), Disagreement((1,), (5,), (), None, is_local=False)),  # beyond the sampled tensors
        ([*GRADIENTS[:5], None], Disagreement((1,), (5,), (5,), None, is_local=False)),
    ],
    ids=["all scaled", "one scaled", "one that is not sampled", "without gradient"],
)
def test_one_rank_of_three_deviates(changed: list[Any], expected: Disagreement) -> None:
    """The rank, its tensors and a factor are named; a factor only if elements of a different tensor show it."""
    assert judge(GRADIENTS, changed, GRADIENTS) == expected


def test_two_ranks_have_no_majority() -> None:
    """Of two ranks, both are named, and no factor between them."""
    assert judge(GRADIENTS, scaled(0.5, *range(6))) == Disagreement((0, 1), tuple(range(6)), (), None, is_local=True)


def sparse(*rows: int) -> torch.Tensor:
    """Return a sparse gradient of 6 x 3 with equal values in some rows."""
    return torch.sparse_coo_tensor(torch.tensor([rows]), torch.ones(len(rows), 3), (6, 3))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (sparse(0, 1), sparse(0, 2)),
        (torch.ones(3, dtype=torch.complex64), torch.full((3,), 1j)),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 1.0])),
        (torch.arange(6.0).reshape(2, 3).t(), torch.arange(6.0).reshape(3, 2)),
    ],
    ids=["indices", "complex", "sign of zero", "nan", "strides"],
)
def test_gradients_of_all_kinds_differ(first: torch.Tensor, second: torch.Tensor) -> None:
    """Gradients with the same values at other indices, or with other bits, are different; equal ones are not."""
    assert judge([first], [first.clone()], [first]) is None
    disagreement = judge([first], [second], [first])
    assert disagreement is not None
    assert (disagreement.ranks, disagreement.tensors) == ((1,), (0,))


def watch_steps(*steps: list[list[Any]], reduces: bool = False) -> list[tuple[str, tuple[int, ...]]]:
    """Return code and ranks of what a judge finds at steps, each with the gradients of all ranks."""
    judging = GradientWitness()
    findings = []
    for gradients_of_ranks in steps:
        witnesses = [GradientWitness() for _ in gradients_of_ranks]
        observations = {}
        layout = None
        for rank, gradients in enumerate(gradients_of_ranks):
            layout = make_layout(gradients, reduces=reduces)
            observations[rank] = witnesses[rank].observe("step", layout)
        details = {rank: witness.tell("step") for rank, witness in enumerate(witnesses)}
        for suspicion in judging.judge(layout, observations, lambda details=details: details):  # type: ignore[misc]
            findings.append((suspicion.code, suspicion.ranks))
    return findings


def agree(number: int, ranks: int = 3) -> list[list[Any]]:
    """Return equal gradients of all ranks, others at each step."""
    return [scaled(1.0 + number, *range(6)) for _ in range(ranks)]


DEVIATING = [GRADIENTS, GRADIENTS, scaled(3.0, 2)]


def test_without_a_wrapper_ranks_are_held_to_what_they_showed() -> None:
    """Ranks with equal gradients at three steps reduce together by hand; a later difference is a fault."""
    assert watch_steps(agree(1), agree(2), agree(3), agree(4), DEVIATING) == [("SYN410", (2,))]
    assert watch_steps(agree(1), DEVIATING, agree(2), DEVIATING) == []


@pytest.mark.parametrize("gradients", [[torch.zeros(3)], [None]], ids=["zeros", "none"])
def test_gradients_that_are_equal_by_chance_show_nothing(gradients: list[Any]) -> None:
    """Ranks that train alone may begin with equal zeros, or without gradients."""
    alone = [[torch.ones(3)], [torch.full((3,), 2.0)]]
    assert watch_steps(*[[gradients, gradients]] * 5, alone) == []


def test_a_wrapper_is_judged_from_its_first_step() -> None:
    """With a wrapper, the first step counts."""
    assert watch_steps(DEVIATING, reduces=True) == [("SYN410", (2,))]


def test_a_step_without_any_gradient_is_a_skipped_step() -> None:
    """A rank that removes its gradients and calls the optimizer takes no step."""
    assert watch_steps([GRADIENTS, GRADIENTS, [None] * 6], reduces=True) == [("SYN214", (2,))]
