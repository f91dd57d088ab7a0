"""The averaged copies of the models of a watched run, which torch's `AveragedModel` keeps."""

from __future__ import annotations

import weakref
from typing import Any

from syncheck.live.watching.wrappers import wrap


class Averages:
    """The averaged copies of this rank."""

    def __init__(self) -> None:
        # By the order of their creation.
        self._references: list[weakref.ref[Any]] = []

    def install(self, average_class: Any) -> None:
        """Note the copies that are created from now on."""
        create = average_class.__init__
        references = self._references

        @wrap(create)
        def create_noted(average: Any, *arguments: Any, **named: Any) -> None:
            create(average, *arguments, **named)
            references.append(weakref.ref(average))

        average_class.__init__ = create_noted

    def list_of(self, wrapper: Any) -> list[Any]:
        """Return the averaged copies of the model of a wrapper, in the order of their creation."""
        shapes = _list_shapes(wrapper)
        averages = []
        for reference in self._references:
            average = reference()
            if average is not None and _list_shapes(average) == shapes:
                averages.append(average)
        return averages


def _list_shapes(module: Any) -> list[Any]:
    return [parameter.shape for parameter in module.parameters()]
