"""What steps together: the parameters of one clock that one optimizer trains."""

from __future__ import annotations

import gc
import hashlib
import sys
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.live.watching.clock import Clock


class Layout:
    """The parameters of one clock that one optimizer trains.

    name: of the optimizer, equal on all ranks.
    is_reduced: whether the wrapper of the clock reduces the gradients.
    key: equal on all ranks.
    signature: of the names and shapes: ranks with another one hold other parts of the model.
    posted: the number of the last step that this rank told the other ranks about.
    repeated: steps after that one without a reduction between them.
    """

    def __init__(
        self,
        clock: Clock,
        name: str,
        optimizer: Any,
        parameters: list[Any],
        names: list[str],
        *,
        is_reduced: bool,
    ) -> None:
        self.clock = clock
        self.is_reduced = is_reduced
        self.key = f"{clock.name}/{name}"
        self.parameters, self.names = parameters, names
        self.signature = _sign(parameters, names)
        self.posted = 0
        self.repeated = 0
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Any:
        """The optimizer, which steps now."""
        return self._optimizer()

    def list_modules(self) -> list[tuple[str, Any]]:
        """Return the modules of the wrapper with their names; none without a wrapper, and for parameters outside."""
        wrapper = self.clock.wrapper if self.is_reduced else None
        return [] if wrapper is None else list(wrapper.module.named_modules())


def _sign(parameters: Sequence[Any], names: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=4)
    for parameter, name in zip(parameters, names, strict=True):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
    return digest.hexdigest()


class Step:
    """A step of a layout, or a skipped one.

    number: of the clock at the step.
    key: of its records on the board, equal on all ranks.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.number = layout.clock.ticks
        self.key = f"{layout.key}/{self.number}"


def list_trained(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer."""
    parameters: list[Any] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def make_layouts(clocks: Sequence[Clock], number: int, optimizer: Any) -> list[Layout]:
    """Return the parameters that an optimizer trains by the wrapper that contains them, and the rest.

    number: of the optimizer, equal on all ranks. Returns nothing if no wrapper contains a parameter.
    """
    trained = {id(parameter): parameter for parameter in list_trained(optimizer)}
    layouts = []
    for clock in clocks:
        wrapper = clock.wrapper
        # The script may have deleted the model.
        if wrapper is None:
            continue
        names = []
        parameters = []
        for name, parameter in wrapper.module.named_parameters():
            is_trained = trained.pop(id(parameter), None) is not None
            # Ranks may be told to keep some parameters to themselves, such as experts.
            if is_trained and name not in getattr(wrapper, "parameters_to_ignore", ()):
                names.append(name)
                parameters.append(parameter)
        if parameters:
            layouts.append(Layout(clock, str(number), optimizer, parameters, names, is_reduced=True))
    # A DTensor has its own placements, which reduce its gradient.
    outside = [parameter for parameter in trained.values() if not hasattr(parameter, "placements")]
    if layouts and outside:
        names = find_names(outside)
        layouts.append(Layout(layouts[0].clock, f"{number}+", optimizer, outside, names, is_reduced=False))
    return layouts


def find_names(parameters: Sequence[Any]) -> list[str]:
    """Return the names of parameters in the modules that hold them, without prefixes of wrappers.

    Searches the objects of the program, which takes some 0.1 s: once for an optimizer that no wrapper belongs to.
    """
    torch: Any = sys.modules["torch"]
    parents: dict[int, tuple[Any, str]] = {}
    holders: dict[int, tuple[Any, str]] = {}
    for item in gc.get_objects():
        # isinstance() would ask the object for its class, which lazy objects answer by loading what they stand for.
        if not issubclass(type(item), torch.nn.Module):
            continue
        for name, child in item.__dict__.get("_modules", {}).items():
            parents.setdefault(id(child), (item, name))
        for name, parameter in item.__dict__.get("_parameters", {}).items():
            holders.setdefault(id(parameter), (item, name))
    names = []
    for number, parameter in enumerate(parameters):
        module, name = holders.get(id(parameter), (None, f"parameter {number}"))
        while module is not None and id(module) in parents:
            module, part = parents[id(module)]
            name = f"{part}.{name}"
        names.append(name)
    return names
