"""The scalers of a watched run: with infinite gradients, a scaler does not call the optimizer, and no hook runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.live.watching.wrappers import wrap

if TYPE_CHECKING:
    from collections.abc import Callable


class Scalers:
    """Watches the steps that scalers take.

    guard: calls a function with arguments, and keeps its errors from the script.
    see_no_step: called with the optimizer of a skipped step.
    """

    def __init__(self, guard: Callable[..., None], see_no_step: Callable[[Any], None]) -> None:
        self._guard, self._see_no_step = guard, see_no_step
        self.current: Any = None
        """The scaler that takes a step now, if any."""
        self.has_stepped = False
        """Whether an optimizer stepped since the scaler was asked to."""

    def install(self, scaler_class: Any) -> None:
        """Watch the scalers of a class."""
        step = scaler_class.step
        scalers = self

        @wrap(step)
        def step_watched(scaler: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
            scalers.has_stepped, scalers.current = False, scaler
            try:
                result = step(scaler, optimizer, *arguments, **named)
            finally:
                scalers.current = None
            if not scalers.has_stepped:
                scalers._guard(scalers._see_no_step, optimizer)
            return result

        scaler_class.step = step_watched
