"""Steps with a closure: their gradients are there within the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from syncheck.live.watching.closures import see_gradients
from syncheck.live.watching.passing_changes import PassingChanges

if TYPE_CHECKING:
    from collections.abc import Callable


def call(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function as the watcher does, without errors."""
    function(*arguments)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("create", "moves"),
    [
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), [False]),
        (lambda parameters: torch.optim.AdamW(parameters, lr=0.1), [False]),
        (lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3), [False, True, True]),
    ],
    ids=["SGD", "AdamW", "LBFGS"],
)
def test_gradients_are_seen_when_the_closure_has_computed_them(
    create: Callable[[Any], Any], moves: list[bool], by_name: bool
) -> None:
    """Each call of the closure is seen with its gradients, and whether the optimizer has moved the parameters."""
    model = torch.nn.Linear(2, 1)
    optimizer = create(model.parameters())
    gradients, seen = [], []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 2)) - 3).square().sum()
        loss.backward()
        gradients.append(model.bias.grad.item())
        return loss

    def see_step(_optimizer: Any, is_moved: bool) -> None:
        seen.append((model.bias.grad.item(), is_moved))

    def before_step(stepping: Any, arguments: Any, named: Any) -> Any:
        return see_gradients(stepping, arguments, named, call, see_step)

    optimizer.register_step_pre_hook(before_step)
    loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert loss is not None
    assert seen == list(zip(gradients, moves, strict=True))


def test_a_step_without_closure_is_seen_before_it() -> None:
    """No argument is replaced."""
    seen: list[Any] = []
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    assert see_gradients(optimizer, (optimizer,), {}, call, lambda *step: seen.append(step)) is None
    assert seen == [(optimizer, False)]


@pytest.mark.parametrize("undoes", [False, True], ids=["moves on", "undoes it"])
def test_parameters_that_move_within_a_step_do_not_pass(undoes: bool) -> None:
    """LBFGS moves parameters between two reductions of a step; what is undone before a step, as in SAM, passes."""
    model = torch.nn.Linear(2, 1)
    clock: Any = SimpleNamespace(name="clock", list_parameters=lambda: list(model.named_parameters()))
    parameters = list(model.parameters())
    layout: Any = SimpleNamespace(clock=clock, parameters=parameters, identities=list(map(id, parameters)))
    changes = PassingChanges()
    changes.note_start(clock)
    for layout.is_moved in (False, True):
        changes.note_reduction(clock)
        changes.note_before_step(layout)
        model.bias.data += 1
    assert not changes.exist
    changes.note_reduction(clock)
    if undoes:
        model.bias.data -= 1
    else:
        changes.forget_reduction(layout)
        model.bias.data += 1
    layout.is_moved = False
    changes.note_before_step(layout)
    assert changes.exist == undoes
