"""The witness of gradients: which differences it sees, and what it says of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncheck.live.witnesses.gradients import Disagreement, GradientWitness, compare_details


def make_parameters(*gradients: Any) -> list[torch.nn.Parameter]:
    """Return parameters with the given gradients, None for no gradient."""
    parameters = []
    for gradient in gradients:
        shape = (6, 3) if gradient is None else gradient.shape
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32 if gradient is None else gradient.dtype))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def judge(*gradients_of_ranks: list[Any]) -> Disagreement | None:
    """Return how the gradients of ranks differ, None if their digests agree."""
    digests = set()
    details = {}
    for rank, gradients in enumerate(gradients_of_ranks):
        witness = GradientWitness()
        digests.add(witness.observe("step", make_parameters(*gradients)))
        details[rank] = witness.tell("step")
    if len(digests) == 1:
        return None
    return compare_details(details)  # type: ignore[arg-type]  # told at once, so kept


GRADIENTS = [torch.arange(1.0, 7.0).reshape(2, 3) * (number + 1) for number in range(6)]


def scaled(factor: float, *numbers: int) -> list[torch.Tensor]:
    """Return the gradients, some of them times a factor."""
    return [gradient * (factor if number in numbers else 1) for number, gradient in enumerate(GRADIENTS)]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (scaled(0.25, *range(6)), Disagreement((1,), tuple(range(6)), (), 0.25)),
        (scaled(2.0, 1), Disagreement((1,), (1,), (), 2.0)),
        (scaled(2.0, 5), Disagreement((1,), (5,), (), None)),  # beyond the sampled tensors
        ([*GRADIENTS[:5], None], Disagreement((1,), (5,), (5,), None)),
    ],
    ids=["all scaled", "one scaled", "one that is not sampled", "without gradient"],
)
def test_one_rank_of_three_deviates(changed: list[Any], expected: Disagreement) -> None:
    """The rank, its tensors and a factor are named; a factor only if elements of a different tensor show it."""
    assert judge(GRADIENTS, changed, GRADIENTS) == expected


def test_two_ranks_have_no_majority() -> None:
    """Of two ranks, both are named, and no factor between them."""
    assert judge(GRADIENTS, scaled(0.5, *range(6))) == Disagreement((0, 1), tuple(range(6)), (), None)


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
