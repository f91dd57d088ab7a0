"""Closures of a step: `optimizer.step(closure)` computes the loss and its gradients within the step, maybe often.

Before such a step, the gradients of the previous step are still there. Its own are there when the closure returns,
before the optimizer uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.live.watching.changes import read_states
from syncheck.live.watching.layouts import list_trained
from syncheck.live.watching.wrappers import wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.live.watching.changes import States

_NAME = "closure"


def see_gradients(
    optimizer: Any,
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    guard: Callable[..., None],
    see_step: Callable[[Any, bool], None],
) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """See a step when its gradients are there: now, or each time its closure returns.

    arguments: of the step, with the optimizer.
    named: further arguments of the step, by name.
    guard: calls a function, and keeps errors from the script.
    see_step: called with the optimizer, and whether its parameters are others than before the step: LBFGS moves them
        between two calls of a closure, and optimizers for sharpness-aware minimization before a call.

    Returns the arguments with a watched closure; None without a closure.
    """
    # A caller may pass it as the first argument or by name.
    closure = arguments[1] if len(arguments) > 1 else named.get(_NAME)
    if not callable(closure):
        guard(see_step, optimizer, False)
        return None
    before: list[States] = []

    def note_start() -> None:
        before.append(read_states(list_trained(optimizer)))

    def see_call() -> None:
        see_step(optimizer, [read_states(list_trained(optimizer))] != before)

    @wrap(closure)
    def call_watched(*parts: Any, **fields: Any) -> Any:
        loss = closure(*parts, **fields)
        guard(see_call)
        return loss

    guard(note_start)
    if _NAME in named:
        return arguments, {**named, _NAME: call_watched}
    return (arguments[0], call_watched, *arguments[2:]), named
