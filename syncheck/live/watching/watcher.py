"""The watcher of one rank: it sees wrappers and optimizer steps of an unmodified script, and posts records.

It changes nothing: no random number is drawn, no gradient or tensor is written, and no call waits for another rank,
unless `--on-desync raise` asks for it. An error in its own code ends watching with one line, and never reaches the
script.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

from syncheck.live.channel import world_size
from syncheck.live.watching.board import Board, Unusable
from syncheck.live.watching.clock import Clock
from syncheck.live.watching.layouts import Layout, Step, find_names, list_trained, make_layouts
from syncheck.live.watching.records import INFINITE, NO_STEP, RANK, REPEATED, SIGNATURE, SKIPPED
from syncheck.records import OutOfSync

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.live.witnesses.witness import Witness


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
        self._rank = 0
        self.is_on = True
        self.clocks: list[Clock] = []
        self.steps: list[Step] = []
        """The steps that this rank told about. The judge removes them from the start."""
        self.on_first_step: Callable[[Board], None] = ignore
        """Called with the board at the first step that this rank judges."""
        self.on_wrapper: Callable[[Clock], None] = ignore
        """Called with each new clock of a wrapper."""
        self.on_tick: Callable[[Clock], None] = ignore
        """Called after each reduction; it may raise OutOfSync."""
        self.on_step: Callable[[Step, Mapping[str, Any]], None] = ignore
        """Called with each posted step and its record, before the optimizer's step; it may raise OutOfSync."""
        self._layouts: weakref.WeakKeyDictionary[Any, list[Layout]] = weakref.WeakKeyDictionary()
        self._trained: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        # The optimizers by the order of their creation, which is the same on all ranks.
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._optimizers = 0
        # Whether an optimizer stepped since the scaler was asked to.
        self._has_stepped = False

    def install(self) -> None:
        """Watch all wrappers, optimizers, scalers and loaders that are created from now on. Imports torch."""
        import torch
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

        create = DistributedDataParallel.__init__
        watcher = self

        @functools.wraps(create)
        def create_watched(wrapper: Any, *arguments: Any, **named: Any) -> None:
            create(wrapper, *arguments, **named)
            watcher.add_wrapper(wrapper)

        DistributedDataParallel.__init__ = create_watched  # type: ignore[assignment, method-assign]
        self._count_optimizers(Optimizer)
        register_optimizer_step_pre_hook(self._before_step)
        self._watch_scalers(torch.amp.GradScaler)
        for witness in self.witnesses.values():
            witness.install(self._guard)

    def _count_optimizers(self, optimizer_class: Any) -> None:
        create = optimizer_class.__init__
        watcher = self

        @functools.wraps(create)
        def create_counted(optimizer: Any, *arguments: Any, **named: Any) -> None:
            watcher._guard(watcher._number, optimizer)
            create(optimizer, *arguments, **named)

        optimizer_class.__init__ = create_counted

    def _number(self, optimizer: Any) -> int:
        """Return the number of an optimizer, equal on all ranks."""
        if optimizer not in self._numbers:
            self._numbers[optimizer] = self._optimizers
            self._optimizers += 1
        return self._numbers[optimizer]

    def _watch_scalers(self, scaler_class: Any) -> None:
        """With infinite gradients a scaler does not call the optimizer, whose hook then does not run."""
        step = scaler_class.step
        watcher = self

        @functools.wraps(step)
        def step_watched(scaler: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
            watcher._has_stepped = False
            result = step(scaler, optimizer, *arguments, **named)
            if not watcher._has_stepped:
                watcher._guard(watcher._see_no_step, optimizer)
            return result

        scaler_class.step = step_watched

    def _before_step(self, optimizer: Any, _arguments: Any, _named: Any) -> None:
        self._has_stepped = True
        self._guard(self._see_step, optimizer)

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
        number = [clock.ranks for clock in self.clocks if clock.reduces].count(ranks)
        clock = Clock(f"{number}/{'-'.join(map(str, ranks))}", ranks, wrapper)
        clock.is_first = number == 0
        self._watch_forward(wrapper, clock)
        self.clocks.append(clock)
        self.on_wrapper(clock)

    def _watch_forward(self, wrapper: Any, clock: Clock) -> None:
        compiler: Any = sys.modules["torch"].compiler

        def before_forward(module: Any, arguments: Any, named: Any) -> None:
            # A compiled program contains no hook.
            if not compiler.is_compiling():
                self._guard(self._see_forward, clock, module, (arguments, named))

        def after_forward(module: Any, _arguments: Any, output: Any) -> None:
            if not compiler.is_compiling():
                self._guard(self._see_output, clock, module, output)

        wrapper.register_forward_pre_hook(before_forward, with_kwargs=True)
        wrapper.register_forward_hook(after_forward)

    def _see_forward(self, clock: Clock, module: Any, inputs: Sequence[Any]) -> None:
        self.tell_skipped(clock)
        torch: Any = sys.modules["torch"]
        if module.training and torch.is_grad_enabled():
            for witness in self.witnesses.values():
                witness.see_forward(module, inputs)

    def _see_output(self, clock: Clock, module: Any, output: Any) -> None:
        if module.training:
            for witness in self.witnesses.values():
                witness.see_output(module)
        clock.watch_output(output, lambda: self._guard(self.on_tick, clock))

    def tell_skipped(self, clock: Clock) -> None:
        """Tell the other ranks that no step followed the last reduction: a rank that skips one goes on to the next."""
        for layouts in list(self._layouts.values()):
            for layout in layouts:
                if layout.clock is clock and layout.posted < clock.ticks:
                    self._post(Step(layout), {NO_STEP: SKIPPED})

    def tell_last_skipped(self) -> None:
        """Tell of steps that did not follow the last reductions, at the end of the script."""
        for clock in self.clocks:
            if clock.reduces:
                self._guard(self.tell_skipped, clock)

    def _see_step(self, optimizer: Any) -> None:
        for layout in self.find_layouts(optimizer):
            if not layout.clock.reduces:
                layout.clock.ticks += 1
            # Before the first reduction, nothing is equal on all ranks.
            if layout.clock.ticks == layout.posted:
                layout.repeated += layout.posted > 0
            else:
                step = Step(layout)
                observations = {}
                for witness in self.witnesses.values():
                    observation = witness.observe(step.key, layout)
                    if observation is not None:
                        observations[witness.key] = observation
                self._post(step, observations)

    def _see_no_step(self, optimizer: Any) -> None:
        for layout in self.find_layouts(optimizer):
            if layout.clock.reduces and layout.clock.ticks:
                self._post(Step(layout), {NO_STEP: INFINITE})

    def _post(self, step: Step, observations: Mapping[str, Any]) -> None:
        if self.board is None:
            distributed: Any = sys.modules["torch.distributed"]
            # Kept, because the script may destroy the process group before the last record.
            self._rank = distributed.get_rank()
            self.board = Board.open()
            self._begin_judging(self, self.board)
        rank = self._rank
        layout = step.layout
        layout.posted = step.number
        record = {RANK: rank, SIGNATURE: layout.signature, **observations}
        if layout.repeated:
            record[REPEATED] = layout.repeated
            layout.repeated = 0
        self.board.post(step.key, record)
        if rank == layout.clock.ranks[0]:
            self.steps.append(step)
            self.on_first_step(self.board)
            self.on_first_step = ignore
        self.on_step(step, record)

    def list_wrappers(self, ranks: tuple[int, ...]) -> list[Any]:
        """Return the wrappers of some ranks, in the order of their creation."""
        wrappers = [clock.wrapper for clock in self.clocks if clock.ranks == ranks]
        return [wrapper for wrapper in wrappers if wrapper is not None]

    def list_optimizers(self, ranks: tuple[int, ...]) -> list[Any]:
        """Return the optimizers of the wrappers of some ranks, in the order of their creation."""
        optimizers = []
        for optimizer, layouts in list(self._layouts.items()):
            if any(layout.clock.reduces and layout.clock.ranks == ranks for layout in layouts):
                optimizers.append(optimizer)
        return sorted(optimizers, key=self._number)

    def find_layouts(self, optimizer: Any) -> list[Layout]:
        """Return the parameters that an optimizer trains, by clock."""
        identities = list(map(id, list_trained(optimizer)))
        layouts = self._layouts.get(optimizer)
        # A head that was frozen may be added later.
        if layouts is None or self._trained.get(optimizer) != identities:
            layouts = self._make_layouts(optimizer)
            self._layouts[optimizer], self._trained[optimizer] = layouts, identities
        return layouts

    def _make_layouts(self, optimizer: Any) -> list[Layout]:
        number = self._number(optimizer)
        layouts = make_layouts(self.clocks, number, optimizer)
        trained = list_trained(optimizer)
        ranks = world_size()
        if not layouts and trained and ranks > 1:
            clock = Clock("steps", tuple(range(ranks)))
            self.clocks.append(clock)
            layouts.append(Layout(clock, str(number), optimizer, trained, find_names(trained), is_reduced=False))
        return layouts
