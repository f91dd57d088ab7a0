"""The clocks of models whose shards are replicated: HSDP, and `replicate` of FSDP2.

With a mesh that has a dimension of replicas, FSDP2 sums each gradient between the ranks of a set of shards, and then
between the ranks that hold equal shards. A backward pass that does both needs all ranks of the mesh, so all
ranks count alike. Ranks with equal shards must step with equal gradients.

The first reduction starts the clock of a model: before it, a rank may run a forward pass alone.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.live.watching.clock import Clock
from syncheck.live.watching.wrappers import call_at_first_mesh, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_STATES = "torch.distributed.fsdp._fully_shard._fsdp_state"


class ShardsClock(Clock):
    """Numbers the backward passes of a model that sum gradients over all ranks of a mesh.

    root: the outermost module, which `fully_shard` was called with last.
    groups: what torch reduces together, of this module and the modules inside.
    replicas: the sets of ranks that hold equal shards.
    """

    def __init__(self, root: Any, groups: Sequence[Any], replicas: tuple[tuple[int, ...], ...]) -> None:
        ranks = tuple(sorted(rank for members in replicas for rank in members))
        # In their order, and without holding the model after its end.
        self._groups = weakref.WeakKeyDictionary(dict.fromkeys(groups))
        super().__init__("", ranks, root)
        self.replicas = replicas

    @property
    def module(self) -> Any:
        """The model; None after its end."""
        return self.wrapper

    def list_parameters(self) -> list[tuple[str, Any]]:
        """Return the shards with their names. While a model computes, the modules hold whole parameters instead."""
        shards = []
        for group in list(self._groups):
            for parameter in group.fsdp_params:
                # The name is prefixed from the root.
                shards.append((parameter._param_fqn, parameter.sharded_param))  # noqa: SLF001 - there is no public name
        return shards

    def list_local(self) -> list[Any]:
        """Return the other parameters of the model: `ignored_params`, and shards of another mesh."""
        shards = {id(parameter) for _, parameter in self.list_parameters()}
        return [parameter for parameter in self.module.parameters() if id(parameter) not in shards]

    def needs_ranks(self) -> bool:
        """Whether the backward pass of a forward pass that begins now sums gradients between replicas."""
        return sys.modules["torch"].is_grad_enabled() and self.reduces_now()

    def reduces_now(self) -> bool:
        """Whether the backward pass that ends now has summed gradients between replicas.

        Not while a script accumulates with `set_requires_gradient_sync(False)` or `set_requires_all_reduce(False)`.
        """
        for group in list(self._groups):
            trained = [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
            if trained and group.reduce_grads and group.all_reduce_grads:
                return True
        return False


class Callbacks(NamedTuple):
    """What the watcher does with models of FSDP2."""

    guard: Callable[..., None]
    """Calls a function with arguments, and keeps its errors from the script."""
    add_clock: Callable[[ShardsClock], None]
    """Called with a new clock before its first reduction is counted."""
    see_forward: Callable[[Clock, Any, Sequence[Any]], None]
    """Called with clock, model and inputs before a forward pass."""
    see_output: Callable[[Clock], None]
    """Called with the clock after a forward pass."""
    see_reduction: Callable[[Clock], None]
    """Called with the clock after each reduction."""


class ShardedReplicas:
    """The models that FSDP2 replicates."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        # By context of the model; None if it has no replicas.
        self._clocks: weakref.WeakKeyDictionary[Any, ShardsClock | None] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Watch from the first mesh on: FSDP2 shards over a mesh."""
        if _STATES in sys.modules:
            self._callbacks.guard(self._watch_states)
        else:
            call_at_first_mesh(self._callbacks.guard, self._watch_states)

    def _watch_states(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState  # scripts without a mesh do not need it

        states: Any = FSDPState
        begin = states._root_pre_forward  # noqa: SLF001 - there is no public place
        end = states._register_pre_backward_hook  # noqa: SLF001
        finish = states._root_post_backward_final_callback  # noqa: SLF001
        callbacks = self._callbacks

        @wrap(begin)
        def begin_watched(state: Any, module: Any, arguments: Any, named: Any) -> Any:
            result = begin(
                state,
                module,
                arguments,
                named,
            )
            # torch calls it for each module that computes.
            if state._state_ctx.iter_forward_root is state:  # noqa: SLF001
                callbacks.guard(
                    self._tell,
                    state,
                    callbacks.see_forward,
                    module,
                    (arguments, named),
                )
            return result

        @wrap(end)
        def end_watched(state: Any, output: Any) -> Any:
            if state._state_ctx.iter_forward_root is state:  # noqa: SLF001
                callbacks.guard(self._tell, state, callbacks.see_output)
            return end(state, output)

        @wrap(finish)
        def finish_watched(state: Any) -> None:
            finish(state)
            callbacks.guard(self._tell, state, self._see_backward)

        states._root_pre_forward = begin_watched  # noqa: SLF001
        states._register_pre_backward_hook = end_watched  # noqa: SLF001
        states._root_post_backward_final_callback = finish_watched  # noqa: SLF001

    def _tell(self, state: Any, see: Callable[..., None], *arguments: Any) -> None:
        """Call a function with the clock of a model that computes, if its shards are replicated."""
        clock = self._find_clock(state)
        if clock is not None:
            see(clock, *arguments)

    def _see_backward(self, clock: ShardsClock) -> None:
        if clock.reduces_now():
            if not clock.ticks:
                self._callbacks.add_clock(clock)
            clock.ticks += 1
            self._callbacks.see_reduction(clock)

    def _find_clock(self, state: Any) -> ShardsClock | None:
        """Return the clock of a model that computes; None if no rank holds equal shards."""
        context = state._state_ctx  # noqa: SLF001 - there is no public name
        if context not in self._clocks:
            self._clocks[context] = _make_clock(context)
        return self._clocks[context]


def _make_clock(context: Any) -> ShardsClock | None:
    """Return the clock of a model after its lazy initialization, or None."""
    roots = [state for state in context.all_states if state._is_root]  # noqa: SLF001 - there is no public name
    groups_of_replicas: dict[tuple[tuple[int, ...], ...], list[Any]] = {}
    for group in _list_groups(context):
        replicas = _list_replicas(group.mesh_info)
        groups_of_replicas.setdefault(replicas, []).append(group)
    groups_of_replicas.pop((), None)
    # A model with experts may have a second mesh, whose replicas are not compared.
    for replicas, groups in groups_of_replicas.items():
        return ShardsClock(roots[0]._modules[0], groups, replicas)  # noqa: SLF001
    return None


def _list_groups(context: Any) -> Iterator[Any]:
    """Return what torch reduces together, of all modules of a model."""
    for state in context.all_states:
        # Before torch 2.13, each state has at most one group.
        yield from getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group])  # noqa: SLF001


def _list_replicas(mesh_info: Any) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ranks that hold equal shards; empty without replicas."""
    dimension = mesh_info.replicate_mesh_dim
    numbers = mesh_info.mesh.mesh
    if dimension is None or numbers.shape[dimension] < 2:
        return ()
    rows = numbers.movedim(dimension, -1).reshape(-1, numbers.shape[dimension])
    return tuple(map(tuple, rows.tolist()))
