"""The state of parameters that an optimizer numbers from 0: its shapes, and names for the numbers.

A reader names the numbers by the order of the model's parameters in the same file. If the model of one rank lacks a
tensor, or has an additional tensor, this order names nothing or only a part, although the optimizer is the same as on
other ranks.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.tensors.names import normalize

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.snapshots import Snapshot, Tensor

    _Shape = tuple[int, ...]

STATE = r"optimizer\.(\d+)\.([^.]+)"


def name_by_other_ranks(snapshots: Mapping[int, Snapshot]) -> Mapping[int, Snapshot]:
    """Name the numbered parameters of each rank as on other ranks, if number and shapes of the parameters agree.

    Nothing is named unless all ranks whose numbers have names agree on the names. The parameters of a partition are
    fewer than the parameters of all ranks together, or have other shapes.
    """
    model = _find_named(snapshots.values())
    if model is None:
        return snapshots

    shapes = _list_parameter_shapes(model)
    # A rank may have the prefixes of a wrapper.
    names = [*normalize(model.matched).values()]
    named: dict[int, Snapshot] = {}
    for rank, snapshot in snapshots.items():
        named[rank] = snapshot
        if _has_same_parameters(snapshot, names, shapes):
            renamed = rename_parameters(snapshot, snapshot.numbered, names)
            named[rank] = replace(renamed, numbered=(), matched=tuple(names))

    return named


def _find_named(snapshots: Iterable[Snapshot]) -> Snapshot | None:
    """Return a rank whose numbers all have names; None if no rank has all names, or two ranks disagree."""
    named: dict[tuple[str, ...], Snapshot] = {}
    for snapshot in snapshots:
        # Adapters and maps change the names of tensors.
        missing_names = set(snapshot.matched) - snapshot.tensors.keys()
        matched = () if missing_names else snapshot.matched
        if matched:
            names = normalize(matched).values()
            named[tuple(names)] = snapshot

    return next(iter(named.values())) if len(named) == 1 else None


def _list_parameter_shapes(model: Snapshot) -> list[_Shape]:
    """Return the shapes of the parameters that the optimizer of a rank numbers, in their order."""
    return [model.tensors[name].full_shape for name in model.matched]


def _has_same_parameters(snapshot: Snapshot, names: Sequence[str], shapes: Sequence[_Shape]) -> bool:
    """Whether a rank numbers as many parameters, with state of the same shapes, and has no other names for them."""
    numbered = snapshot.numbered
    if len(numbered) != len(names):
        return False

    own_names = normalize(numbered).values()
    for own_name, name, number in zip(own_names, names, numbered, strict=True):
        if own_name not in (name, number):
            return False

    shape_of_number = find_shapes(rename_parameters(snapshot, numbered, list_numbers(len(names))))
    return all(shapes[number] == shape for number, shape in shape_of_number.items())


def list_numbers(count: int) -> list[str]:
    """Return the numbers of parameters as text."""
    return [str(number) for number in range(count)]


def rename_parameters(snapshot: Snapshot, old_names: Iterable[str], new_names: Iterable[str]) -> Snapshot:
    """Rename the parameters of the optimizer, each old name to the new name at its position."""
    new_by_old = dict(zip(old_names, new_names, strict=True))
    tensors: dict[str, Tensor] = {}
    for name, tensor in snapshot.tensors.items():
        parameter, _, state = name.removeprefix("optimizer.").rpartition(".")
        is_state = name.startswith("optimizer.")
        if is_state and parameter in new_by_old:
            name = f"optimizer.{new_by_old[parameter]}.{state}"
            tensor = replace(tensor, name=name)

        tensors[name] = tensor

    return replace(snapshot, tensors=tensors)


def find_shapes(snapshot: Snapshot) -> dict[int, _Shape]:
    """Return the shape of each numbered parameter: the shape of its states, except step counters."""
    shapes: dict[int, _Shape] = {}
    for name, tensor in snapshot.tensors.items():
        match = re.fullmatch(STATE, name)
        if match is None:
            continue

        # A step counter has no dimensions, whatever the shape of its parameter.
        is_counter = tensor.shape == () and match[2] == "step"
        if not is_counter:
            number = int(match[1])
            # Other states of one number per parameter have the fewest elements.
            largest_shape = shapes.get(number, ())
            shapes[number] = max(largest_shape, tensor.full_shape, key=math.prod)

    return shapes
