"""Reductions prepared by a trainer, before a backward pass within the forward pass of a wrapper.

With manual optimization, Lightning does so with a function of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.live.watching.wrappers import wrap
from syncheck.loaded import find_loaded

if TYPE_CHECKING:
    from collections.abc import Callable

_MODULES = ("lightning.pytorch.strategies.ddp", "pytorch_lightning.strategies.ddp")
_FUNCTION = "prepare_for_backward"


class Preparations:
    """Watches the functions of loaded trainers.

    see: called with the wrapper and the tensors at the start of the backward pass.
    """

    def __init__(self, see: Callable[[Any, Any], None]) -> None:
        self._see = see
        self._watched: set[str] = set()

    def install(self) -> None:
        """Watch the loaded trainers: a trainer is imported before its wrapper is created."""
        for name in _MODULES:
            module: Any = find_loaded(name)
            prepare = getattr(module, _FUNCTION, None)
            if prepare is not None and name not in self._watched:
                self._watched.add(name)
                setattr(module, _FUNCTION, self._watch(prepare))

    def _watch(self, prepare: Any) -> Any:
        see = self._see

        @wrap(prepare)
        def prepare_watched(wrapper: Any, output: Any) -> None:
            prepare(wrapper, output)
            see(wrapper, output)

        return prepare_watched
