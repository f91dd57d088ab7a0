"""The parameters after the last steps of a training, also without an optimizer any longer.

A script may train a model, wrap the model again, and train a part: a change of the rest then comes before the end of
the training.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from syncheck.live.watching.wrappers import wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from syncheck.live.watching.changes import ParameterChanges
    from syncheck.live.watching.layouts import Layout


class LastSteps:
    """The steps of all optimizers of this rank, in their order."""

    def __init__(self) -> None:
        self._numbers = count(1)
        # The number of the last step of each layout.
        self._last: weakref.WeakKeyDictionary[Layout, int] = weakref.WeakKeyDictionary()
        # The changes of parameters that do not step now.
        self._idle: list[ParameterChanges] = []
        # The changes of the layouts whose optimizers have ended, by ranks.
        self._ended: defaultdict[tuple[int, ...], list[ParameterChanges]] = defaultdict(list)

    def note_end(self, layouts: Iterable[Layout]) -> None:
        """Note the end of an optimizer, after which its layouts end."""
        for layout in layouts:
            if layout.clock.reduces:
                self._ended[layout.clock.ranks].append(layout.changes)

    def note_before_step(self, stepping: Sequence[Layout], layouts: Iterable[Layout]) -> None:
        """Note how the script changed idle parameters, before a step.

        stepping: the layouts of one optimizer.
        layouts: all of this rank.
        """
        number = next(self._numbers)
        last = 0
        ranks = set()
        trained: set[int] = set()
        for layout in stepping:
            last = max(last, self._last.get(layout, 0))
            self._last[layout] = number
            ranks.add(layout.clock.ranks)
            trained.update(layout.identities)
        self._forget_ended(trained)
        self._idle = list(chain(*map(self._ended.__getitem__, ranks)))
        for layout in layouts:
            if _is_of(layout, ranks) and self._last.get(layout, last) < last:
                self._idle.append(layout.changes)
        for changes in self._idle:
            changes.note_before_step()

    def _forget_ended(self, trained: set[int]) -> None:
        """Forget ended layouts whose parameters have ended, too, or are trained by another optimizer."""
        for ranks, ended in self._ended.items():
            remaining = []
            for changes in ended:
                if not trained.issuperset(map(id, changes.list_parameters())):
                    remaining.append(changes)
            self._ended[ranks] = remaining

    def note_step(self) -> None:
        """Note the idle parameters after the step: it may train some that an earlier optimizer trained."""
        for changes in self._idle:
            changes.note_step()

    def hold(self, layouts: Iterable[Layout], ranks: tuple[int, ...]) -> bool:
        """Whether the models of some ranks hold the parameters of their last steps. layouts: all of this rank."""
        last = self._list_changes(layouts, ranks)
        are_unchanged = [changes.are_known and not changes.has_new() for changes in last]
        return bool(last) and all(are_unchanged)

    def note_wrapper(self, layouts: Iterable[Layout], ranks: tuple[int, ...]) -> None:
        """Note the parameters after a new wrapper has sent the parameters of the first rank to all ranks."""
        for changes in self._list_changes(layouts, ranks):
            changes.note_step()

    def _list_changes(self, layouts: Iterable[Layout], ranks: tuple[int, ...]) -> list[ParameterChanges]:
        """Return the changes of all trained parameters of some ranks, also after the end of the optimizer."""
        self._forget_ended(set())
        last = list(self._ended[ranks])
        for layout in layouts:
            if _is_of(layout, {ranks}):
                last.append(layout.changes)
        return last


def _is_of(layout: Layout, ranks: set[tuple[int, ...]]) -> bool:
    """Whether a layout is of a wrapper of some ranks."""
    return layout.clock.reduces and layout.clock.ranks in ranks


def watch_sent_states(note: Callable[[Any], None]) -> None:
    """Watch torch's function that sends parameters and buffers, as trainers do before an evaluation without a wrapper.

    note: called with the process group afterwards.
    """
    utilities: Any = sys.modules["torch.distributed.utils"]
    send = utilities._sync_module_states  # noqa: SLF001 - there is no public name

    @wrap(send)
    def send_watched(module: Any, group: Any, *arguments: Any, **named: Any) -> None:
        send(module, group, *arguments, **named)
        note(group)

    utilities._sync_module_states = send_watched  # noqa: SLF001
