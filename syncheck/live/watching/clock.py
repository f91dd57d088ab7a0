"""The clocks of a watched run: they number steps so that a step has the same number on all ranks.

Ranks that train one model take part in the same reductions, so the number of completed backward passes that reduced the
gradients of a wrapper is the same on all of them, whatever a script does between two reductions. Optimizer steps have
no such number, because a rank may skip a step; without a wrapper they are all there is.

DDP reduces gradients in callbacks at the end of the backward pass. A callback that is queued while an output of the
wrapper gets its gradient would still run before them; queued again from within that callback, it runs after them.

DDP prepares one reduction in each forward pass, and a further forward pass prepares it again. So a backward pass
through several outputs has one reduction, and a second backward pass without a forward pass before it has none.
"""

from __future__ import annotations

import sys
import weakref
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from syncheck.live.watching.changes import list_existing
from syncheck.loaded import find_loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


# Communication hooks of torch.distributed.algorithms.ddp_comm_hooks.
_LOCAL_HOOKS = ("post_localSGD_hook", "noop_hook")


class Clock:
    """Numbers the steps of one model.

    name: equal on all ranks: wrappers and optimizers are created in the same order.
    ranks: that are compared, as ranks of the whole world.
    wrapper: a DistributedDataParallel module, whose reductions are counted; None to count optimizer steps.
    counts_steps: False to count forward passes.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], wrapper: Any = None, *, counts_steps: bool = True) -> None:
        self.name = name
        self.ranks = ranks
        self.ticks = 0
        self.reduces = wrapper is not None
        """Whether it counts reductions, so that ranks must step with equal gradients."""
        self.counts_steps = counts_steps
        self.replicas: tuple[tuple[int, ...], ...] = (ranks,)
        """The sets of ranks that hold the same part of the model."""
        self.is_new = not getattr(wrapper, "_lazy_init_ran", True)
        """Whether the wrapper is counted from its first forward pass on."""
        self.joined_at = 0
        """The number of the last reduction in which this rank took part without a step, because it had no data left."""
        self.unit = "reduction" if self.reduces else "step"
        if not counts_steps:
            self.unit = "forward pass"
        self.local_passes = 0
        """The backward passes through the wrapper since the last reduction, which added gradients of this rank only."""
        self.hides_passes = False
        """Whether a forward pass returned no tensor with a gradient, and may include the backward pass."""
        self._is_local = False
        # Whether a forward pass came after the last reduction.
        self._is_prepared = False
        # The backward passes whose callback is queued, by torch's number. One that fails never runs it.
        self._passes: set[int] = set()
        self._wrapper = weakref.ref(wrapper) if wrapper is not None else None
        self._model = weakref.ref(self.module) if self.module is not None else None
        self.class_name = type(self.module).__name__
        """Of the model."""
        # The parameters by name, as they are when the wrapper is created.
        self._wrapped: dict[str, weakref.ref[Any]] = {}
        # Those of them that require a gradient then.
        self._reduced: list[weakref.ref[Any]] = []
        for name, parameter in self._list_all():
            self._wrapped[name] = weakref.ref(parameter)
            if parameter.requires_grad:
                self._reduced.append(self._wrapped[name])

    @property
    def wrapper(self) -> Any:
        """The wrapper; None after its end, or without one."""
        return None if self._wrapper is None else self._wrapper()

    @property
    def module(self) -> Any:
        """The model; None after its end, or without a wrapper."""
        return getattr(self.wrapper, "module", None)

    def find_model(self) -> Any:
        """Return the wrapper; after the end of the wrapper, the model. None without a model."""
        if self.wrapper is not None or self._model is None:
            return self.wrapper
        return self._model()

    def list_parameters(self) -> list[tuple[str, Any]]:
        """Return the parameters whose gradients the wrapper reduces, with their names.

        DDP reduces those that its module has and trains when the wrapper is created.
        """
        ignored = getattr(self.wrapper, "parameters_to_ignore", ())
        reduced = set(map(id, self.list_reduced()))
        parameters = []
        for name, parameter in self._list_all():
            if name not in ignored and id(parameter) in reduced:
                parameters.append((name, parameter))
        return parameters

    def list_local(self) -> list[Any]:
        """Return the parameters that each rank keeps to itself, for example experts."""
        ignored = getattr(self.wrapper, "parameters_to_ignore", ())
        return [parameter for name, parameter in self._list_all() if name in ignored]

    def _list_all(self) -> list[tuple[str, Any]]:
        """Return the names and parameters of the wrapper; without the wrapper, none.

        `_pre_dp_module_transform`, with which tensor-parallel modules become data-parallel, replaces the registered
        parameters by DTensors in the first forward pass. DDP and optimizers keep the parameters of before.
        """
        module = self.module
        if module is None:
            return []
        return list(module.named_parameters()) or self.list_replaced()

    def list_replaced(self) -> list[tuple[str, Any]]:
        """Return the names and parameters of a wrapper whose module has replaced all of its parameters."""
        replaced = []
        wrapper = self.wrapper
        if wrapper is not None and next(wrapper.parameters(), None) is None:
            for name, reference in self._wrapped.items():
                # DDP and the optimizer hold it.
                replaced.append((name, reference()))
        return replaced

    def keeps_gradients_local(self) -> bool:
        """Whether a communication hook leaves gradients of its own to each rank, so that the replicas differ by design.

        Scripts register hooks after the wrapper is created; local SGD averages parameters instead. The last steps are
        judged when the wrapper may be gone.
        """
        hooks = [getattr(hook, "__name__", "") for hook, _ in getattr(self.wrapper, "_comm_hooks", ())]
        self._is_local = self._is_local or not set(_LOCAL_HOOKS).isdisjoint(hooks)
        return self._is_local

    def is_joining(self) -> bool:
        """Whether the ranks may run out of data one after the other, so that replicas differ until all have."""
        config = getattr(self.wrapper, "_join_config", None)
        return bool(getattr(config, "enable", False))

    def numbers_all_steps(self) -> bool:
        """Whether each step since the wrapper was created has a number, so that a skipped step was seen."""
        conditions = (
            self.is_new,
            not self.joined_at,
            # The reductions of a compiled program are hidden.
            self.ticks > 0 or not has_compiled(),
        )
        return all(conditions)

    def needs_ranks(self) -> bool:
        """Whether a forward pass that begins now waits for the other ranks: DDP may send the buffers of one rank."""
        return bool(self.wrapper.will_sync_module_buffers())

    def watch_output(self, output: Any, begin: Callable[[], None], tick: Callable[[], None]) -> None:
        """Count the backward pass of an output, if it reduces gradients.

        begin: called before the reduction, at the start of the backward pass.
        tick: called after the reduction.
        """
        torch: Any = sys.modules["torch"]
        # Noted while the wrapper exists: the last steps may be judged after its end.
        self.keeps_gradients_local()
        if not torch.is_grad_enabled() or not self._is_trained():
            return
        tensors = [tensor for tensor in list_tensors(output) if tensor.requires_grad]
        self.hides_passes |= not tensors
        if not self.wrapper.require_backward_grad_sync:
            self._watch_local_pass(tensors)
            return
        self._is_prepared = True
        # As DDP and FSDP do, which have no public name for it either.
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001

        def count(number: int) -> None:
            self._passes.discard(number)
            self._is_prepared = False
            self.ticks += 1
            self.local_passes = 0
            tick()

        def handle_gradient(_gradient: Any) -> None:
            number = torch._C._current_graph_task_id()  # noqa: SLF001 - there is no public name
            if number not in self._passes and self._is_prepared and self._accumulates():
                self._passes.add(number)
                begin()
                queue_callback(lambda: queue_callback(lambda: count(number)))

        _register(tensors, handle_gradient)

    def _watch_local_pass(self, tensors: Sequence[Any]) -> None:
        """Count the backward pass of outputs in `no_sync()`."""
        torch: Any = sys.modules["torch"]
        passes: set[int] = set()

        def handle_gradient(_gradient: Any) -> None:
            number = torch._C._current_graph_task_id()  # noqa: SLF001 - there is no public name
            if number not in passes and self._accumulates():
                passes.add(number)
                self.local_passes += 1

        _register(tensors, handle_gradient)

    def _is_trained(self) -> bool:
        """Whether a gradient is left to reduce: the critic of a GAN may be frozen in the step of the generator."""
        return any(map(attrgetter("requires_grad"), self.list_reduced()))

    def _accumulates(self) -> bool:
        """Whether the running backward pass computes gradients of parameters, which DDP then reduces.

        `torch.autograd.grad` returns gradients without accumulating them, as a gradient penalty does, and
        `backward(inputs=...)` accumulates those of the inputs only.
        """
        torch: Any = sys.modules["torch"]
        # Both have no public name. Reentrant checkpoints need to know, too, whether a pass computes all gradients.
        if torch.autograd._is_checkpoint_valid():  # noqa: SLF001
            return True
        will_execute = torch._C._will_engine_execute_node  # noqa: SLF001
        for parameter in self.list_reduced():
            if parameter.requires_grad:
                try:
                    if will_execute(torch.autograd.graph.get_gradient_edge(parameter).node):
                        return True
                except RuntimeError:
                    # `torch.autograd.grad` of a parameter.
                    return False
        return False

    def list_reduced(self) -> list[Any]:
        """Return the parameters that required a gradient when the wrapper was created, and have not ended."""
        return list_existing(self._reduced)


def _register(tensors: Sequence[Any], handle_gradient: Callable[[Any], None]) -> None:
    """Call a function with each gradient of outputs."""
    for tensor in tensors:
        tensor.register_hook(handle_gradient)


def has_compiled() -> bool:
    """Whether torch has compiled anything: hooks of a compiled program do not run, so its reductions are not seen."""
    compiling = find_loaded("torch._dynamo.utils")
    return bool(compiling and compiling.counters["frames"])


def name_units(clocks: Sequence[Clock]) -> None:
    """Let the reductions of several models have the number and the class of the model, as in a GAN."""
    # Also ended clocks: an end is not at the same time on all ranks.
    wrappers = [clock for clock in clocks if clock.reduces]
    if len(wrappers) < 2:
        return
    for number, clock in enumerate(wrappers, 1):
        clock.unit = f"wrapper {number} ({clock.class_name}), reduction"


def list_tensors(content: Any) -> list[Any]:
    """Return the tensors in the inputs or outputs of a module, where DDP looks too: in nested containers."""
    distributed: Any = sys.modules["torch.nn.parallel.distributed"]
    return list(distributed._find_tensors(content))  # noqa: SLF001 - there is no public function for it


def unwrap(wrapper: Any) -> Any:
    """Return the model of a DistributedDataParallel module; a model of FSDP2 has no wrapper."""
    return wrapper.module if hasattr(wrapper, "require_backward_grad_sync") else wrapper


def list_wrappers(clocks: Sequence[Clock], ranks: tuple[int, ...]) -> list[Any]:
    """Return the wrappers of some ranks, in the order of their creation; after its end, the model."""
    last_of_model = {}
    for clock in clocks:
        model = clock.find_model() if clock.ranks == ranks else None
        if model is not None:
            # A script may wrap a model again; the earlier wrapper may live for a while on some ranks.
            last_of_model[id(unwrap(model))] = model
    return list(last_of_model.values())
