"""Ranks of one model with one batch: what a plan declares to be replicated is equal on them, and so is the batch.

The style of a module in a plan of `parallelize_module` states the placements of its inputs, and torch believes it:
`DTensor.from_local(..., run_check=False)`. A plain tensor without a gradient that enters as `Replicate()` is the batch,
or was made from it, so its digest must be equal on the ranks of the mesh. Ranks of sequence and
pipeline parallelism take parts of the batch, and declare no replicated input. Ranks of context parallelism pass whole
sequences to `context_parallel`, which shards them.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.live.digest import digest_all, hash_digests
from syncheck.live.watching.clock import Clock
from syncheck.live.watching.layouts import Layout
from syncheck.live.watching.wrappers import call_at_first_mesh, wrap
from syncheck.live.witnesses.batches import BatchWitness, observe_replicated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


# Where torch shards the sequences of `context_parallel`, in newer and older versions.
_CONTEXT_PARALLEL = (
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",
)


class _Entrance(NamedTuple):
    """A module of a plan.

    number: of the modules of these ranks, in the order of the plan, which is the same on all of them.
    replicated: whether an input is, in the order of the inputs.
    """

    ranks: tuple[int, ...]
    number: int
    replicated: tuple[bool, ...]


class ReplicatedInputs:
    """The batches of tensor-parallel ranks.

    guard: calls a function with arguments, and keeps its errors from the script.
    add_clock: called with each new clock.
    tell: called with a layout and an observation at each forward pass, numbered by the layout's clock.
    """

    def __init__(
        self,
        guard: Callable[..., None],
        add_clock: Callable[[Clock], None],
        tell: Callable[[Layout, Mapping[str, Any]], None],
    ) -> None:
        self._guard, self._add_clock, self._tell = guard, add_clock, tell
        self._modules: Counter[tuple[int, ...]] = Counter()
        # By ranks, the module that takes the batch, and its record.
        self._entrances: dict[tuple[int, ...], tuple[_Entrance, Layout]] = {}
        # By ranks, the record of the sequences.
        self._contexts: dict[tuple[int, ...], Layout] = {}

    def install(self) -> None:
        """Watch plans from the first mesh on."""
        call_at_first_mesh(self._guard, self._watch_styles)

    def _watch_styles(self) -> None:
        from torch.distributed.tensor import parallel  # scripts without a mesh do not need it

        for style_class in (parallel.ColwiseParallel, parallel.RowwiseParallel, parallel.PrepareModuleInput):
            self._watch_style(style_class)
        # A script that imports it later is not watched: its import would change torch for all scripts.
        loaded = [sys.modules[name] for name in _CONTEXT_PARALLEL if name in sys.modules]
        for module in loaded[:1]:
            self._watch_contexts(module)

    def _watch_contexts(self, sharding: Any) -> None:
        shard = sharding._context_parallel_buffers  # noqa: SLF001 - there is no public place

        @wrap(shard)
        def shard_watched(mesh: Any, buffers: Sequence[Any], *arguments: Any, **named: Any) -> Any:
            self._guard(self._see_sequences, mesh, buffers)
            return shard(mesh, buffers, *arguments, **named)

        sharding._context_parallel_buffers = shard_watched  # noqa: SLF001

    def _watch_style(self, style_class: Any) -> None:
        apply = style_class._apply  # noqa: SLF001 - there is no public place

        @wrap(apply)
        def apply_watched(style: Any, module: Any, mesh: Any) -> Any:
            # Before the hook of the style, which makes DTensors of the inputs.
            self._guard(
                self._add_module,
                style,
                module,
                mesh,
            )
            return apply(style, module, mesh)

        style_class._apply = apply_watched  # noqa: SLF001

    def _add_module(self, style: Any, module: Any, mesh: Any) -> None:
        replicated = []
        # None is for an input that stays as it is.
        for placement in style.input_layouts or ():
            replicated.append(placement is not None and placement.is_replicate())
        if not any(replicated) or mesh.ndim != 1 or mesh.size() < 2:
            return
        distributed: Any = sys.modules["torch.distributed"]
        ranks = tuple(distributed.get_process_group_ranks(mesh.get_group()))
        entrance = _Entrance(ranks, self._modules[ranks], tuple(replicated))
        self._modules[ranks] += 1
        compiler: Any = sys.modules["torch"].compiler

        def before_forward(module: Any, inputs: Sequence[Any]) -> None:
            # A compiled program contains no hook.
            if not compiler.is_compiling():
                self._guard(
                    self._see_inputs,
                    entrance,
                    module,
                    inputs,
                )

        module.register_forward_pre_hook(before_forward)

    def _see_inputs(self, entrance: _Entrance, module: Any, inputs: Sequence[Any]) -> None:
        torch: Any = sys.modules["torch"]
        entrance_of_batch, layout = self._entrances.get(entrance.ranks, (entrance, None))
        if entrance != entrance_of_batch or not (module.training and torch.is_grad_enabled()):
            return
        tensors = _select_batch(compress(inputs, entrance.replicated))
        if not tensors:
            return
        if layout is None:
            layout = self._make_layout("inputs", entrance.ranks, entrance.number)
            self._entrances[entrance.ranks] = entrance, layout
        self._tell_tensors(layout, tensors)

    def _see_sequences(self, mesh: Any, buffers: Sequence[Any]) -> None:
        tensors = _select_batch(buffers)
        if not tensors or mesh.ndim != 1 or mesh.size() < 2:
            return
        distributed: Any = sys.modules["torch.distributed"]
        ranks = tuple(distributed.get_process_group_ranks(mesh.get_group()))
        if ranks not in self._contexts:
            self._contexts[ranks] = self._make_layout("sequences", ranks, 0)
        self._tell_tensors(self._contexts[ranks], tensors, "FACT_CONTEXT")

    def _make_layout(self, name: str, ranks: tuple[int, ...], number: int) -> Layout:
        clock = Clock(f"{name}/{'-'.join(map(str, ranks))}", ranks, counts_steps=False)
        self._add_clock(clock)
        return Layout(
            clock,
            str(number),
            None,
            [],
            [],
            is_reduced=False,
        )

    def _tell_tensors(self, layout: Layout, tensors: Sequence[Any], fact: str = "FACT") -> None:
        """Tell the digest of tensors that must be equal on the ranks of a layout."""
        digest = hash_digests(digest_all(tensors, threads=1))
        elements = sum(tensor.numel() for tensor in tensors)
        layout.clock.ticks += 1
        self._tell(layout, {BatchWitness.key: observe_replicated(digest, elements, fact)})


def _select_batch(inputs: Iterable[Any]) -> list[Any]:
    """Return the plain tensors among some inputs that have no gradient.

    Activations, which have one, may differ by rounding. A DTensor states its own placements.
    """
    torch: Any = sys.modules["torch"]
    tensors = []
    for tensor in inputs:
        is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
        if is_plain and not tensor.requires_grad:
            tensors.append(tensor)
    return tensors
