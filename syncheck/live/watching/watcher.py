"""The watcher of one rank: it sees wrappers and optimizer steps of an unmodified script, and posts records.

It changes nothing: no random number is drawn, no gradient or tensor is written, and no call waits for another rank,
unless `--on-desync raise` asks for it. An error in its own code ends watching with one line, and never reaches the
script.
"""

from __future__ import annotations

import os
import sys
import weakref
from functools import partial
from itertools import chain, filterfalse
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from syncheck.live.channel import world_size
from syncheck.live.watching.averages import Averages
from syncheck.live.watching.board import Board, Unusable, serve_from_start
from syncheck.live.watching.clock import Clock, name_units
from syncheck.live.watching.closures import see_gradients
from syncheck.live.watching.last_steps import LastSteps
from syncheck.live.watching.layouts import (
    Layout,
    Optimizers,
    Step,
    find_names,
    list_trained,
    make_layout_of_reductions,
    make_layouts,
)
from syncheck.live.watching.pre_hooks import LastHook
from syncheck.live.watching.preparations import Preparations
from syncheck.live.watching.records import CHANGED, INFINITE, JOINED, NO_STEP, OPTIMIZERS, RANK, SIGNATURE, SKIPPED
from syncheck.live.watching.replicated_inputs import ReplicatedInputs
from syncheck.live.watching.scalers import Scalers
from syncheck.live.watching.sharded_replicas import Callbacks, ShardedReplicas, ShardsClock
from syncheck.live.watching.wrappers import wrap
from syncheck.live.witnesses.batches import BatchWitness
from syncheck.live.witnesses.parameters import ParameterWitness
from syncheck.records import OutOfSync

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.live.witnesses.witness import Witness

# Reductions of a wrapper before its gradients are observed without a step of an optimizer.
_REDUCTIONS_WITHOUT_STEP = 2


def ignore(*_: object) -> None:
    """Do nothing."""


