"""The clock of a replica group: the completed backward passes that reduced the gradients of its wrapper.

Ranks that train one model take part in the same reductions, so a tick has the same number on all of them, whatever a
script does between two reductions. Optimizer steps have no such number: a rank may skip one.

DDP reduces gradients in callbacks at the end of the backward pass. A callback that is queued while an output of the
wrapper gets its gradient would still run before them; queued again from within that callback, it runs after them.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Clock:
    """Counts the reductions of one wrapper.

    name: equal on all ranks: wrappers are created in the same order.
    wrapper: a DistributedDataParallel module.
    ranks: that reduce together, as ranks of the whole world.
    """

    def __init__(self, name: str, wrapper: Any, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        self.ticks = 0
        self._wrapper = weakref.ref(wrapper)

    @property
    def wrapper(self) -> Any:
        """The wrapper, or None after its end."""
        return self._wrapper()

    def start(self, guard: Callable[..., None]) -> None:
        """Count from now on. guard: calls a function with arguments, and keeps its errors from the script."""

        def watch_forward(wrapper: Any, _arguments: Any, output: Any) -> None:
            guard(self._watch_output, wrapper, output)

        self.wrapper.register_forward_hook(watch_forward)

    def _watch_output(self, wrapper: Any, output: Any) -> None:
        """Count the backward pass of an output, if it reduces gradients."""
        torch: Any = sys.modules["torch"]
        # A compiled program contains no hook; then the clock stands still.
        if torch.compiler.is_compiling():
            return
        if not torch.is_grad_enabled() or not wrapper.require_backward_grad_sync:
            return
        # As DDP and FSDP do, which have no public name for it either.
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
        # Whether the callback of a running backward pass is queued; a script may call backward twice on one output.
        queued: list[bool] = []

        def count() -> None:
            queued.clear()
            self.ticks += 1

        def handle_gradient(_gradient: Any) -> None:
            if not queued:
                queued.append(True)
                queue_callback(lambda: queue_callback(count))

        for tensor in list_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(handle_gradient)


def list_tensors(output: Any) -> Iterator[Any]:
    """Iterate over the tensors of what a module returned: nested containers, and the fields of dataclasses."""
    torch: Any = sys.modules["torch"]
    waiting = [output]
    visited: set[int] = set()
    while waiting:
        content = waiting.pop()
        if id(content) in visited:
            continue
        visited.add(id(content))
        if isinstance(content, torch.Tensor):
            yield content
        elif isinstance(content, dict):
            waiting += content.values()
        elif isinstance(content, (list, tuple, set)):
            waiting += content
        elif hasattr(content, "__dataclass_fields__"):
            waiting += [getattr(content, name) for name in content.__dataclass_fields__]
