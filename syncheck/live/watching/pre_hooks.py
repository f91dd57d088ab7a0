"""The place of the watcher among the hooks before a step: after those of the script, which may clip gradients.

torch calls global hooks before the hooks of an optimizer, each in the order of registration. A further hook would show
in the optimizer, and would break torch's loop after a hook that removes itself, which the last one may. So the last
hook is replaced for one step by a function that calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    # Takes the optimizer, the arguments and the named ones, and may return other arguments.
    Hook = Callable[[Any, Any, Any], Any]
    Hooks = MutableMapping[Any, Hook]


class LastHook:
    """A global hook that is called after all other hooks of a step.

    own: the function to call, which neither adds nor removes hooks.
    """

    def __init__(self, own: Hook) -> None:
        self._own = own
        # All global hooks.
        self._registered: Hooks = {}

    def install(self) -> None:
        """Register the global hook."""
        from torch.optim import optimizer as hooking  # the script imports torch, maybe never

        # There is no public name.
        self._registered = hooking._global_optimizer_pre_hooks  # noqa: SLF001
        hooking.register_optimizer_step_pre_hook(self)

    def __call__(self, optimizer: Any, arguments: Any, named: Any) -> Any:
        """Call the function now, if no hook comes later."""
        of_optimizer: Hooks = optimizer._optimizer_step_pre_hooks  # noqa: SLF001 - there is no public name
        hooks = of_optimizer or self._registered
        key = next(reversed(list(hooks)))
        if hooks[key] is self:
            return self._own(optimizer, arguments, named)
        self._follow(hooks, key)
        return None

    def _follow(self, hooks: Hooks, key: Any) -> None:
        """Replace a hook for one step. Another value of a key does not disturb a loop over the hooks."""
        # An error in an earlier hook leaves the replacement in its place.
        hook = getattr(hooks[key], "replaced", hooks[key])

        def call_both(optimizer: Any, arguments: Any, named: Any) -> Any:
            if key in hooks:
                hooks[key] = hook
            result = hook(optimizer, arguments, named)
            # torch refuses other results.
            if isinstance(result, tuple) and len(result) == 2:
                arguments, named = result
            return self._own(optimizer, arguments, named) or result

        call_both.replaced = hook  # type: ignore[attr-defined]
        hooks[key] = call_both
