"""The partition of torch's ZeroRedundancyOptimizer: which rank has the state of which parameter."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Shape = tuple[int, ...]


def repeat_partition(
    parameters: Mapping[str, Shape], groups: Mapping[int, Sequence[Sequence[Shape | None]]]
) -> dict[int, list[str]]:
    """Name the parameters of each rank by ZeroRedundancyOptimizer's partition; {} if the shapes differ from it.

    Each group's parameters, sorted by size, go to the rank with the fewest elements so far (`_partition_parameters` in
    torch/distributed/optim/zero_redundancy_optimizer.py). The sort is stable, so the order of the parameters alone
    determines which rank gets which of several parameters with equal shapes. The result counts only if it has the
    number of parameters and the shapes of every rank and group. A group has all parameters with the shapes of its
    states.

    parameters: the shapes of the parameters of the model, in their order.
    groups: for each rank, the shapes of its parameters by group; None for a parameter without a state.
    """
    ranks = sorted(groups)
    groups_in_order = [groups[rank] for rank in ranks]
    group_counts = set(map(len, groups_in_order))
    if len(group_counts) > 1:
        return {}

    sizes = dict.fromkeys(ranks, 0)
    names: dict[int, list[str]] = defaultdict(list)
    for shapes_by_rank in zip(*groups_in_order, strict=True):
        new_names = _partition_group(parameters, shapes_by_rank, sizes)
        for rank, shapes in zip(ranks, shapes_by_rank, strict=True):
            if not _fit(shapes, new_names[rank], parameters):
                return {}

            names[rank] += new_names[rank]

    return names


def _partition_group(
    parameters: Mapping[str, Shape], shapes_by_rank: Iterable[Sequence[Shape | None]], sizes: dict[int, int]
) -> dict[int, list[str]]:
    """Return the parameters of one group by rank. sizes: the elements of each rank so far; changed."""
    group_shapes: set[Shape | None] = set()
    for shapes in shapes_by_rank:
        group_shapes.update(shapes)

    # A parameter without a state may have any shape.
    if None in group_shapes:
        group_shapes.update(parameters.values())

    element_counts = {name: math.prod(shape) for name, shape in parameters.items() if shape in group_shapes}
    names: dict[int, list[str]] = defaultdict(list)
    # The sort is stable, as in torch.
    for name in sorted(element_counts, key=element_counts.__getitem__, reverse=True):
        smallest_rank = min(sizes, key=sizes.__getitem__)
        names[smallest_rank].append(name)
        sizes[smallest_rank] += element_counts[name]

    return names


def _fit(shapes: Sequence[Shape | None], names: Sequence[str], parameters: Mapping[str, Shape]) -> bool:
    """Whether the states of a rank have the shapes of its parameters. None stands for a parameter without a state."""
    # The partition of the library would give the rank other parameters.
    if len(shapes) != len(names):
        return False

    pairs = zip(shapes, names, strict=True)
    return all(shape in (None, parameters[name]) for shape, name in pairs)
