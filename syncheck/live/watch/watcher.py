"""The watcher of one rank: it sees wrappers and optimizer steps of an unmodified script, and posts records.

It changes nothing: no random number is drawn, no gradient or tensor is written, and no call waits for another rank. An
error in its own code ends watching with one line, and never reaches the script.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

from syncheck.live.watch.board import Board, Unusable
from syncheck.live.watch.clock import Clock
from syncheck.live.witnesses.gradients import GradientWitness

if TYPE_CHECKING:
    from collections.abc import Callable


class Step:
    """An optimizer step that a clock has a tick for.

    layout: what steps.
    number: of the last reduction before the step.
    key: of its record on the board, equal on all ranks.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.number = layout.clock.ticks
        self.key = f"{layout.key}/{self.number}"


class Watcher:
    """Watches this process.

    print_line: prints one line for the user.
    begin_judging: called with the board at the first record, on every rank.
    """

    def __init__(self, print_line: Callable[[str], None], begin_judging: Callable[[Watcher, Board], None]) -> None:
        self._print_line = print_line
        self._begin_judging = begin_judging
        self.gradients = GradientWitness()
        self.board: Board | None = None
        self.is_on = True
        self.clocks: list[Clock] = []
        self.steps: list[Step] = []
        """The posted steps of this rank. The judge removes them from the start."""
        self._layouts: weakref.WeakKeyDictionary[Any, list[Layout]] = weakref.WeakKeyDictionary()
        self._trained: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        self._step_counts: dict[str, int] = {}

    def install(self) -> None:
        """Watch all wrappers and optimizers that are created from now on."""
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        create = DistributedDataParallel.__init__
        watcher = self

        @functools.wraps(create)
        def create_watched(wrapper: Any, *arguments: Any, **named: Any) -> None:
            create(wrapper, *arguments, **named)
            watcher._guard(watcher._add_wrapper, wrapper)

        DistributedDataParallel.__init__ = create_watched  # type: ignore[assignment, method-assign]
        register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, _arguments: Any, _named: Any) -> None:
        self._guard(self._see_step, optimizer)

    def _guard(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run code of the watcher within the script."""
        if not self.is_on:
            return
        try:
            work(*arguments)
        except Unusable as reason:
            self.stop(f"this run is not watched: {reason}")
        except Exception as error:  # noqa: BLE001 - the script goes on as if it were not watched
            self.stop(f"watching ends: {type(error).__name__}: {error}")

    def stop(self, reason: str) -> None:
        """Watch no longer, and say why."""
        self.is_on = False
        self._print_line(reason)

    def _add_wrapper(self, wrapper: Any) -> None:
        distributed: Any = sys.modules["torch.distributed"]
        ranks = tuple(distributed.get_process_group_ranks(wrapper.process_group))
        if len(ranks) < 2:
            return
        # All ranks create their wrappers in the same order, so the number of a wrapper is the same on all of them.
        name = f"{self._count_wrappers(ranks)}/{'-'.join(map(str, ranks))}"
        clock = Clock(name, wrapper, ranks)
        clock.start(self._guard)
        self.clocks.append(clock)

    def _count_wrappers(self, ranks: tuple[int, ...]) -> int:
        number = 0
        for clock in self.clocks:
            number += clock.ranks == ranks
        return number

    def _see_step(self, optimizer: Any) -> None:
        for layout in self._find_layouts(optimizer):
            count = self._step_counts.get(layout.key, 0) + 1
            self._step_counts[layout.key] = count
            # Before the first reduction, nothing is equal on all ranks.
            if layout.clock.ticks:
                self._post(Step(layout), count)

    def _post(self, step: Step, count: int) -> None:
        distributed: Any = sys.modules["torch.distributed"]
        rank = distributed.get_rank()
        if self.board is None:
            self.board = Board.open()
            self._begin_judging(self, self.board)
        record = {"r": rank, "s": count, "g": self.gradients.observe(step.key, step.layout.parameters)}
        self.board.post(step.key, record)
        if rank == step.layout.clock.ranks[0]:
            self.steps.append(step)

    def _find_layouts(self, optimizer: Any) -> list[Layout]:
        """Return the parameters that an optimizer trains, by the wrapper that reduces them."""
        trained: set[int] = set()
        for group in optimizer.param_groups:
            trained.update(map(id, group["params"]))
        layouts = self._layouts.get(optimizer)
        # A head that was frozen may be added later.
        if layouts is None or self._trained.get(optimizer) != trained:
            layouts = []
            for clock in self.clocks:
                layout = self._make_layout(clock, trained)
                if layout is not None:
                    layouts.append(layout)
            self._layouts[optimizer], self._trained[optimizer] = layouts, trained
        return layouts

    def _make_layout(self, clock: Clock, trained: set[int]) -> Layout | None:
        wrapper = clock.wrapper
        # The script has deleted the model.
        if wrapper is None:
            return None
        names = []
        parameters = []
        for name, parameter in wrapper.module.named_parameters():
            if id(parameter) in trained:
                names.append(name)
                parameters.append(parameter)
        if not parameters:
            return None
        number = 0
        for key in self._step_counts:
            number += key.startswith(f"{clock.name}/")
        return Layout(clock, number, parameters, names)


class Layout:
    """The parameters of one wrapper that one optimizer trains.

    number: of the optimizer among all that train parameters of the wrapper, in the order of their first steps.
    key: equal on all ranks.
    """

    def __init__(self, clock: Clock, number: int, parameters: list[Any], names: list[str]) -> None:
        self.clock = clock
        self.key = f"{clock.name}/{number}"
        self.parameters, self.names = parameters, names
