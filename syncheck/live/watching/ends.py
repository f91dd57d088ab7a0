"""Whether all trained parameters were compared at the end: a parameter may have left its optimizer before."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

    from syncheck.live.watching.layouts import Layout


class TrainedParameters:
    """The parameters that any judged step trained, and those that were equal at the end."""

    def __init__(self) -> None:
        self._layouts: dict[str, int] = {}
        # By identity.
        self._trained: dict[int, weakref.ref[Any]] = {}
        # By clock.
        self._equal: dict[str, set[int]] = defaultdict(set)

    def note_step(self, layout: Layout) -> None:
        """Note the parameters of a step. An earlier end of the same model counts no longer."""
        self._equal[layout.clock.name].clear()
        # A layout stays the same for most steps.
        if self._layouts.get(layout.key) != id(layout):
            self._layouts[layout.key] = id(layout)
            for identity, parameter in zip(layout.identities, layout.parameters, strict=True):
                self._trained[identity] = weakref.ref(parameter)

    def note_equal_end(self, layout: Layout) -> None:
        """Note that the parameters of a layout were equal after its last step."""
        self._equal[layout.clock.name].update(layout.identities)

    @property
    def are_equal_at_end(self) -> bool:
        """Whether each trained parameter that still exists was equal at the end."""
        equal: set[int] = set().union(*self._equal.values())
        left = self._trained.keys() - equal
        return all(self._trained[identity]() is None for identity in left)


def covers_all(layout: Layout, sets: Collection[Collection[int]]) -> bool:
    """Whether each rank of a step can be compared with another one.

    A wrapper needs the same parameters on all ranks; otherwise, ranks may hold different parts of a model.

    sets: the ranks with the same parameters in the step.
    """
    least = len(layout.clock.ranks) if layout.is_reduced else 2
    return len(sets) == 1 or len(min(sets, key=len)) >= least
