"""The clocks of a watched run: they number steps so that a step has the same number on all ranks.

Ranks that train one model take part in the same reductions, so the number of completed backward passes that reduced the
gradients of a wrapper is the same on all of them, whatever a script does between two reductions. Optimizer steps have
no such number, because a rank may skip a step; without a wrapper they are all there is.

DDP reduces gradients in callbacks at the end of the backward pass. A callback that is queued while an output of the
wrapper gets its gradient would still run before them; queued again from within that callback, it runs after them.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


# Communication hooks of torch.distributed.algorithms.ddp_comm_hooks.
_LOCAL_HOOKS = ("post_localSGD_hook", "noop_hook")


class Clock:
    """Numbers the steps of one model.

    name: equal on all ranks: wrappers and optimizers are created in the same order.
    ranks: that are compared, as ranks of the whole world.
    wrapper: a DistributedDataParallel module, whose reductions are counted; None to count optimizer steps.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], wrapper: Any = None) -> None:
        self.name = name
        self.ranks = ranks
        self.ticks = 0
        self.reduces = wrapper is not None
        """Whether it counts reductions, so that ranks must step with equal gradients."""
        self.is_first = False
        """Whether the wrapper is the first one of these ranks."""
        self._wrapper = weakref.ref(wrapper) if wrapper is not None else None

    @property
    def wrapper(self) -> Any:
        """The wrapper; None after its end, or without one."""
        return None if self._wrapper is None else self._wrapper()

    def keeps_gradients_local(self) -> bool:
        """Whether a communication hook leaves gradients of its own to each rank, so that the replicas differ by design.

        Scripts register hooks after the wrapper is created; local SGD averages parameters instead.
        """
        for hook, _ in getattr(self.wrapper, "_comm_hooks", ()):
            if getattr(hook, "__name__", "") in _LOCAL_HOOKS:
                return True
        return False

    def watch_output(self, output: Any, tick: Callable[[], None]) -> None:
        """Count the backward pass of an output, if it reduces gradients. tick: called after the reduction."""
        torch: Any = sys.modules["torch"]
        if not torch.is_grad_enabled() or not self.wrapper.require_backward_grad_sync:
            return
        # As DDP and FSDP do, which have no public name for it either.
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
        # Whether the callback of a running backward pass is queued; a script may call backward twice on one output.
        queued: list[bool] = []

        def count() -> None:
            queued.clear()
            self.ticks += 1
            tick()

        def handle_gradient(_gradient: Any) -> None:
            if not queued:
                queued.append(True)
                queue_callback(lambda: queue_callback(count))

        for tensor in list_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(handle_gradient)


def list_tensors(content: Any) -> list[Any]:
    """Return the tensors in what a module takes or returns, where DDP looks for them too: in nested containers."""
    distributed: Any = sys.modules["torch.nn.parallel.distributed"]
    return list(distributed._find_tensors(content))  # noqa: SLF001 - there is no public function for it