class Watcher:
    """Watches this process.

    witnesses: that observe each step, by name.
    print_line: prints one line for the user.
    begin_judging: called with the board at the first record, on every rank.
    """

    def __init__(
        self,
        witnesses: Mapping[str, Witness],
        print_line: Callable[[str], None],
        begin_judging: Callable[[Watcher, Board], None],
    ) -> None:
        self.witnesses = witnesses
        self.print_line = print_line
        self._begin_judging = begin_judging
        self.board: Board | None = None
        self.last_board: Board | None = None
        """The board at the end of training; None without steps, unless a launcher serves the store."""
        self.has_posted = False
        """Whether this rank has told of any step."""
        rank = os.environ.get("RANK", "")
        self.rank, self.world_size = int(rank) if rank.isdecimal() else 0, 0
        self.is_on = True
        self.clocks: list[Clock] = []
        self.steps: list[Step] = []
        """The steps that this rank told about. The judge removes them from the start."""
        self.on_first_step: Callable[[Board], None] = ignore
        """Called with the board at the first step that this rank judges."""
        self.on_alone: Callable[[], None] = ignore
        """Called when an optimizer steps that no other rank has a part in."""
        self.on_wrapper: Callable[[Clock], None] = ignore
        """Called with each new clock of a wrapper."""
        self.on_tick: Callable[[Clock], None] = ignore
        """Called after each reduction; it may raise OutOfSync."""
        self.on_end: Callable[[], None] = ignore
        """Called at the end of training; it may raise OutOfSync."""
        self.on_destroy: Callable[[], None] = ignore
        """Called before the script destroys all process groups."""
        self.on_step: Callable[[Step, Mapping[str, Any]], None] = ignore
        """Called with each posted step and its record, before the optimizer's step, and with the inputs of a forward
        pass that must be equal, before it; it may raise OutOfSync."""
        self.on_optimizer: Callable[[Layout, bool], None] = ignore
        """Called before each step of a layout, and after it with True."""
        self.comparing: Any = None
        """What connects comparisons of all replicas with the findings of the witnesses: `causes.Comparing`."""
        self._layouts: weakref.WeakKeyDictionary[Any, list[Layout]] = weakref.WeakKeyDictionary()
        self.stepping: set[Clock] = set()
        """The clocks whose parameters an optimizer of torch has stepped with."""
        # What is observed at the reductions of a wrapper whose optimizer is not torch's.
        self._reductions: weakref.WeakKeyDictionary[Any, Layout] = weakref.WeakKeyDictionary()
        self._trained: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._optimizers = Optimizers()
        self.last_steps = LastSteps()
        self.outdated: set[str] = set()
        """The keys of layouts whose parameters a clock has taken over."""
        self.averages = Averages()
        self._scalers = Scalers(self._guard, self._see_no_step)
        self._preparations = Preparations(self._see_preparation)

    def install(self) -> None:
        """Watch all wrappers, optimizers, scalers and loaders that are created from now on. Imports torch."""
        import torch
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
        from torch.optim.swa_utils import AveragedModel

        create = DistributedDataParallel.__init__
        watcher = self

        @wrap(create)
        def create_watched(wrapper: Any, *arguments: Any, **named: Any) -> None:
            create(wrapper, *arguments, **named)
            watcher.add_wrapper(wrapper)

        DistributedDataParallel.__init__ = create_watched  # type: ignore[method-assign]
        self._watch_joined_ranks(DistributedDataParallel)
        self._count_optimizers(Optimizer)
        self.averages.install(AveragedModel)
        LastHook(self._before_step).install()
        register_optimizer_step_post_hook(self._after_step)
        serve_from_start(torch.distributed)
        self._watch_end(torch.distributed)
        self._scalers.install(torch.amp.GradScaler)
        for witness in self.witnesses.values():
            witness.install(self._guard)
        if BatchWitness.name in self.witnesses:
            ReplicatedInputs(self._guard, self.clocks.append, self.tell_inputs).install()
        callbacks = Callbacks(
            self._guard, self._add_shards, self._see_forward, self._see_model_output, self._see_reduction
        )
        ShardedReplicas(callbacks).install()

    def _watch_joined_ranks(self, wrapper_class: Any) -> None:
        """A rank that has no data left calls this in the place of each backward pass of the other ranks."""
        match = wrapper_class._match_all_reduce_for_bwd_pass  # noqa: SLF001 - there is no public place
        watcher = self

        @wrap(match)
        def match_watched(wrapper: Any) -> None:
            match(wrapper)
            for clock in watcher.clocks:
                if clock.wrapper is wrapper:
                    clock.ticks += 1
                    clock.joined_at = clock.ticks
                    watcher._guard(watcher.tell_skipped, clock, JOINED)
                    watcher._guard(watcher.on_tick, clock)

        wrapper_class._match_all_reduce_for_bwd_pass = match_watched  # noqa: SLF001

    def _count_optimizers(self, optimizer_class: Any) -> None:
        create = optimizer_class.__init__
        watcher = self

        @wrap(create)
        def create_counted(optimizer: Any, *arguments: Any, **named: Any) -> None:
            create(optimizer, *arguments, **named)
            watcher._guard(watcher._optimizers.add, optimizer)

        optimizer_class.__init__ = create_counted

    def _before_step(self, optimizer: Any, arguments: Any, named: Any) -> Any:
        self._scalers.has_stepped = True
        return see_gradients(optimizer, arguments, named, self._guard, self._see_step)

    def _after_step(self, optimizer: Any, _arguments: Any, _named: Any) -> None:
        self._guard(self._note_step, optimizer)

    def _note_step(self, optimizer: Any) -> None:
        self.last_steps.note_step()
        for layout in self.find_layouts(optimizer):
            layout.changes.note_step()
            self.on_optimizer(layout, True)

    def _watch_end(self, distributed: Any) -> None:
        """When the script destroys the process group, training is over, and its models are still there."""
        destroy = distributed.destroy_process_group
        watcher = self

        @wrap(destroy)
        def destroy_watched(group: Any = None) -> None:
            # Other groups may end before the training does.
            if group in (None, distributed.group.WORLD):
                watcher.tell_end()
                watcher.on_destroy()
            destroy(group)

        distributed.destroy_process_group = destroy_watched

    def tell_end(self) -> None:
        """Tell the other ranks about the last steps and the parameters at the end of training, once."""
        self.tell_last_skipped()
        self._guard(self._tell_end, self.list_layouts())
        self._guard(self.on_end)
        self._guard(self._open_last_board)

    def _see_end(self, layouts: Sequence[Layout]) -> None:
        """See the end of an optimizer, which is no end of training if another optimizer replaces it."""
        self.last_steps.note_end(layouts)
        self._tell_end(list(filterfalse(self._optimizers.is_trained, layouts)))

    def _tell_end_with(self, owner: Any, *layouts: Layout) -> None:
        """Tell the end of layouts at the end of an object: most scripts train within a function."""
        weakref.finalize(owner, self._guard, self._see_end, layouts).atexit = False

    def _tell_end(self, layouts: Sequence[Layout]) -> None:
        witness: Any = self.witnesses.get(ParameterWitness.name)
        if witness is None:
            return
        for layout in layouts:
            # A layout without a step never trained.
            if not layout.has_ended and max(layout.posted, layout.repeated):
                layout.has_ended = True
                step = Step(layout, is_end=True)
                observations = {witness.key: witness.observe_end(step.key, layout), CHANGED: layout.describe_change()}
                self._post(step, observations)

    def _guard(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Run code of the watcher within the script."""
        if not self.is_on:
            return
        try:
            work(*arguments)
        except OutOfSync:
            # The user asked for it.
            self.is_on = False
            raise
        except Unusable as reason:
            self.stop(f"this run is not watched: {reason}")
        except Exception as error:  # noqa: BLE001 - the script goes on as if it were not watched
            self.stop(f"watching ends: {type(error).__name__}: {error}")

    def stop(self, reason: str) -> None:
        """Watch no longer, and say why."""
        self.is_on = False
        self.print_line(reason)

    def add_wrapper(self, wrapper: Any) -> None:
        """Watch a wrapper that exists. Other modules are ignored."""
        self._guard(self._add_wrapper, wrapper)

    def _add_wrapper(self, wrapper: Any) -> None:
        is_known = any(clock.wrapper is wrapper for clock in self.clocks)
        if is_known or not hasattr(wrapper, "require_backward_grad_sync"):
            return
        distributed: Any = sys.modules["torch.distributed"]
        ranks = tuple(distributed.get_process_group_ranks(wrapper.process_group))
        if len(ranks) < 2:
            return
        # All ranks create their wrappers in the same order, so the number of a wrapper is the same on all of them.
        clock = Clock(self._name_clock(ranks), ranks, wrapper)
        self._watch_forward(wrapper, clock)
        self._preparations.install()
        self._begin_clock(clock)

    def _begin_clock(self, clock: Clock) -> None:
        """Count the reductions of a model. Its ranks begin together, so a rank may wait for another one here."""
        self.clocks.append(clock)
        name_units(self.clocks)
        self._renew_layouts(clock)
        self._open_board()
        self.on_wrapper(clock)

    def _renew_layouts(self, clock: Clock) -> None:
        """Number further steps by the last wrapper of the parameters: a script may wrap a model again."""
        reduced = {id(parameter) for _, parameter in clock.list_parameters()}
        for optimizer, layouts in list(self._layouts.items()):
            if not all(map(reduced.isdisjoint, map(attrgetter("identities"), layouts))):
                self._trained.pop(optimizer, None)
        for wrapper, layout in list(self._reductions.items()):
            if not reduced.isdisjoint(layout.identities):
                layout.has_ended = True
                del self._reductions[wrapper]

    def _name_clock(self, ranks: tuple[int, ...]) -> str:
        """Return the name of the next model of some ranks, equal on all of them."""
        number = [clock.ranks for clock in self.clocks if clock.reduces].count(ranks)
        return f"{number}/{'-'.join(map(str, ranks))}"

    def _add_shards(self, clock: ShardsClock) -> None:
        """Number the steps of a model of FSDP2 by its reductions, from the first one on."""
        clock.name = self._name_clock(clock.ranks)
        # An optimizer may have stepped before, to create its state: from now on, its steps are numbered in another way.
        for optimizer, layouts in list(self._layouts.items()):
            if not all(layout.clock.reduces for layout in layouts):
                self._trained.pop(optimizer, None)
                for layout in layouts:
                    self.outdated.add(layout.key)
        self._begin_clock(clock)

    def _watch_forward(self, wrapper: Any, clock: Clock) -> None:
        compiler: Any = sys.modules["torch"].compiler

        def before_forward(module: Any, arguments: Any, named: Any) -> None:
            # A compiled program contains no hook.
            if not compiler.is_compiling():
                self._guard(self._see_forward, clock, module, (arguments, named))

        def after_forward(_module: Any, _arguments: Any, output: Any) -> None:
            if not compiler.is_compiling():
                self._guard(self._see_output, clock, output)

        wrapper.register_forward_pre_hook(before_forward, with_kwargs=True)
        wrapper.register_forward_hook(after_forward)

    def _see_forward(self, clock: Clock, module: Any, inputs: Sequence[Any]) -> None:
        torch: Any = sys.modules["torch"]
        # A forward pass alone does not show that no step follows the last reduction.
        if clock.needs_ranks():
            self.tell_skipped(clock)
        if module.training and torch.is_grad_enabled():
            for witness in self.witnesses.values():
                witness.see_forward(module, inputs)

    def _see_output(self, clock: Clock, output: Any) -> None:
        self._see_model_output(clock)
        self._watch_output(clock, output)

    def _watch_output(self, clock: Clock, output: Any) -> None:
        tell_of = partial(partial, self._guard)
        clock.watch_output(output, tell_of(self.tell_skipped, clock), tell_of(self._see_reduction, clock))

    def _see_preparation(self, wrapper: Any, output: Any) -> None:
        for clock in self.clocks:
            if clock.wrapper is wrapper:
                self._guard(self._watch_output, clock, output)

    def _see_model_output(self, clock: Clock) -> None:
        if clock.wrapper.training:
            for witness in self.witnesses.values():
                witness.see_output(clock.wrapper)

    def _see_reduction(self, clock: Clock) -> None:
        for witness in self.witnesses.values():
            witness.see_reduction(clock)
        # An optimizer of torch would have stepped by now, or accumulates without `no_sync`.
        if clock.ticks > _REDUCTIONS_WITHOUT_STEP and clock not in self.stepping:
            if clock.wrapper not in self._reductions:
                layout = self._reductions[clock.wrapper] = make_layout_of_reductions(clock, self.clocks)
                self._tell_end_with(clock.wrapper, layout)
            self._observe(self._reductions[clock.wrapper])
        self.on_tick(clock)

    def tell_skipped(self, clock: Clock, reason: str = SKIPPED) -> None:
        """Tell the other ranks that no step followed the last reduction: a rank that skips one goes on to the next."""
        for layout in list(chain(*self._layouts.values())):
            if layout.clock is clock and layout.posted < clock.ticks:
                self._post(Step(layout), {NO_STEP: reason})

    def tell_last_skipped(self) -> None:
        """Tell of steps that did not follow the last reductions, at the end of training."""
        for clock in self.clocks:
            self._guard(self.tell_skipped, clock)

    def _see_step(self, optimizer: Any, is_moved: bool) -> None:
        layouts = self.find_layouts(optimizer)
        self.last_steps.note_before_step(layouts, self.list_layouts())
        for layout in layouts:
            layout.note_optimizer(optimizer)
            layout.scaler = self._scalers.current
            layout.is_moved = is_moved
            self.stepping.add(layout.clock)
            # The steps are observed in the place of the reductions.
            if layout.clock.wrapper in self._reductions:
                self._reductions.pop(layout.clock.wrapper).has_ended = True
            if not layout.clock.reduces:
                layout.clock.ticks += 1
            self.on_optimizer(layout, False)
            self._observe(layout)

    def _observe(self, layout: Layout) -> None:
        """Tell the other ranks about a step, before it is taken."""
        # Without data, ZeroRedundancyOptimizer steps on this rank with the other ranks.
        if 0 < layout.clock.joined_at == layout.clock.ticks:
            return
        step = Step(layout)
        observations = {}
        layout.note_gradients(step.repeated)
        layout.note_changes()
        for witness in self.witnesses.values():
            observation = witness.observe(step.key, layout)
            if observation is not None:
                observations[witness.key] = observation
        self._post(step, observations)

    def _see_no_step(self, optimizer: Any) -> None:
        for layout in self.find_layouts(optimizer):
            if layout.clock.reduces and layout.clock.ticks:
                self._post(Step(layout), {NO_STEP: INFINITE})

    def _open_board(self) -> Board:
        if self.board is None:
            distributed: Any = sys.modules["torch.distributed"]
            # Kept, because the script may destroy the process group before the last record.
            self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
            self.board = Board.open()
            self._begin_judging(self, self.board)
        return self.board

    def _open_last_board(self) -> None:
        self.last_board = self.last_board or self.board or Board.open_of_launcher()

    def _post(self, step: Step, observations: Mapping[str, Any]) -> None:
        board = self._open_board()
        rank = self.rank
        layout = step.layout
        record = {RANK: rank, SIGNATURE: layout.signature, **observations, **layout.list_repeated()}
        if layout.optimizers != 1:
            record[OPTIMIZERS] = layout.optimizers
        if not step.is_end:
            layout.note_posted(step)
        board.post(step.key, record)
        self.has_posted = True
        if rank == layout.clock.ranks[0]:
            self.steps.append(step)
            self.on_first_step(board)
            self.on_first_step = ignore
        if not step.is_end:
            self.on_step(step, record)

    def tell_inputs(self, layout: Layout, observations: Mapping[str, Any]) -> None:
        """Tell the other ranks about the inputs of a forward pass."""
        self._post(Step(layout), observations)

    def list_layouts(self) -> list[Layout]:
        """Return what the optimizers of this rank step with, and what is observed at reductions."""
        return [*self._reductions.values(), *chain(*self._layouts.values())]

    def list_outside(self, ranks: tuple[int, ...]) -> dict[str, Any]:
        """Return the parameters beside the wrappers of some ranks that train with them, by name."""
        outside: dict[str, Any] = {}
        for clock in self.clocks:
            if clock.ranks == ranks:
                outside.update(clock.list_replaced())
        for layout in chain(*self._layouts.values()):
            if layout.clock.reduces and layout.clock.ranks == ranks and not layout.is_reduced:
                outside.update(layout.list_outside())
        return outside

    def list_optimizers(self, ranks: tuple[int, ...]) -> list[Any]:
        """Return the optimizers of the wrappers of some ranks, in the order of their creation."""
        optimizers = []
        for optimizer, layouts in list(self._layouts.items()):
            if any(layout.has_reduced_by(optimizer, ranks) for layout in layouts):
                optimizers.append(optimizer)
        return sorted(optimizers, key=self._optimizers.number)

    def list_layouts_of(self, optimizer: Any) -> list[Layout]:
        """Return what an optimizer stepped with."""
        return self._layouts.get(optimizer, [])

    def find_layouts(self, optimizer: Any) -> list[Layout]:
        """Return the parameters that an optimizer trains, by clock. Called when it steps."""
        identities = list(map(id, list_trained(optimizer)))
        layouts = self._layouts.get(optimizer)
        # A head that was frozen may be added later.
        if layouts is None or self._trained.get(optimizer) != identities:
            for replaced in layouts or ():
                replaced.has_ended = True
            layouts = list(map(self._optimizers.continue_layout, self._make_layouts(optimizer)))
            self._layouts[optimizer], self._trained[optimizer] = layouts, identities
            self._tell_end_with(optimizer, *layouts)
        return layouts

    def _make_layouts(self, optimizer: Any) -> list[Layout]:
        if self._optimizers.is_part(optimizer):
            return []
        layouts = make_layouts(self.clocks, self._optimizers, optimizer)
        trained = list_trained(optimizer)
        ranks = world_size()
        if ranks < 2:
            self.on_alone()
        elif not layouts and trained:
            clock = Clock("steps", tuple(range(ranks)))
            wrapped: list[Any] = []
            for wrapping in self.clocks:
                wrapped += dict(wrapping.list_parameters()).values()
            # Optimizers of wrappers have numbers of their own.
            number = self._optimizers.number(optimizer)
            number -= self._optimizers.count_earlier(optimizer, wrapped)
            self.clocks.append(clock)
            layouts.append(Layout(clock, str(number), optimizer, trained, find_names(trained), is_reduced=False))
        return layouts
