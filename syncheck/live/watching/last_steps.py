"""The parameters after the last steps of a training, also without an optimizer any longer.

A script may train a model, wrap the model again, and train a part: a change of the rest then comes before the end of
the training.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.live.watching.layouts import Layout


class LastSteps:
    """The steps of all optimizers of this rank, in their order."""

    def __init__(self) -> None:
        self._numbers = count(1)
        # The number of the last step of each layout.
        self._last: weakref.WeakKeyDictionary[Layout, int] = weakref.WeakKeyDictionary()
        # The layouts that did not step since the last step of the layout that steps now.
        self._idle: list[Layout] = []

    def note_before_step(self, stepping: Sequence[Layout], layouts: Iterable[Layout]) -> None:
        """Note how the script changed idle layouts, before a step.

        stepping: the layouts of one optimizer.
        layouts: all of this rank.
        """
        number = next(self._numbers)
        last = 0
        ranks = set()
        for layout in stepping:
            last = max(last, self._last.get(layout, 0))
            self._last[layout] = number
            ranks.add(layout.clock.ranks)
        self._idle = []
        for layout in layouts:
            is_of_ranks = layout.clock.reduces and layout.clock.ranks in ranks
            if is_of_ranks and self._last.get(layout, last) < last:
                layout.note_changes()
                self._idle.append(layout)

    def note_step(self) -> None:
        """Note the idle layouts after the step: it may train parameters that an earlier optimizer trained."""
        for layout in self._idle:
            layout.changes.note_step()


def hold_last_step(layouts: Iterable[Layout], ranks: tuple[int, ...]) -> bool:
    """Whether the models of some ranks hold the parameters of their last steps. layouts: all of this rank."""
    stepped = []
    for layout in layouts:
        if layout.clock.reduces and layout.clock.ranks == ranks:
            stepped += [layout.changes.are_known, not layout.changes.has_new()]
    return bool(stepped) and all(stepped)
